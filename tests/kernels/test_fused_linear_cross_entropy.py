"""The chunked head against plain cross-entropy: value, gradients, and what it does not compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from penjing.kernels import fused_linear_cross_entropy as head
from penjing.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy

N, D, V = 37, 12, 23


def case(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator).requires_grad_()
    target_N = torch.randint(0, V, (N,), generator=generator)
    weight_N = torch.rand(N, generator=generator) * (torch.rand(N, generator=generator) > 0.3)
    return hidden_ND, weight_VD, target_N, weight_N


def plain(hidden_ND, weight_VD, target_N, weight_N):
    """The slow twin: all logits at once."""
    return (functional.cross_entropy(hidden_ND @ weight_VD.T, target_N, reduction="none") * weight_N).sum()


@pytest.mark.parametrize("chunk", [1, V, 2 * V + 5, 10 * V, N * V, 1 << 20])
def test_value_and_gradients_for_any_chunk(monkeypatch, chunk):
    monkeypatch.setattr(head, "CHUNK_LOGITS", chunk)
    hidden_ND, weight_VD, target_N, weight_N = case()
    total = fused_linear_cross_entropy(hidden_ND, weight_VD, target_N, weight_N, torch.float32)
    expected = plain(hidden_ND, weight_VD, target_N, weight_N)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    ours = torch.autograd.grad(total * 0.37, (hidden_ND, weight_VD))
    theirs = torch.autograd.grad(expected * 0.37, (hidden_ND, weight_VD))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_against_finite_differences():
    hidden_ND, weight_VD, target_N, weight_N = case(seed=1)
    total = fused_linear_cross_entropy(hidden_ND, weight_VD, target_N, weight_N, torch.float32)
    slopes = torch.autograd.grad(total, (hidden_ND, weight_VD))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for which, (value, slope) in enumerate(zip((hidden_ND, weight_VD), slopes, strict=True)):
            direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            sides = []
            for sign in (1, -1):
                moved = [hidden_ND.double(), weight_VD.double()]
                moved[which] = moved[which] + sign * 1e-5 * direction
                sides.append(plain(*moved, target_N, weight_N.double()))
            measured = (sides[0] - sides[1]) / 2e-5
            torch.testing.assert_close((slope.double() * direction).sum(), measured, rtol=1e-4, atol=1e-4)


def test_empty_selection_is_zero_with_zero_gradients():
    hidden_ND, weight_VD, target_N, weight_N = case()
    total = fused_linear_cross_entropy(hidden_ND[:0], weight_VD, target_N[:0], weight_N[:0], torch.float32)
    assert total.item() == 0
    total.backward()
    assert not weight_VD.grad.any()
    assert not hidden_ND.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_parts_get_no_gradient_and_do_not_disturb_the_other(frozen):
    hidden_ND, weight_VD, target_N, weight_N = case()
    expected = torch.autograd.grad(plain(hidden_ND, weight_VD, target_N, weight_N), (hidden_ND, weight_VD))
    hidden_ND.requires_grad_(frozen == "weight")
    weight_VD.requires_grad_(frozen == "hidden")
    total = fused_linear_cross_entropy(hidden_ND, weight_VD, target_N, weight_N, torch.float32)
    assert total.requires_grad == (frozen != "both")
    if frozen == "both":
        return
    total.backward()
    free, fixed, slope = (
        (weight_VD, hidden_ND, expected[1]) if frozen == "hidden" else (hidden_ND, weight_VD, expected[0])
    )
    torch.testing.assert_close(free.grad, slope, rtol=1e-4, atol=1e-5)
    assert fixed.grad is None


def test_no_gradient_is_computed_where_none_is_asked(monkeypatch):
    hidden_ND, weight_VD, target_N, weight_N = case()
    made, original = [], head.arena.empty
    monkeypatch.setattr(head.arena, "empty", lambda like, shape, *a: made.append(shape) or original(like, shape, *a))
    with torch.no_grad():
        fused_linear_cross_entropy(hidden_ND, weight_VD, target_N, weight_N, torch.float32)
    assert weight_VD.shape not in made
    fused_linear_cross_entropy(hidden_ND, weight_VD, target_N, weight_N, torch.float32)
    assert weight_VD.shape in made


def test_second_derivatives_are_refused_rather_than_wrong():
    hidden_ND, weight_VD, target_N, weight_N = case()
    total = fused_linear_cross_entropy(hidden_ND, weight_VD, target_N, weight_N, torch.float32)
    (slope,) = torch.autograd.grad(total.square(), hidden_ND, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_bfloat16_matmuls_give_float32_sums_and_gradients():
    hidden_ND, weight_VD, target_N, weight_N = case()
    total = fused_linear_cross_entropy(hidden_ND, weight_VD, target_N, weight_N, torch.bfloat16)
    assert total.dtype == torch.float32
    slopes = torch.autograd.grad(total, (hidden_ND, weight_VD))
    assert {slope.dtype for slope in slopes} == {torch.float32}
    expected = torch.autograd.grad(plain(hidden_ND, weight_VD, target_N, weight_N), (hidden_ND, weight_VD))
    for slope, wanted in zip(slopes, expected, strict=True):
        assert 0 < (slope - wanted).norm() < 0.03 * wanted.norm()


def test_huge_logits_stay_finite():
    hidden_ND, weight_VD, target_N, weight_N = case()
    total = fused_linear_cross_entropy(hidden_ND * 1e4, weight_VD, target_N, weight_N, torch.float32)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(weight_VD.grad).all()


def test_logits_are_float32_for_any_leading_shape():
    hidden_ND, weight_VD, _, _ = case()
    wide = hidden_ND.detach().view(1, N, D)
    torch.testing.assert_close(head.logits(wide, weight_VD, torch.float32)[0], hidden_ND @ weight_VD.T)
    assert head.logits(wide, weight_VD, torch.bfloat16).dtype == torch.float32
