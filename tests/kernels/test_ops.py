"""The table of backends: only it chooses, it says why, and CONTRIBUTING's backend is one file and one line of it."""

from __future__ import annotations

import io

import contributing
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import penjing.kernels
from penjing.cli import app
from penjing.kernels import ops, reference, select
from penjing.kernels.attention_metadata import additive_mask, cache_mask
from penjing.kernels.cpu import library
from penjing.kernels.cpu import ops as cpu
from penjing.kernels.triton import ops as gpu
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.fake_device_mode import FakeDeviceMode
from penjing.workflows.check_machine import check_machine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def reported(device, dtype):
    found = ops.report(device, dtype)
    assert len({each.op for each in found}) == len(found)
    return {each.op: each.backend for each in found}, {each.op: each.others for each in found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_with_kernels_and_without(dtype, without_cpu_kernels, monkeypatch):
    if not library.unavailable_reason():
        backend, others = reported(CPU, dtype)
        assert backend["rms_norm"] == backend["swiglu"] == backend["cross_entropy_inplace"] == "C"
        assert (backend["attention"] == "C, in tiles") == (not cpu.attention_reason(dtype, 64, 8))
        assert (backend["weight_grad"] == "C") == cpu.supports_weight_grad_in(dtype) != ("AMX" in others["weight_grad"])
        assert "Triton: for " in others["attention"]
    without_cpu_kernels()
    monkeypatch.setattr(library, "unavailable_reason", lambda: "no compiler")
    backend, others = reported(CPU, dtype)
    assert not any(name.startswith("C") for name in backend.values())
    assert all("C: no compiler" in others[op] for op in ("rms_norm", "swiglu", "cross_entropy_inplace"))


def test_a_card_with_triton_and_without(monkeypatch):
    monkeypatch.setattr(gpu, "has_kernels", lambda device: True)
    with FakeDeviceMode(Target(capability=(9, 0))):
        backend, _ = reported(CUDA, torch.bfloat16)
        assert backend["attention"] == backend["expert_swiglu"] == backend["cross_entropy_inplace"] == "Triton"
        monkeypatch.setattr(gpu, "has_kernels", lambda device: False)
        for dtype, attention in ((torch.bfloat16, "torch, by lengths"), (torch.float32, "torch")):
            backend, others = reported(CUDA, dtype)
            assert "Triton" not in backend.values() and "Triton: " in others["expert_swiglu"]
            assert backend["attention"] == attention


def test_contributings_backend_computes_in_a_run_and_is_reported(tmp_path, small_run, losses, monkeypatch):
    def train(out):
        done = CliRunner().invoke(app, ["train", "pretrain", *small_run, "max_steps=2", f"out={tmp_path / out}"])
        assert done.exit_code == 0, done.output
        return losses(tmp_path / out)

    before = train("before")
    name = contributing.add("Add a kernel backend", penjing.kernels, penjing.kernels.BACKENDS, tmp_path, monkeypatch)
    row, calls = select.load()[name], []
    plain = row.swiglu_forward
    monkeypatch.setattr(row, "swiglu_forward", lambda gate, up: calls.append(gate.dtype) or plain(gate, up))
    after = train("after")
    assert set(calls) == {torch.float32}
    assert after == pytest.approx(before, rel=1e-5)
    assert reported(CPU, torch.float32)[0]["swiglu"] == name
    assert f"{name}: for float32" in reported(CPU, torch.bfloat16)[1]["swiglu"]
    out = io.StringIO()
    monkeypatch.setenv("COLUMNS", "300")
    check_machine(Console(file=out, width=300))
    assert name in out.getvalue()
    monkeypatch.undo()
    assert name not in select.load()


def test_attention_with_a_cache_sees_what_it_returns():
    """The keys and values of earlier positions come from it, those of these tokens go through it."""
    q, k, v = (torch.randn(1, 3, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 3))
    stored = []

    def cache(k_BTGK, v_BTGK):
        stored.append((k_BTGK, v_BTGK))
        return k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)

    metadata = ops.AttentionMetadata(mask_B1TS=torch.ones(1, 1, 3, 3, dtype=torch.bool).tril())
    got = ops.attention(q, k, v[:, :, :2], metadata, cache)
    torch.testing.assert_close(got, ops.attention(q, k, v[:, :, :2], ops.AttentionMetadata()))
    assert torch.equal(stored[0][1], v[:, :, :2])


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_attention_over_a_cache_as_on_a_gpu_is_attention(key_heads, tokens):
    """With an additive mask, as inference on CUDA has it."""
    generator = torch.Generator().manual_seed(key_heads)
    q_BTHK = torch.randn(3, tokens, 4, 8, generator=generator)
    k_BGSK, v_BGSK = (torch.randn(3, key_heads, 32, 8, generator=generator) for _ in range(2))
    mask_B1TS = cache_mask(torch.tensor([[0], [5], [27]]) + torch.arange(tokens), 32, window=6)
    wanted = reference.masked_attention(q_BTHK, k_BGSK, v_BGSK, mask_B1TS)
    got = reference.cached_attention(q_BTHK, k_BGSK, v_BGSK, additive_mask(mask_B1TS, q_BTHK.dtype))
    torch.testing.assert_close(got, wanted)
