"""A newer kernel is used where it is right, and put back where it is not."""

import pytest
import torch

from penjing.kernels import reference, self_check
from penjing.kernels.attention_metadata import document_mask
from penjing.kernels.cpu import library
from penjing.kernels.cpu import ops as cpu
from penjing.kernels.self_check import Heads, varlen_difference
from penjing.kernels.triton import ops as gpu
from penjing.model.config import ModelConfig
from penjing.model.kernel_selection import activate_flash, check_kernels
from penjing.model.transformer import Transformer

SHAPE = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=64,
)
CUDA = torch.device("cuda")


@pytest.fixture
def card(monkeypatch):
    """A Hopper card with both implementations; what was activated and put back."""
    seen = []
    monkeypatch.setattr(self_check, "supports_varlen", lambda *_: True)
    monkeypatch.setattr(gpu, "has_kernels", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", seen.append, raising=False)
    monkeypatch.setattr(
        torch.nn.attention, "restore_flash_attention_impl", lambda: seen.append("restored"), raising=False
    )
    return seen


def test_the_newest_that_is_right(card, monkeypatch):
    monkeypatch.setattr(self_check, "varlen_difference", lambda *_: 0.01)
    assert activate_flash(Transformer(SHAPE), CUDA, torch.bfloat16) == "FA4"
    assert card == ["FA4"]


def test_a_wrong_one_is_put_back_and_the_next_is_tried(card, monkeypatch):
    monkeypatch.setattr(self_check, "varlen_difference", lambda *_: 0.01 if card[-1] == "FA3" else 0.3)
    with pytest.warns(UserWarning, match="FA4 is installed but not used: off by 0.3"):
        assert activate_flash(Transformer(SHAPE), CUDA, torch.bfloat16) == "FA3"
    assert card == ["FA4", "restored", "FA3"]


def test_one_that_fails_is_put_back(card, monkeypatch):
    def fail(*_):
        raise NotImplementedError("backward")

    monkeypatch.setattr(self_check, "varlen_difference", fail)
    with pytest.warns(UserWarning, match="NotImplementedError: backward"):
        assert activate_flash(Transformer(SHAPE), CUDA, torch.bfloat16) == ""
    assert card == ["FA4", "restored", "FA3", "restored"]


def test_no_card_no_change():
    assert activate_flash(Transformer(SHAPE), torch.device("cpu"), torch.bfloat16) == ""


def test_the_difference_is_that_of_the_kernel(monkeypatch):
    def kernel(q, k, v, edge_S, longest, window):
        document_BT = torch.searchsorted(edge_S.long(), torch.arange(512), right=True).view(2, 256)
        mask = document_mask(document_BT, window)
        return (1 + wrong) * reference.attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)

    monkeypatch.setattr(self_check, "varlen_attention", kernel)
    for wrong in (0.0, 0.1):
        found = varlen_difference(Heads(4, 2, 16), 0, torch.device("cpu"), torch.float32)
        assert found == pytest.approx(wrong, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_cpu_are_tried(dtype, monkeypatch):
    model, device = Transformer(SHAPE), torch.device("cpu")
    if library.unavailable_reason():
        assert library.unavailable_reason() in check_kernels(model, device, dtype)
        return
    said = check_kernels(model, device, dtype)
    assert "norms, " in said and said.endswith("SwiGLU and the head's softmax")
    assert ("weight gradients" in said) == cpu.supports_weight_grad_in(dtype)
    assert ("attention" in said) == cpu.supports_attention(dtype, 16, 99)
    assert check_kernels(model, device, torch.float16) == ""  # which they do not take
    right, switched = cpu._run, []

    def wrong(name, tensors, *given):
        right(name, tensors, *given)
        if name == broken:
            written = {"cross_entropy": -1, "rms_norm": 2, "swiglu": 2, "apply_rope": 1}[name]
            tensors[written].mul_(1.2)

    monkeypatch.setattr(cpu, "_run", wrong)
    monkeypatch.setattr(library, "switch_off", lambda: switched.append(broken))
    for broken in ("cross_entropy", "rms_norm", "swiglu", *(["apply_rope"] if "attention" in said else [])):  # noqa: B007 (read by `wrong`)
        with pytest.warns(UserWarning, match="kernels of our own are not used, torch's are: off by 0"):
            assert check_kernels(model, device, dtype) == ""
    assert switched[:3] == ["cross_entropy", "rms_norm", "swiglu"]
