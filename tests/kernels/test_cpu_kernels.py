"""The CPU's own kernels come to what torch's operations come to, whatever the shape, and to equal bits each time."""

import concurrent.futures
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional

from penjing.base.c_library import BUILD_SECONDS, is_intact
from penjing.kernels import autograd_functions, reference
from penjing.kernels.attention_metadata import AttentionInputs, AttentionMetadata, first_keys, tree_mask
from penjing.kernels.cpu import attention, library
from penjing.kernels.cpu import ops as cpu
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.attention import document_attention
from penjing.kernels.cpu.ops import TILE
from penjing.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy
from penjing.kernels.ops import apply_rope, swiglu
from penjing.kernels.tiled_attention import tiled_attention
from penjing.model.linear import set_compute_dtype
from penjing.model.norm import RMSNorm
from penjing.model.score import CrossEntropy

pytestmark = pytest.mark.skipif(
    bool(library.unavailable_reason()), reason=f"no kernels of our own here: {library.unavailable_reason()}"
)
F32, BF16 = torch.float32, torch.bfloat16
# Of one rounding to bfloat16 of values up to 1; in float32, of sums in another order.
CLOSE = {F32: {"rtol": 2e-6, "atol": 2e-6}, BF16: {"rtol": 8e-3, "atol": 8e-3}}


def drawn(*shape, dtype=F32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def without(without_cpu_kernels):
    return without_cpu_kernels


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 24), (70, 512), (333, 96)])
@pytest.mark.parametrize("out", [F32, BF16])
def test_norm(shape, dtype, out, threads):
    norm = RMSNorm(shape[-1], 1e-6)
    norm.compute_dtype = out
    norm.weight.data = 1 + 0.1 * drawn(shape[-1], seed=1)
    x, upstream = drawn(*shape, dtype=dtype).requires_grad_(), drawn(*shape, dtype=out, seed=2)
    residual = drawn(*shape, dtype=dtype, seed=3)
    got = torch.autograd.grad(norm.forward_with_residual(x), (x, norm.weight), (residual, upstream))
    wide = x.detach().double().requires_grad_()
    gain = norm.weight.detach().double().requires_grad_()
    expected = functional.rms_norm(wide, (shape[-1],), gain, 1e-6)
    torch.testing.assert_close(norm(x), expected.to(out), **CLOSE[out])
    wanted = torch.autograd.grad((wide, expected), (wide, gain), (residual.double(), upstream.double()))
    torch.testing.assert_close(got[0], wanted[0].to(dtype), **CLOSE[dtype])
    torch.testing.assert_close(got[1], wanted[1].float(), rtol=1e-5, atol=1e-5 * math.sqrt(x.numel()))
    (alone,) = torch.autograd.grad(norm(x), x, upstream)
    assert torch.equal(got[0], alone + residual)  # as where a block's activations are made again


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1,), (7, 33), (40, 513)])
def test_gated_product(shape, dtype, threads):
    gate, up = drawn(*shape, dtype=dtype).mul_(4).requires_grad_(), drawn(*shape, dtype=dtype, seed=1).requires_grad_()
    upstream = drawn(*shape, dtype=dtype, seed=2)
    got = torch.autograd.grad(swiglu(gate, up), (gate, up), upstream)
    wide = [x.detach().double().requires_grad_() for x in (gate, up)]
    expected = functional.silu(wide[0]) * wide[1]
    torch.testing.assert_close(swiglu(gate, up), expected.to(dtype), **CLOSE[dtype])
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other.to(dtype), **CLOSE[dtype])
    place = upstream.clone()
    grad_gate, grad_up, inner = cpu.swiglu_backward_and_forward(place, gate.detach(), up.detach())
    assert grad_up is place
    for one, other in zip((grad_gate, grad_up, inner), (*got, swiglu(gate, up)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (40, 513)])
def test_gated_product_of_rows_with_weights(shape, dtype, threads):
    """As experts have it: gate and up side by side in one matrix, and a weight for each row."""
    rows, width = shape
    both, slope = drawn(rows, 2 * width, dtype=dtype), drawn(*shape, dtype=dtype, seed=1)
    weight = drawn(rows, seed=2)
    gate, up = both.chunk(2, dim=-1)
    assert torch.equal(cpu.expert_swiglu(both), cpu.swiglu_forward(gate.contiguous(), up.contiguous()))
    grad_both, inner, grad_weight = cpu.weighted_swiglu_backward(slope, both, weight)
    wide, wide_weight = both.double().requires_grad_(), weight.double().requires_grad_()
    wide_gate, wide_up = wide.chunk(2, dim=-1)
    expected = functional.silu(wide_gate) * wide_up * wide_weight[:, None]
    wanted, desirable_weight = torch.autograd.grad(expected, (wide, wide_weight), slope.double())
    torch.testing.assert_close(inner, expected.to(dtype), **CLOSE[dtype])
    torch.testing.assert_close(grad_both, wanted.to(dtype), **CLOSE[dtype])
    torch.testing.assert_close(grad_weight, desirable_weight.float(), rtol=1e-5, atol=1e-6 * width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_dropout_has_the_bits_of_torch(dtype, share):
    generator = torch.Generator().manual_seed(1)
    x_BTD, grad_BTD = torch.randn(2, 3, 40, 33, generator=generator).to(dtype)
    seed_BT1 = torch.randint(-(2**31), 2**31, (3, 40, 1), generator=generator).int()
    results = []
    for dropout in (autograd_functions.dropout, reference.dropout):
        leaf = x_BTD.clone().requires_grad_()
        out = dropout(leaf, seed_BT1, share)
        results.append((out.detach(), *torch.autograd.grad(out, leaf, grad_BTD)))
    assert torch.equal(cpu.dropout_forward(x_BTD, seed_BT1, share), results[0][0])
    assert all(map(torch.equal, *results)) and results[0][0].dtype == dtype
    assert results[0][0].eq(0).double().mean() == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"),
    [(1, 1, 1), (33, 70, 50), (97, 333, 65), (1310, 64, 33), (2100, 31, 700), (70, 600, 1200), (1500, 1100, 530)],
)
def test_weights_gradients(tokens, outputs, inputs, threads):
    """Ends of tiles, strips, blocks of tokens and parts of columns, whichever side is the narrower."""
    if not cpu.supports_weight_grad_in(BF16):
        pytest.skip("no matrix units here")
    wider, x = drawn(tokens, outputs + 5, dtype=BF16), drawn(tokens, inputs, dtype=BF16, seed=1)
    grad_out = wider[:, 3 : outputs + 3]
    expected = grad_out.double().T @ x.double()
    close = {"rtol": 1e-5, "atol": 1e-6 * tokens**0.5}
    out = torch.full((outputs, inputs), math.nan)
    got = cpu.write_weight_grad(grad_out, x, out)
    assert got is out
    torch.testing.assert_close(got, expected.float(), **close)
    assert torch.equal(cpu.weight_grad(grad_out.contiguous(), x), got)
    cpu.add_matmul(grad_out, x, out)
    torch.testing.assert_close(out, 2 * expected.float(), rtol=2e-5, atol=2e-6 * tokens**0.5)


def test_which_weights_gradients():
    grad_out, x = drawn(256, 128, dtype=BF16), drawn(256, 64, dtype=BF16)
    assert (not cpu.supports("weight_grad", grad_out, x)) == cpu.supports_weight_grad_in(BF16)
    assert (not cpu.supports("weight_grad", grad_out[:, :64], x)) == cpu.supports_weight_grad_in(BF16)
    assert cpu.supports("weight_grad", grad_out[:4], x[:4])  # little work
    assert cpu.supports("weight_grad", grad_out.float(), x.float())
    assert cpu.supports("weight_grad", grad_out, x.T.contiguous().T)
    assert cpu.supports("weight_grad", grad_out[:, ::2], x)
    assert not cpu.supports_weight_grad_in(F32)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sums_of_two_types(dtype, threads):
    x, y = drawn(3, 10001), drawn(3, 10001, dtype=dtype, seed=1)
    expected = x + y
    assert torch.equal(cpu.add(x, y, torch.empty_like(x)), expected)
    assert cpu.add(x, y, x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_an_optimizer_adds(dtype, threads):
    x, y = drawn(3, 10001), drawn(3, 10001, dtype=dtype, seed=1)
    expected = 0.99 * x - 0.02 * y.float()
    cpu.add_scaled(x, y, 0.99, -0.02)
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)
    gradient, mean, out = drawn(3, 10001, seed=2), drawn(3, 10001, seed=3), torch.empty(3, 10001)
    wanted = torch.lerp(mean, gradient, 0.05)
    cpu.nesterov_update(gradient, mean, out, 0.95)
    torch.testing.assert_close(mean, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, torch.lerp(gradient, wanted, 0.95), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("num_tokens", [TILE, 70, 200])
@pytest.mark.parametrize(("size", "turned"), [(16, 16), (16, 8), (6, 6)])
def test_heads_become_tiles_and_rows_again(num_tokens, size, turned, dtype, threads):
    x_BTHK = drawn(2, num_tokens, 3, size, dtype=dtype)
    angle = drawn(2, num_tokens, 1, turned // 2, seed=1)
    rotary = angle.cos(), angle.sin()
    tiles = cpu.tiles_of(x_BTHK, rotary)
    assert tiles.shape == (2 * math.ceil(num_tokens / TILE), 3, TILE, size)
    wide = torch.cat((rotary[0], rotary[0]), dim=-1)
    x = x_BTHK.float()
    halves = torch.cat((-x[..., turned // 2 : turned], x[..., : turned // 2]), dim=-1)
    whole = x[..., :turned] * wide + halves * torch.cat((rotary[1], rotary[1]), dim=-1)
    expected = torch.cat((whole, x[..., turned:]), dim=-1).to(dtype)
    torch.testing.assert_close(apply_rope(x_BTHK, *rotary), expected, **CLOSE[dtype])
    laid = tiles.view(2, -1, 3, TILE, size).transpose(2, 3).reshape(2, -1, 3, size)
    torch.testing.assert_close(laid[:, :num_tokens], expected, **CLOSE[dtype])
    assert not laid[:, num_tokens:].any()
    assert torch.equal(cpu.rows_of(cpu.tiles_of(x_BTHK, None), num_tokens, dtype, None), x_BTHK)
    torch.testing.assert_close(cpu.rows_of(tiles, num_tokens, F32, rotary), x_BTHK.float(), **CLOSE[dtype])


def attend(q, k, v, document_BT, window, rotary, first_BT):
    if first_BT is not None:
        return document_attention(q, k, v, first_BT, rotary)
    return tiled_attention(q, k, v, document_BT, None, window, None, rotary)


def attended(num_tokens, mean_length, window, groups, size, dtype):
    """mixed and the gradients of q, k and v, by three ways: our kernel, tiles, and tiles in float64."""
    generator = torch.Generator().manual_seed(0)
    document_BT = (torch.rand(3, num_tokens, generator=generator) < 1 / mean_length).long().cumsum(1)
    given = [drawn(3, num_tokens, heads, size, dtype=dtype, seed=n) for n, heads in enumerate((4, groups, groups))]
    given[0] *= 2
    upstream = drawn(3, num_tokens, 4, size, dtype=dtype, seed=5)
    angle = drawn(1, num_tokens, 1, size // 2, seed=1)
    rotary = angle.cos(), angle.sin()

    def run(kind, first_BT, rotary):
        tensors = [x.to(kind).requires_grad_() for x in given]
        q, k, v = tensors
        if kind == torch.float64:  # the plain way all along
            q, k, rotary = (
                apply_rope(q, *(x.double() for x in rotary)),
                apply_rope(k, *(x.double() for x in rotary)),
                None,
            )
        mixed = attend(q, k, v, document_BT, window, rotary, first_BT)
        return (mixed.detach(), *torch.autograd.grad(mixed, tensors, upstream.to(kind)))

    first_BT = first_keys(document_BT, window)
    return run(dtype, first_BT, rotary), run(dtype, None, rotary), run(torch.float64, None, rotary)


def off(one, other):
    return float((one.double() - other).norm() / other.norm())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 without tiles"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("num_tokens", "mean_length", "window", "size"),
    [
        (128, 20, 0, 16),
        (200, 90, 33, 48),
        (70, 5, 4, 32),
        pytest.param(300, 70, 0, 64, marks=pytest.mark.nightly),
        pytest.param(130, 1000, 0, 128, marks=pytest.mark.nightly),
    ],
)
def test_attention(num_tokens, mean_length, window, size, groups, kind, threads):
    dtype = F32 if kind == "float32" else BF16
    built = library.kernels()
    if not built.types & 1 << cpu.TYPES[dtype]:  # matrix units, or AVX512-BF16, which stands in for them
        pytest.skip("this processor has no matmuls of pairs in bfloat16")
    built.use_tiles("tiles" not in kind)
    try:
        ours, tiled, exact = attended(num_tokens, mean_length, window, groups, size, dtype)
    finally:
        built.use_tiles(True)
    for got, other, wanted in zip(ours, tiled, exact, strict=True):
        assert got.dtype == dtype
        assert off(got, wanted) <= (2e-6 if dtype == F32 else 1.05 * off(other, wanted))


def test_trees(threads):
    """A row of trees in depth-first order, and one of single tokens."""
    draw, path, end_T, depth_T = random.Random(1), list[int](), [150] * 150, list[int]()
    for place in range(150):
        while path and draw.random() < 0.3:
            end_T[path.pop()] = place
        depth_T.append(len(path))
        path.append(place)
    end_BT, position_BT = torch.tensor([end_T, range(1, 151)]), torch.tensor([depth_T, [0] * 150])
    q, k, v = (drawn(2, 150, heads, 32, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    asked = AttentionInputs(position_BT=position_BT, subtree_end_BT=end_BT, heads=(2, 32), dtype=F32)
    assert attention.supports("attention_metadata", asked)
    with torch.no_grad():
        assert not attention.supports("attention_metadata", asked)
        metadata = attention.attention_metadata(asked)
        mixed = attention.fused_attention((q.flatten(2), k.flatten(2), v.flatten(2)), 4, 2, None, None, metadata)
    expected = reference.attention(q, k, v, AttentionMetadata(mask_B1TS=tree_mask(end_BT, position_BT)))
    torch.testing.assert_close(mixed, expected, **CLOSE[F32])


def test_what_attention_takes(monkeypatch):
    assert not cpu.attention_reason(F32, 64, 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert not cpu.attention_reason(F32, 16, 4)
    assert cpu.attention_reason(F32, 16, 3)  # a thread takes a key head of a row
    assert cpu.attention_reason(F32, 24, 8)  # vectors would be half full
    assert cpu.attention_reason(torch.float64, 64, 8)
    document_BT = torch.tensor([[4, 4, 4, 5, 5, 5]])
    first_BT = first_keys(document_BT, 2)
    assert first_BT.shape == (1, TILE)
    assert first_BT[0, :8].tolist() == [0, 0, 1, 3, 3, 4, 6, 7]  # what is added at the end looks at itself


def test_other_documents_have_no_part_at_all():
    """Neither in what is mixed nor in gradients, whatever stands there."""
    document_BT = torch.arange(200)[None] // 90
    first_BT = first_keys(document_BT, 0)
    tensors = [drawn(1, 200, heads, 32, seed=n).requires_grad_() for n, heads in enumerate((4, 2, 2))]
    mixed = document_attention(*tensors, first_BT)
    grads = torch.autograd.grad(mixed[:, 90:180].sum(), tensors)
    assert not any(grad[:, :90].any() or grad[:, 180:].any() for grad in grads)
    assert all(grad[:, 90:180].any() for grad in grads[:1])
    with torch.no_grad():
        for x in tensors:
            x[:, :90] = 1e4
    assert torch.equal(document_attention(*tensors, first_BT)[:, 90:], mixed[:, 90:])


def test_hidden_keys_have_no_part_at_all(threads):
    scores = drawn(2, 2 * TILE, 2 * TILE, dtype=BF16) * 8
    bias = torch.full((1, TILE, 2 * TILE), -math.inf, dtype=BF16).triu(TILE + 1)
    bias[:, :, :30] = -math.inf
    expected = torch.softmax(scores.view(2, 2, TILE, -1).double() + bias, dim=-1).view(scores.shape)
    odds = cpu.softmax(scores, bias, torch.empty_like(scores))
    torch.testing.assert_close(odds, expected.to(BF16), **CLOSE[BF16])
    assert not odds[expected == 0].any()
    assert torch.equal(cpu.softmax(scores, bias, scores), odds)  # in place


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tiles_are_added_where_they_belong(dtype, threads):
    into, value = drawn(5, 40, 30), drawn(6, 40, 30, dtype=dtype, seed=1)
    place = torch.tensor([3, 0, 3, 3, 1, 0])
    expected = into.clone().index_add_(0, place, value.float())
    cpu.add_tiles(into, place, value)
    torch.testing.assert_close(into, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 5), (40, 333), (9, 70001), (2, (1 << 17) + 3)])  # the last is not kept
def test_nats(shape, dtype, threads):
    logits, weight = drawn(*shape, dtype=dtype) * 3, drawn(shape[0], seed=1).abs()
    target = torch.randint(shape[1], shape[:1], generator=torch.Generator().manual_seed(2))
    wide = logits.double().requires_grad_()
    expected = functional.cross_entropy(wide, target, reduction="none") * weight
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    before = logits.clone()
    torch.testing.assert_close(
        cpu.cross_entropy_inplace(logits, target, weight, False), expected.float(), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(logits, before)
    torch.testing.assert_close(
        cpu.cross_entropy_inplace(logits, target, weight, True), expected.float(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(logits, slope.to(dtype), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 5), (40, 333)])
def test_log_probabilities(shape, dtype, threads):
    logits, slope = drawn(*shape, dtype=dtype) * 3, drawn(shape[0], seed=1)
    logits[0, 3] = -math.inf
    target = torch.zeros(shape[0], dtype=torch.long)
    wide = logits.double().requires_grad_()
    every = wide.log_softmax(dim=-1)
    (wanted,) = torch.autograd.grad((every[:, 0] * slope).sum(), wide)
    logp, entropy, norm = torch.empty(3, shape[0])
    cpu.log_probs(logits, target, logp, entropy, norm)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(logp, every[:, 0].float(), **close)
    torch.testing.assert_close(entropy, -(every.exp() * every).nansum(dim=-1).float(), **close)
    torch.testing.assert_close(norm, wide.logsumexp(dim=-1).float(), **close)
    torch.testing.assert_close(cpu.log_softmax_backward(logits, target, norm, slope), wanted.to(dtype), **CLOSE[dtype])


@pytest.mark.parametrize("width", [7, 2051])
def test_sums_of_exponentials_in_float64(width):
    logits = torch.randn(40, width) * 30
    logits[0] = 2.0
    logits[1, 3], logits[2, 3], logits[3, 3] = -math.inf, math.nan, math.inf
    found, expected = cpu.log_sum_exp(logits), reference.log_sum_exp(logits)
    assert found[1][0] == width
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[4:], other[4:], rtol=0, atol=1e-14)
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=1e-14, equal_nan=True)


def test_what_is_no_number_stays_none():
    bad = torch.tensor([[math.nan, 1.0], [math.inf, 1.0]])
    for dtype in (F32, BF16):
        x = bad.to(dtype)
        assert cpu.rms_norm_forward(x, torch.ones(2), 1e-6, dtype)[0].isnan().any(dim=1).all()
        assert cpu.swiglu_forward(x, x)[0, 0].isnan()
        assert cpu.cross_entropy_inplace(x, torch.zeros(2, dtype=torch.long), torch.ones(2), True).isnan().all()


def test_what_is_kept_in_bfloat16_is_read_as_such():
    """A model whose weights are in bfloat16 has gains that kernels do not take; other defaults change nothing."""
    norm, x = RMSNorm(24, 1e-6), drawn(5, 24, dtype=BF16)
    norm.weight.data = 1 + 0.1 * drawn(24, seed=1)
    expected = functional.rms_norm(x.float(), (24,), norm.weight.bfloat16().float(), 1e-6).to(BF16)
    for grad in (False, True):
        torch.set_default_dtype(torch.float64)
        try:
            with torch.set_grad_enabled(grad):
                before = norm(x)
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(RMSNorm.forward(norm.bfloat16(), x), expected, **CLOSE[BF16])
            torch.testing.assert_close(before, expected, rtol=2e-2, atol=2e-2)
        norm.float()


def test_the_number_of_threads_changes_no_bit():
    """Norms' gains are summed in groups whose number is fixed; everything else is row by row."""
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            x, norm = drawn(2400, 64).requires_grad_(), RMSNorm(64, 1e-6)
            (q, k, v), document_BT = (
                (drawn(3, 200, n, 32, seed=n).requires_grad_() for n in (4, 1, 1)),
                torch.zeros(3, 200),
            )
            mixed = document_attention(q, k, v, first_keys(document_BT, 0))
            found.append(torch.autograd.grad((norm(x).sum(), mixed.square().sum()), (x, norm.weight, q, k, v)))
            if cpu.supports_weight_grad_in(BF16):
                grad_out, x = drawn(1000, 200, dtype=BF16), drawn(1000, 300, dtype=BF16, seed=1)
                found[-1] = (*found[-1], cpu.weight_grad(grad_out, x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])  # the second normalises heads
def test_a_model_learns_the_same(make_model, dtype, architecture, without):
    model = make_model(hidden_size=512, architecture=architecture, num_attention_heads=4, head_dim=32)
    set_compute_dtype(model, dtype)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(61, (2, 150), generator=generator)
    document_BT = (torch.rand(2, 150, generator=generator) < 1 / 40).long().cumsum(1)
    target_N, weight_N = torch.randint(61, (300,), generator=generator), torch.rand(300, generator=generator)

    def run():
        model.zero_grad()
        loss = model(ids_BT, document_BT, score=CrossEntropy(target_N, weight_N))
        loss.backward()
        return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}

    loss, grads = run()
    without()
    plain_loss, plain_grads = run()
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6 if dtype is None else 2e-3, atol=0)
    set_compute_dtype(model, None)
    _, exact = run()
    if dtype is None:
        for name, grad in grads.items():
            assert off(grad, exact[name].double()) < 2e-5, name
    else:
        ours, theirs = (torch.cat([x.flatten() for x in each.values()]) for each in (grads, plain_grads))
        wanted = torch.cat([x.flatten() for x in exact.values()]).double()
        assert off(ours, wanted) < 1.1 * off(theirs, wanted)  # most of both is the matmuls' rounding


def test_the_heads_gradient(without):
    hidden, weight = drawn(70, 32, dtype=BF16).requires_grad_(), drawn(90, 32, seed=1).requires_grad_()
    target, counts = torch.arange(70), torch.ones(70)

    def run():
        loss = fused_linear_cross_entropy(hidden, weight, target, counts, BF16)
        return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

    got = run()
    without()
    for one, other in zip(got, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_a_target_that_is_no_token():
    """As torch's own operations raise it, instead of reading what is not there."""
    logits, ones, room = drawn(2, 5), torch.ones(2), torch.empty(3, 2)
    for bad in (-100, 5):
        target = torch.tensor([0, bad])
        with pytest.raises(IndexError, match="out of range"):
            cpu.cross_entropy_inplace(logits, target, ones, True)
        with pytest.raises(IndexError, match="out of range"):
            cpu.log_probs(logits, target, *room)
        with pytest.raises(IndexError, match="out of range"):
            cpu.log_softmax_backward(logits, target, ones, ones)


def test_what_they_do_not_take():
    x = drawn(4, 8)
    assert not cpu.supports("rotate", x, x.bfloat16(), torch.nn.Parameter(x))
    assert "float64" in cpu.supports("rotate", x.double())
    assert cpu.supports("rotate", x.half())
    assert "contiguous" in cpu.supports("rotate", x.T)
    assert "CPU" in cpu.supports("rotate", x.to("meta"))
    assert not cpu.supports("add", x.bfloat16(), x) and cpu.supports("add", x, x.bfloat16())
    assert cpu.supports("swiglu_forward", x, x.bfloat16()) and cpu.supports("rms_norm_forward", x, torch.half, x)
    before = x.clone()
    with arena.disabled():  # stand-ins without memory: what is made has its shape, and nothing is called
        assert cpu.add(x, x, x) is x
        assert cpu.swiglu_forward(x, x).shape == x.shape
    assert torch.equal(x, before)


def child(code, **environment):
    """A process of its own."""
    values = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    limit = 2 * BUILD_SECONDS
    done = subprocess.run([sys.executable, "-c", code], env=values, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def quick_compiler(tmp_path_factory):
    """The environment of a compiler that does not optimise: for what is built, not for what it computes."""
    script = tmp_path_factory.mktemp("compiler") / "cc"
    script.write_text('#!/bin/sh\nPATH=${PATH#*:} exec cc "$@" -O0\n')
    script.chmod(0o755)
    return {"PATH": f"{script.parent}:{os.environ['PATH']}", "CC": ""}


ASK = (
    "import torch; from penjing.kernels.cpu import library, ops; "
    "print(not ops.supports('add', torch.ones(2)), library.unavailable_reason())"
)


@pytest.mark.nightly
@pytest.mark.timeout(3000)  # it compiles several times
def test_they_are_built_once_and_by_several_at_once(tmp_path, quick_compiler):
    environment = {**quick_compiler, "XDG_CACHE_HOME": str(tmp_path)}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        said = list(pool.map(lambda _: child(ASK, **environment), range(3)))
    assert said == ["True"] * 3
    (built,) = (tmp_path / "penjing").iterdir()
    stamp = built.stat().st_mtime_ns
    assert child(ASK, **environment) == "True"
    assert built.stat().st_mtime_ns == stamp


LOAD = """
import warnings
import torch
from penjing.kernels.cpu import library
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert library.kernels() is not None
(path,) = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "cpu_kernels-" in line}
print(len(said), path)
"""


FULL = """
import errno, os
def refuse(handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
os.fsync = refuse
"""


@pytest.mark.timeout(3000)  # it compiles several times
def test_a_damaged_library_is_never_loaded_but_built_again_and_said_once(tmp_path, quick_compiler):
    environment = {**quick_compiler, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    cached = Path(child(LOAD, **environment).removeprefix("0 "))
    assert cached.parent == tmp_path / "cache" / "penjing"
    good, copy = cached.read_bytes(), tmp_path / "copy"
    half = len(good) // 2
    blocks_not_written = good[:half] + bytes(len(good) - half)
    one_bit = good[:half] + bytes([good[half] ^ 1]) + good[half + 1 :]
    for damaged in (
        b"",
        *(good[:size] for size in (31, 32, 100, 4096, -4096, -1)),
        good + b"\0",
        blocks_not_written,
        one_bit,
    ):
        copy.write_bytes(damaged)
        assert not is_intact(copy)
    cached.write_bytes(good[:4096])  # the process that maps it dies of SIGBUS
    said, path = child(FULL + LOAD, **environment).split(maxsplit=1)
    assert said == "1" and Path(path).is_relative_to(tmp_path / "temporary")
    assert cached.read_bytes() == good[:4096]
    assert child(LOAD, **environment) == f"1 {cached}"
    assert child(FULL + LOAD, **environment) == f"0 {cached}"  # an intact one is loaded, whatever cannot be written
    assert list(cached.parent.iterdir()) == [cached] and not list((tmp_path / "temporary").iterdir())


@pytest.mark.nightly
def test_without_a_compiler_torch_does_and_says_why(tmp_path, quick_compiler):
    nothing = {"XDG_CACHE_HOME": str(tmp_path), "CC": ""}
    assert child(ASK, **nothing, PATH=str(tmp_path)) == "False there is no C compiler (cc, gcc or clang)"
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: internal error' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert child(ASK, **nothing, PATH=str(tmp_path)).endswith("could not build them: cc: internal error")
    assert child(ASK, **nothing, PATH=f"{tmp_path}:{quick_compiler['PATH']}") == "True"  # the next compiler can
    assert child(ASK, PENJING_KERNELS="off") == "False PENJING_KERNELS=off"
    folder = tmp_path / "file"
    folder.write_text("")  # a cache that cannot be written
    left = tmp_path / "left"
    left.mkdir()
    assert child(ASK, **quick_compiler, XDG_CACHE_HOME=str(folder / "below"), TMPDIR=str(left)) == "True"
    assert not list(left.glob("penjing-*"))
