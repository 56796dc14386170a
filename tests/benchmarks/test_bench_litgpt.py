"""LitGPT as a baseline of pretraining: the stock model's twin, which learns. Left out where it is not installed."""

from dataclasses import replace

import pytest
import torch
from compare.comparison import BASELINES
from compare.run import run_comparison

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
    for package in BASELINES["pretrain"]["litgpt"][1].split():
        pytest.importorskip(package, reason=f"litgpt needs {package}; docs/speed.md says how to install it")


@pytest.mark.parametrize("tied", [True, False])
def test_its_model_is_the_stock_one(litgpt, spec, tied):
    from compare.baselines.litgpt import LogitsModel, model_config
    from compare.baselines.stock import stock_model
    from litgpt import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_qwen_3

    spec = replace(spec, seq_len=64, shape={**SHAPE, "tie_word_embeddings": tied})
    stock = stock_model(spec).eval()
    theirs = LogitsModel(GPT(model_config(spec))).eval()
    weights = {}
    copy_weights_qwen_3(theirs.model.config, {}, weights, stock.state_dict())
    theirs.model.load_state_dict(weights)
    ids_BT = torch.randint(SHAPE["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids_BT).logits, stock(input_ids=ids_BT).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)  # it starts many processes
def test_it_learns_from_the_same(litgpt, toy, quiet, tiny_quick):
    how = {"trials": 1, "seconds": 1.0, "steps": 3, "threads": 1, "may_compile": False, "quick": True}
    words = {"method": "pretrain", "run": None, "baseline": "litgpt", "settings": ["compute.dtype=float32"]}
    record = run_comparison(quiet, data=toy / "pretrain.jsonl", **words, **how)
    assert record["left_out"] == {}
    [path], [step] = record["path"]["trials"]["litgpt"], record["step"]["trials"]["litgpt"]
    assert path["curve"][-1]["bits_per_byte"] < path["curve"][0]["bits_per_byte"]
    assert path["curve"][-1]["tokens"] == 4 * 64 * len(path["step_units"])
    assert step["step_units"] == [4 * 64] * 3
    # Of the same untrained shape, though each initialises in its own way.
    ours = record["path"]["trials"]["penjing"][0]["curve"][0]["bits_per_byte"]
    assert path["curve"][0]["bits_per_byte"] == pytest.approx(ours, abs=0.5)
