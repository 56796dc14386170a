"""The rule that decides, the same numbers compiled, and nothing compiled twice."""

import os
from functools import partial

import pytest
import torch
from user_errors import raises_user_error

from penjing import devices
from penjing.base import config
from penjing.base.errors import UserError
from penjing.devices.cpu import Cpu
from penjing.devices.cuda import Cuda
from penjing.infer.generate import generate, sample_batch
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer
from penjing.train import compile_policy as compiling
from penjing.train.compile_policy import compile_model, decide
from penjing.train.config import Run

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def small(**more):
    model = Transformer(ModelConfig(**SHAPE, intermediate_size=64, **more))
    initialise(model, 0)
    return model


def choice(setting, device, seconds, *, bfloat16=False, **more):
    return decide(config.resolve(Run, {"compute": {"compile": setting}, **more}), device, seconds, bfloat16=bfloat16)


def test_only_long_runs_are_compiled(monkeypatch):
    cuda = torch.device("cuda")
    for kind in (Cpu, Cuda):
        monkeypatch.setattr(kind, "missing_compiler", lambda self: "")
    border = compiling.MIN_PAYOFF * Cuda.compile_seconds / (1 - 1 / Cuda.compile_gain)
    assert choice("auto", cuda, border * 0.99).how == "off"
    assert choice("auto", cuda, border * 1.01).how == "blocks"
    assert choice("off", cuda, 1e9).how == "off"
    assert choice("auto", CPU, 1e9).how == "off"
    assert choice("blocks", CPU, 1.0).how == "blocks"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"objective": {"name": "preference"}, "data": {"format": "preferences"}}, "another shape"),
        ({"objective": {"name": "policy"}, "data": {"format": "prompts"}}, "another shape"),
        ({"objective": {"name": "distill", "mode": "on_policy", "ce_weight": 0}}, "another shape"),
        ({"lora": {"rank": 4, "dropout": 0.1}}, "lora.dropout"),
        ({"lora": {"rank": 4, "use_dora": True}}, "DoRA"),
        ({"lora": {"rank": 4}}, ""),
        ({}, ""),
    ],
)
def test_passes_that_are_no_static_graph_are_not_compiled(monkeypatch, more, reason):
    monkeypatch.setattr(Cpu, "missing_compiler", lambda self: "")
    decision = choice("auto", torch.device("cuda"), 1e9, **more)
    assert decision.how == ("off" if reason else "blocks") and reason in decision.why
    if reason:
        with pytest.raises(UserError) as refused:
            choice("blocks", CPU, 1e9, **more)
        assert reason in str(refused.value.got)


def test_without_a_compiler_it_is_off_and_said(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch, "__file__", "/home/trees/torch/__init__.py")  # no space, wherever these tests run
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "no C++ compiler" in devices.of(CPU).missing_compiler()
    decision = choice("auto", CPU, 1e9)
    assert decision.how == "off"
    assert "no C++ compiler" in decision.why
    with raises_user_error(where="compute.compile", got="no C++ compiler (no-such-compiler)"):
        choice("blocks", CPU, 1e9)


def test_graphs_need_cuda(monkeypatch):
    monkeypatch.setattr(Cpu, "missing_compiler", lambda self: "")
    with raises_user_error(where="compute.compile", got="cpu", wanted="blocks or auto"):
        choice("graphs", CPU, 1e9)


def test_mixtures_are_compiled_where_all_experts_go_through_one_product(monkeypatch):
    monkeypatch.setattr(Cpu, "missing_compiler", lambda self: "")
    cuda = torch.device("cuda")
    mixture = {
        "model": {
            **SHAPE,
            "architecture": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        }
    }
    assert choice("auto", CPU, 1e9, bfloat16=True, **mixture).how == "off"
    assert choice("auto", cuda, 1e9, bfloat16=True, **mixture).how == "blocks"
    assert choice("auto", cuda, 1e9, bfloat16=False, **mixture).how == "off"


@pytest.mark.slow
def test_from_a_folder_with_a_space_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "__file__", "/home/my trees/torch/__init__.py")
    assert "/home/my trees/torch" in devices.of(CPU).missing_compiler()


@pytest.mark.skipif(bool(devices.of(CPU).missing_compiler()), reason="no compiler")
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]
)  # 45 CPU seconds
def test_compiled_blocks_compute_the_same_and_are_compiled_once(monkeypatch, tmp_path, backend):
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, compiled = small(), small()
    compile_model(compiled, "blocks")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        ids_BT = torch.randint(64, (2, 96), generator=generator)
        document_BT = (torch.rand(2, 96, generator=generator) < 0.05).long().cumsum(1)
        scored = dict(score=CrossEntropy(ids_BT.flatten(), torch.ones(192)))
        for model in (plain, compiled):
            model.zero_grad()
            model(ids_BT, document_BT, **scored).backward()
        if step == 0:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.skipif(bool(devices.of(CPU).missing_compiler()), reason="no compiler")
def test_what_is_written_while_a_model_learns_is_not_compiled(monkeypatch):
    """Every token would be another shape, and dynamo gives up after eight of them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain, compiled = small(), small()
    compile_model(compiled, "blocks")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prompts = [[1], [2, 3], [4, 5, 6], [7] * 20]
    written = [generate(model, prompts, max_new_tokens=12, stop=(), rows=1) for model in (plain, compiled)]
    assert written[0] == written[1]
    request = Request(prompt=[1, 2, 3], seeds=[1, 2])
    sample_batch(compiled, [request], max_new_tokens=12, stop=(), sampling=Sampling())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    compiled(torch.zeros(1, 4, dtype=torch.long))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
