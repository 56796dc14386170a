"""Baselines train with what their record says, and that is what they were asked for: read from their own optimizers."""

import importlib.util
import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from compare.comparison import BASELINES, FOLDER

from penjing.data.tokenizer.train import train_tokenizer

# No default of any of them, and not each other's: what is read back can only have come from the spec.
WANTED = {"learning_rate": 3.7e-4, "weight_decay": 0.13, "max_grad_norm": 0.7}
NAMES = ("trainer", "trainer-packed", "minimind-style")
MODEL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def module_of(name):
    return f"{FOLDER}.{BASELINES['pretrain'][name][0]}"


pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")


@pytest.fixture(scope="module")
def files(tmp_path_factory, toy):
    folder = tmp_path_factory.mktemp("files")
    texts = [json.loads(line)["text"] for line in (toy / "pretrain.jsonl").read_text().splitlines()][:80]
    train_tokenizer(iter(texts), MODEL["vocab_size"]).save(folder / "tokenizer")
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    ids_NT = np.random.default_rng(1).integers(0, MODEL["vocab_size"], (4, 17))
    np.savez(folder / "rows.npz", ids_NT=ids_NT, document_NT=np.zeros((4, 16), dtype=np.int64))
    places = {"text": "text.jsonl", "tokenizer": "tokenizer", "rows": "rows.npz"}
    return {name: str(folder / place) for name, place in places.items()}


@pytest.fixture
def spec(spec, files):
    return replace(spec, setting="step", shape=MODEL, seq_len=16, steps=2, warmup=0, **WANTED, **files)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_baseline_trains_with_the_rate_and_the_dtype_that_it_was_asked_for(name, dtype, spec, tmp_path, in_process):
    one = in_process(module_of(name), replace(spec, dtype=dtype), tmp_path / "trial")
    told = one["settings"]
    assert told["optimizer"] == "AdamW"
    assert told["learning_rate"] == pytest.approx(3.7e-4)
    assert told["weight_decay"] == pytest.approx(0.13)
    assert told["betas"] == [0.9, 0.95]
    assert told["max_grad_norm"] == pytest.approx(0.7)
    assert told["dtype"] == dtype  # of a linear layer's output, not of a setting
    assert told["compiled"] is False
    assert len(one["step_seconds"]) == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_baseline_is_compiled_only_where_it_is_asked_for(name, compiled, spec, tmp_path, in_process, monkeypatch):
    seen = []

    class Compiled(torch.nn.Module):  # in the place of torch's, which takes half a minute
        def __init__(self, model):
            super().__init__()
            self._orig_mod = model
            seen.append(model)

        def forward(self, *args, **kwargs):
            return self._orig_mod(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", lambda model, *_, **__: Compiled(model))
    one = in_process(module_of(name), replace(spec, compiled=compiled), tmp_path / "trial")
    assert one["settings"]["compiled"] is compiled
    assert bool(seen) is compiled


def test_a_pilot_takes_enough_steps_and_evaluates_nothing(spec, tmp_path, in_process):
    """Own path, for no time at all: the number of steps decides. held_out is a file that is not there."""
    pilot = replace(spec, setting="pilot", seconds=0.0, steps=5)
    for name in NAMES[1:]:
        one = in_process(module_of(name), pilot, tmp_path / name)
        assert (len(one["step_seconds"]), one["curve"]) == (5, [])


def test_on_a_gpu_the_trainer_has_tf32_and_loading_processes(spec, monkeypatch):
    import transformers
    from compare.baselines.hf_trainer import arguments

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    on_gpu, on_cpu = arguments(replace(spec, device="cuda")), arguments(spec)
    assert (on_gpu["tf32"], on_gpu["dataloader_pin_memory"], on_gpu["use_cpu"]) == (True, True, False)
    assert on_gpu["dataloader_num_workers"] >= 2
    assert (on_cpu["tf32"], on_cpu["dataloader_num_workers"], on_cpu["use_cpu"]) == (None, 0, True)
    for each in (on_gpu, on_cpu):
        assert each["dataloader_drop_last"] is True  # a smaller last batch would be compiled anew
        assert set(each) <= {field.name for field in fields(transformers.TrainingArguments)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert arguments(replace(spec, device="cuda"))["tf32"] is None  # it would be refused
