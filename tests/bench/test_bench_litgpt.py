"""LitGPT as a peer of pretraining: left out when it is not there, else the stock model's twin, which learns."""

import importlib.util
import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from penjing.bench import pretrain as bench
from penjing.bench.peers import NEEDS
from penjing.bench.pretrain import Asked, compare
from penjing.bench.race import RaceSpec
from penjing.commands.bench_pretrain import QUICK, bench_pretrain

SHAPE = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rope_theta": 10_000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rms_norm_eps": 1e-6,
}


@pytest.fixture
def litgpt():
    for package in NEEDS["litgpt"].split():
        pytest.importorskip(package, reason=f"the peer litgpt needs {package}; docs/speed.md says how to install it")


def race_spec(**more):
    paths = dict.fromkeys(("text", "tokenizer", "run", "held_out", "rows", "out"), "unread")
    numbers = {"threads": 1, "batch": 2, "row_tokens": 64, "seconds": 1.0, "looks": 1, "steps": 3, "warmup": 1}
    optimizer = {"learning_rate": 1e-3, "clip_norm": 1.0, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return RaceSpec(kind="path", **{**paths, "shape": {}, **numbers, **optimizer, "device": "cpu", **more})


def test_it_is_left_out_when_a_part_of_it_is_missing(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: found("json") if name != "litdata" else None)
    steps = {"step_seconds": [1.0] * 3, "step_cpu_seconds": [1.0] * 3, "step_tokens": [1] * 3}
    sizes = {"peak_bytes": 1, "peak_bytes_after_imports": 1, "process_seconds": 1.0}
    times = {"startup_seconds": 1.0, "first_step_seconds": 1.0}
    ends = {"seconds": 1.0, "tokens": 0.0, "bits_per_byte": 8.0}, {"seconds": 2.0, "tokens": 0.0, "bits_per_byte": 2.0}
    printed = {**steps, **sizes, **times, "curve": list(ends), "options": []}
    console = Console(file=io.StringIO(), width=250)
    asked = Asked(peers=("litgpt",), trials=1, steps=3)
    result = compare(asked, race_spec(), tmp_path, console, lambda *_: printed)
    assert result["left_out"] == {"litgpt": "needs litdata, which is not installed"}
    assert list(result["path"]["medians"]) == ["penjing", "penjing-adamw"]
    assert "litgpt needs litdata, which is not installed: left out" in console.file.getvalue()


@pytest.mark.parametrize("tied", [True, False])
def test_its_model_is_the_stock_one(litgpt, tied):
    from litgpt import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_qwen_3

    from penjing.bench.peers.hf_model import stock_model
    from penjing.bench.peers.litgpt import Stock, model_config

    spec = race_spec(shape={**SHAPE, "tie_word_embeddings": tied})
    stock = stock_model(spec).eval()
    theirs = Stock(GPT(model_config(spec))).eval()
    weights = {}
    copy_weights_qwen_3(theirs.model.config, {}, weights, stock.state_dict())
    theirs.model.load_state_dict(weights)
    ids_BT = torch.randint(SHAPE["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids_BT).logits, stock(input_ids=ids_BT).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)  # it starts many processes
def test_it_learns_from_the_same(litgpt, toy):
    model = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_size": 16}
    size = replace(QUICK, model={**model, "mlp_size": 48, "vocabulary_size": 400}, row_tokens=64, batch=4, held_out=16)
    asked = Asked(peers=("litgpt",), trials=1, seconds=1.0, looks=2, steps=3, threads=1, may_compile=False)
    console = Console(file=io.StringIO(), width=250)
    result = bench_pretrain(toy / "pretrain.jsonl", asked, size, console, "compute.dtype=float32")
    assert result["left_out"] == {}
    [path], [step] = result["path"]["trials"]["litgpt"], result["step"]["trials"]["litgpt"]
    assert path["curve"][-1]["bits_per_byte"] < path["curve"][0]["bits_per_byte"]
    assert path["curve"][-1]["tokens"] == 4 * 64 * len(path["step_tokens"])
    assert step["step_tokens"] == [4 * 64] * 3
    # Of the same untrained shape, though each initialises in its own way.
    ours = result["path"]["trials"]["penjing"][0]["curve"][0]["bits_per_byte"]
    assert path["curve"][0]["bits_per_byte"] == pytest.approx(ours, abs=0.5)
