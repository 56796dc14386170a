"""What a run is put together from, looked at before its first pass."""

from __future__ import annotations

import json

import pytest
import torch

from penjing.base import config
from penjing.base.config import parse_overrides
from penjing.data.tokenizer.train import train_tokenizer
from penjing.model.init import initialise
from penjing.model.lora import add_adapter
from penjing.model.transformer import Transformer
from penjing.optim.router_bias_update import RouterBalance
from penjing.parallel.single import Single
from penjing.plan import hardware
from penjing.train import build, build_model
from penjing.train.config import Run
from penjing.train.stages.base import DatasetSize

SHAPE = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}


class Enough(Exception):
    """The plan would be made now."""


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """The parts of a run with these settings, as they are when its plan is to be made."""
    texts = [f"text number {number} of a few" for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts, 300).save(tmp_path / "tokenizer")

    def enough(built, size, parts, **more):
        raise Enough(parts)

    monkeypatch.setattr(build, "plan", enough)
    # A CPU's matmuls of float16 are too slow to be timed here.
    monkeypatch.setattr(hardware, "peak", lambda *given: None)

    def make(*words):
        common = [f"model.{name}={value}" for name, value in SHAPE.items()]
        common += [f"data.train={tmp_path / 'texts.jsonl'}", f"tokenizer.path={tmp_path / 'tokenizer'}"]
        common += ["data.seq_len=16", "data.val_fraction=0.3", "batch.size=2", f"out={tmp_path / 'out'}"]
        run = config.resolve(Run, parse_overrides([*common, *words]))
        strategy = Single(torch.device("cpu"))
        with pytest.raises(Enough) as found:
            build.prepare_run(run, strategy)
        return found.value.args[0]

    return make


def test_float16_scales_its_loss_and_saves_the_scale(parts):
    made = parts("compute.dtype=float16")
    stateful = made.save.__self__.stateful
    assert stateful["scaler"] is made.strategy.scaler is made.guard.scaler
    assert stateful["scaler"].state()["scale"] == 65536


def test_float32_scales_nothing(parts):
    made = parts("compute.dtype=float32")
    assert made.strategy.scaler is None
    assert made.save.__self__.stateful.keys() == {"source", "meter", "guard", "best"}


def test_settings_reach_their_parts(parts):
    made = parts("compute.dtype=float32", "max_grad_norm=0.3", "max_steps=7", "checkpoint.every=5", "optimizer=adamw",
                 "optimizer.learning_rate=0.02", "optimizer.beta2=0.7")  # fmt: skip
    assert (made.max_grad_norm, made.num_steps, made.save_every) == (0.3, 7, 5)
    (adamw,) = made.optimizers
    assert {group["peak"] for group in adamw.param_groups} == {0.02}
    assert {group["betas"] for group in adamw.param_groups} == {(0.9, 0.7)}


@pytest.mark.parametrize(("words", "rate"), [((), 0.25), (("lora.rank=2",), 0.0)])
def test_routers_beneath_adapters_stay_as_they_are(parts, monkeypatch, words, rate):
    def fresh(stage, checkpoint):
        run = stage.run
        model = Transformer(run.model)
        initialise(model, 0)
        if run.lora.rank:
            add_adapter(model, run.lora)
        return model, {}

    monkeypatch.setattr(build_model, "_with_weights", fresh)
    mixture = [f"model.{name}" for name in ("architecture=glm4_moe", "num_experts=4", "num_experts_per_tok=2")]
    made = parts(
        "compute.dtype=float32", *mixture, "model.moe_intermediate_size=16", "router.bias_update_rate=0.25", *words
    )
    (balance,) = (each for each in made.optimizers if isinstance(each, RouterBalance))
    for layer in balance.layers:
        layer.load_E[0] = 9.0
    balance.step()
    moved = [layer.router.correction.abs().max().item() for layer in balance.layers]
    assert moved and moved == pytest.approx([rate] * len(moved))


def test_an_epoch_is_taken_to_its_end():
    """Of 10 rows, four a step: the third step takes the two that are left and two of the next epoch."""
    size = DatasetSize(unit="rows", units_per_epoch=10, tokens_per_unit=16, seq_len=16, num_keys=8, padding_fraction=0)
    run = config.resolve(Run, parse_overrides(["batch.size=4", "epochs=1"]))
    assert build.num_steps(run, size) == 3
    assert build.num_steps(config.resolve(Run, parse_overrides(["batch.size=4", "epochs=2"])), size) == 5
