"""The rule that decides, the same numbers compiled, and nothing compiled twice."""

import os

import pytest
import torch

from penjing.base.errors import UserError
from penjing.infer.batched_sampler import Request, rollout
from penjing.infer.generate import generate
from penjing.infer.sample import Sampling
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.linear import set_compute_dtype
from penjing.model.transformer import Transformer
from penjing.train import compile_policy as compiling
from penjing.train.compile_policy import compile_model, decide, missing_compiler

CPU = torch.device("cpu")
SHAPE = {"vocabulary_size": 64, "hidden_size": 32, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_size": 16}


def small(**more):
    model = Transformer(ModelConfig(**SHAPE, mlp_size=64, **more))
    initialise(model, 0)
    return model


def test_only_long_runs_are_compiled(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "")
    monkeypatch.setattr(compiling.library, "unavailable_reason", lambda: "no kernels")
    model = small()
    border = compiling.WORTH * compiling.COST_SECONDS["cpu"] / (1 - 1 / compiling.GAIN["cpu"])
    assert decide("auto", CPU, model, border * 0.99).how == "off"
    assert decide("auto", CPU, model, border * 1.01).how == "blocks"
    assert decide("off", CPU, model, 1e9).how == "off"
    assert decide("whole", CPU, model, 1.0).how == "whole"
    monkeypatch.setattr(compiling.library, "unavailable_reason", lambda: "")
    decision = decide("auto", CPU, model, 1e9)
    assert decision.how == "off" and "kernels of our own are faster" in decision.why
    assert decide("blocks", CPU, model, 1.0).how == "blocks"


def test_passes_that_are_no_static_graph_are_not_compiled(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "")
    decision = decide("auto", torch.device("cuda"), small(), 1e9, no_static_graph="shapes differ")
    assert (decision.how, decision.why) == ("off", "shapes differ")
    with pytest.raises(UserError, match="cannot compile; got shapes differ"):
        decide("blocks", CPU, small(), 1e9, no_static_graph="shapes differ")


def test_without_a_compiler_it_is_off_and_said(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    assert "no C++ compiler" in missing_compiler(CPU)
    decision = decide("auto", CPU, small(), 1e9)
    assert decision.how == "off"
    assert "no C++ compiler" in decision.why
    with pytest.raises(UserError, match="cannot compile"):
        decide("blocks", CPU, small(), 1e9)


def test_graphs_need_cuda(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "")
    with pytest.raises(UserError, match="CUDA graphs"):
        decide("graphs", CPU, small(), 1e9)


def test_mixtures_are_compiled_where_all_experts_go_through_one_product(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "")
    mixture, cuda = (
        small(architecture="qwen3_moe", experts=4, experts_per_token=2, expert_size=32),
        torch.device("cuda"),
    )
    set_compute_dtype(mixture, torch.bfloat16)
    assert decide("auto", CPU, mixture, 1e9).how == "off"
    assert decide("auto", cuda, mixture, 1e9).how == "blocks"
    set_compute_dtype(mixture, torch.float16)
    assert decide("auto", cuda, mixture, 1e9).how == "off"


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_compiler(CPU)), reason="no compiler")
def test_compiled_blocks_compute_the_same_and_are_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, compiled = small(), small()
    compile_model(compiled, "blocks")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        ids_BT = torch.randint(64, (2, 96), generator=generator)
        document_BT = (torch.rand(2, 96, generator=generator) < 0.05).long().cumsum(1)
        scored = dict(target_N=ids_BT.flatten(), weight_N=torch.ones(192))
        for model in (plain, compiled):
            model.zero_grad()
            model(ids_BT, document_BT, **scored).backward()
        if step == 0:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_compiler(CPU)), reason="no compiler")
def test_what_is_written_while_a_model_learns_is_not_compiled(monkeypatch, tmp_path):
    """Every token would be another shape, and dynamo gives up after eight of them."""
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, compiled = small(), small()
    compile_model(compiled, "blocks")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prompts = [[1], [2, 3], [4, 5, 6], [7] * 20]
    written = [generate(model, prompts, max_new_tokens=12, stop=(), rows=1) for model in (plain, compiled)]
    assert written[0] == written[1]
    request = Request(prompt=[1, 2, 3], seeds=[1, 2])
    rollout(compiled, [request], max_new_tokens=12, stop=(), sampling=Sampling())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    compiled(torch.zeros(1, 4, dtype=torch.long))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
