"""Every preset, at two layers and a small vocabulary: logits equal those of its stock class, both ways."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penjing.base import config as settings
from penjing.convert.hf_config import hf_config
from penjing.convert.names import from_hf, to_hf
from penjing.convert.shape import config_from_hf
from penjing.model import presets
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

NAMES = [*presets.PRESETS, "ladder-1m", "ladder-100m", "ladder-1b"]
TOKENIZER = SimpleNamespace(end_of_text=0, message_end=2)


def shape(name: str) -> ModelConfig:
    layers = {"vocab_size": 300, "num_hidden_layers": 2}
    return settings.resolve(ModelConfig, {"preset": name, **layers})


def stock(config: ModelConfig):
    written = hf_config(config, TOKENIZER)
    made = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


# A billion parameters take seconds, and so do the mixtures; tiny-moe is one of the others.
LARGE = ("llama3.2-1b", "tinyllama-1.1b", "ladder-1b", "198m-moe", "145m-moe", "qwen3-0.6b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in LARGE else ()) for name in NAMES]
)
def test_logits_equal_those_of_the_stock_class_both_ways(name):
    config = shape(name)
    ids_BT = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    theirs = stock(config)
    ours = Transformer(config).eval()
    initialise(ours, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in ours.parameters():  # fresh blocks say nothing
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(0, 0.02, generator=generator)
        written = to_hf(ours.state_dict(), config)
        theirs.load_state_dict(fused(written, theirs), strict=False)
        theirs.tie_weights()
        there = float((theirs(ids_BT).logits - ours(ids_BT)).abs().max())
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 + (parameter.ndim == 1))
        read = config_from_hf(theirs.config.to_dict(), "stock")
        state, read = from_hf(dict(theirs.state_dict()), read)
        again = Transformer(read).eval()
        again.load_state_dict(state)
        here = float((theirs(ids_BT).logits - again(ids_BT)).abs().max())
    assert there < 1e-5
    assert here < 1e-5


def fused(written, theirs):
    """What a file holds expert by expert, as the stock class holds it in memory."""
    wanted = theirs.state_dict()
    made = {name: value for name, value in written.items() if name in wanted}
    for name, value in wanted.items():
        if name in made or ".experts." not in name:
            continue
        prefix, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        rows = [
            torch.cat([written[f"{prefix}.{expert}.{part}.weight"] for part in parts])
            for expert in range(value.shape[0])
        ]
        made[name] = torch.stack(rows)
    missing = {name for name in wanted if name not in made} - {"lm_head.weight"}
    assert not missing
    return made
