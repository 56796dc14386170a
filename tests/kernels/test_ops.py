"""The front of the kernels: what it says of a machine is what it does there."""

from __future__ import annotations

import pytest
import torch

from penjing.kernels import ops, reference
from penjing.kernels.attention_metadata import additive_mask, cache_mask
from penjing.kernels.cpu import library
from penjing.kernels.cpu import ops as cpu
from penjing.kernels.triton import ops as gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def named(device, dtype):
    found = ops.backends(device, dtype)
    assert len({each.op for each in found}) == len(found)
    assert all(each.why for each in found)
    return {each.op: each.name for each in found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_with_kernels_and_without(dtype, without_cpu_kernels, monkeypatch):
    if not library.unavailable_reason():
        found = named(CPU, dtype)
        assert found["rms_norm"] == found["swiglu"] == found["cross_entropy"] == "C"
        assert (found["attention"] == "C") == cpu.supports_attention(dtype, 64, 8)
        assert (found["weight gradients"] == "C") == cpu.supports_weight_grad_in(dtype)
    without_cpu_kernels()
    monkeypatch.setattr(library, "unavailable_reason", lambda: "no compiler")
    assert not any(name == "C" for name in named(CPU, dtype).values())
    assert "no compiler" in {each.why for each in ops.backends(CPU, dtype)}


def test_a_card_with_triton_and_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "has_kernels", lambda device: True)
    found = named(CUDA, torch.bfloat16)
    assert found["attention"] == found["swiglu"] == found["cross_entropy"] == "Triton"
    monkeypatch.setattr(gpu, "has_kernels", lambda device: False)
    for dtype in (torch.bfloat16, torch.float32):
        assert "Triton" not in named(CUDA, dtype).values()


def test_attention_with_a_cache_sees_what_it_returns():
    """The keys and values of earlier positions come from it, those of these tokens go through it."""
    q, k, v = (torch.randn(1, 3, heads * 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 3))
    rotary = torch.ones(1, 3, 1, 4), torch.zeros(1, 3, 1, 4)  # rotates by nothing
    stored = []

    def cache(k_BTGK, v_BTGK):
        stored.append((k_BTGK, v_BTGK))
        return k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)

    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    got = ops.attention((q, k, v[..., :16]), 4, 2, None, rotary, ops.AttentionMetadata(mask_B1TS=mask), cache)
    heads = [x.unflatten(-1, (-1, 8)) for x in (q, k, v[..., :16])]
    wanted = reference.attention(heads[0], heads[1].transpose(1, 2), heads[2].transpose(1, 2), None)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(stored[0][1], heads[2])


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_attention_over_a_cache_as_on_a_gpu_is_attention(key_heads, tokens):
    """With an additive mask, as inference on CUDA has it."""
    generator = torch.Generator().manual_seed(key_heads)
    q_BTHK = torch.randn(3, tokens, 4, 8, generator=generator)
    k_BGSK, v_BGSK = (torch.randn(3, key_heads, 32, 8, generator=generator) for _ in range(2))
    mask_B1TS = cache_mask(torch.tensor([[0], [5], [27]]) + torch.arange(tokens), 32, window=6)
    wanted = reference.attention(q_BTHK, k_BGSK, v_BGSK, mask_B1TS)
    got = reference.cached_attention(q_BTHK, k_BGSK, v_BGSK, additive_mask(mask_B1TS, q_BTHK.dtype))
    torch.testing.assert_close(got, wanted)
