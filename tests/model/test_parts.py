"""The parts of a block and the head in double precision beside their formulas, with kernels of our own and without."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as functional

from penjing.kernels import fused_linear_cross_entropy as head
from penjing.kernels.ops import apply_rope, swiglu
from penjing.model.norm import RMSNorm


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["ours", "torch"])
def kernels(request, without_cpu_kernels):
    if request.param == "torch":
        without_cpu_kernels()


def compare(found, wanted, tensors, doubles, upstream):
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-5)
    mine = torch.autograd.grad(found, tensors, upstream)
    theirs = torch.autograd.grad(wanted, doubles, upstream.double())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1.0, 1e-2])
def test_a_norm_is_its_formula(kernels, size):
    """Also of inputs so small that epsilon is most of what they are divided by."""
    norm = RMSNorm(24, 1e-3)
    norm.weight.data = 1 + 0.2 * drawn(24, seed=1)
    x = (size * drawn(5, 24)).requires_grad_()
    wide, gain = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    wanted = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-3).sqrt() * gain
    compare(norm(x), wanted, [x, norm.weight], [wide, gain], drawn(5, 24, seed=2))


def test_a_gated_product_is_its_formula(kernels):
    gate, up = (drawn(7, 40, seed=seed).requires_grad_() for seed in (1, 2))
    wide_gate, wide_up = (each.detach().double().requires_grad_() for each in (gate, up))
    wanted = wide_gate * wide_gate.sigmoid() * wide_up
    compare(swiglu(gate, up), wanted, [gate, up], [wide_gate, wide_up], drawn(7, 40, seed=3))


def test_the_sum_of_nats_is_weighted_and_so_is_its_slope(kernels):
    hidden_ND, weight_VD = drawn(9, 16).requires_grad_(), drawn(30, 16, seed=1).requires_grad_()
    target_N, weight_N = torch.arange(9) * 3, torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.0, 3.0, 1.0, 0.25])
    wide = [each.detach().double().requires_grad_() for each in (hidden_ND, weight_VD)]
    nats_N = functional.cross_entropy(wide[0] @ wide[1].T, target_N, reduction="none")
    found = head.fused_linear_cross_entropy(hidden_ND, weight_VD, target_N, weight_N, torch.float32)
    wanted = (nats_N * weight_N.double()).sum()
    compare(found, wanted, [hidden_ND, weight_VD], wide, torch.tensor(0.7))


def test_log_probabilities_and_entropies_are_those_of_the_softmax(kernels):
    hidden_ND, weight_VD = drawn(9, 16).requires_grad_(), drawn(30, 16, seed=1).requires_grad_()
    target_N = torch.arange(9) * 3
    wide = [each.detach().double().requires_grad_() for each in (hidden_ND, weight_VD)]
    logp_NV = (wide[0] @ wide[1].T).log_softmax(-1)
    logp_2N = head.log_probs(hidden_ND, weight_VD, target_N, torch.float32)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    torch.testing.assert_close(logp_2N[1], entropy_N.float(), rtol=1e-4, atol=1e-5)
    wanted = logp_NV.gather(1, target_N[:, None])[:, 0]
    compare(logp_2N[0], wanted, [hidden_ND, weight_VD], wide, drawn(9, seed=4))


def test_a_pair_of_dimensions_turns_by_its_angle():
    """(1, 0) becomes (cos, sin): arXiv:2104.09864 equation 13, with the second half of a head beside the first."""
    angle_TP = torch.tensor([[0.3, 1.2], [0.6, 2.4]])
    x_BTHK = torch.tensor([1.0, 2.0, 0.0, 0.5]).expand(1, 2, 1, 4).clone().requires_grad_()
    cosine, sine = (each[None, :, None] for each in (angle_TP.cos(), angle_TP.sin()))
    turned = apply_rope(x_BTHK, cosine, sine)
    for place, (first, second) in enumerate(angle_TP.tolist()):
        wanted = [
            math.cos(first),
            2 * math.cos(second) - 0.5 * math.sin(second),
            math.sin(first),
            2 * math.sin(second) + 0.5 * math.cos(second),
        ]
        assert turned[0, place, 0].tolist() == pytest.approx(wanted, abs=1e-6)
    upstream = torch.zeros_like(turned)
    upstream[0, 0, 0, 0] = 1.0  # the gradient turns back
    (slope,) = torch.autograd.grad(turned, x_BTHK, upstream)
    assert slope[0, 0, 0].tolist() == pytest.approx([math.cos(0.3), 0.0, -math.sin(0.3), 0.0], abs=1e-6)
