"""Kernels of our own, run by Triton's interpreter where there is no GPU: they equal the masked reference and torch's
cross-entropy, values and gradients."""

import importlib.util

import pytest
import torch
import torch.nn.functional as functional

from penjing.kernels import experts
from penjing.kernels.attention_metadata import document_mask, key_ranges
from penjing.kernels.reference import masked_attention as attention
from penjing.kernels.triton import ops as gpu
from penjing.kernels.triton import tiles
from penjing.model import kernel_selection
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.linear import set_compute_dtype
from penjing.model.lora import DEFAULT, Lora, adapted, add_adapter
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer, recompute_activations

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
DISPATCH = experts.dispatch_to_experts
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="Triton's interpreter multiplies no bfloat16")


def rows(num_rows, num_tokens, mean_length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(num_rows, num_tokens, generator=generator) < 1 / mean_length).long().cumsum(1).to(DEVICE)


def inputs(num_rows, num_tokens, heads, groups, size, dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = ((heads, size), (groups, size), (groups, size))
    made = [torch.randn(num_rows, num_tokens, *shape, generator=generator) for shape in shapes]
    return [x.to(DEVICE, dtype).requires_grad_() for x in made]


def share(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


def packed_attention(q, k, v, ranges):
    """Heads that are neither normalised nor rotated."""
    angle = torch.zeros(1, q.shape[1], 1, q.shape[3] // 2, device=DEVICE)
    packed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    heads, groups = q.shape[2], k.shape[2]
    return gpu.fused_qk_norm_rope_attention(packed, None, 0.0, (angle.cos(), angle.sin()), ranges, heads, groups)


IN_THE_DEEP_SET = () if torch.cuda.is_available() else pytest.mark.nightly
CASES = [
    # tokens, mean length of a document, window, heads, key heads, dimensions of a head
    (128, 20, 0, 2, 1, 64),
    (130, 60, 33, 4, 1, 16),
    *(
        pytest.param(*case, marks=IN_THE_DEEP_SET)
        for case in [
            (200, 70, 0, 4, 2, 32),
            (150, 1000, 0, 2, 2, 96),
            (70, 5, 4, 1, 1, 128),
            (65, 40, 0, 3, 3, 24),
            (90, 30, 20, 2, 1, 72),
        ]
    ),
]


@pytest.mark.parametrize(("num_tokens", "mean_length", "window", "heads", "groups", "size"), CASES)
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=needs_gpu)])
def test_attention(num_tokens, mean_length, window, heads, groups, size, dtype):
    document_BT = rows(2, num_tokens, mean_length)
    tensors = inputs(2, num_tokens, heads, groups, size, dtype)
    upstream = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    got = packed_attention(*tensors, key_ranges(document_BT, window))
    exact = [x.detach().double().requires_grad_() for x in tensors]
    q, k, v = exact
    wanted = attention(q, k.transpose(1, 2), v.transpose(1, 2), document_mask(document_BT, window))
    bound = 2e-3 if dtype == torch.float16 else 1.2e-2
    assert share(got.detach(), wanted.detach()) < bound
    pairs = zip(
        torch.autograd.grad(got, tensors, upstream),
        torch.autograd.grad(wanted, exact, upstream.double()),
        strict=True,
    )
    for name, (mine, its) in zip("qkv", pairs, strict=True):
        assert share(mine, its) < bound, name


@pytest.mark.nightly
def test_attention_gives_the_same_bits_again_whatever_the_layout_of_its_gradient():
    tensors, ranges = inputs(2, 100, 4, 2, 16, torch.float16), key_ranges(rows(2, 100, 30))
    upstream = torch.randn(2, 100, 4, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.float16)
    apart = upstream.transpose(1, 2).contiguous().transpose(1, 2)
    found = []
    for grad in (upstream, apart, upstream):
        out = packed_attention(*tensors, ranges)
        found.append([out.detach(), *torch.autograd.grad(out, tensors, grad)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("window", [0, 3])
def test_edges(window):
    document_BT = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5]])
    mask_BTS = document_mask(document_BT, window)[:, 0].int()
    first_BT, last_BT = key_ranges(document_BT, window)
    assert first_BT.tolist() == mask_BTS.argmax(dim=2).tolist()
    looking_BS = [[int(row[:, key].nonzero().max()) + 1 for key in range(9)] for row in mask_BTS]
    assert last_BT.tolist() == looking_BS
    assert first_BT.dtype == last_BT.dtype == torch.int32


@pytest.mark.parametrize("vocabulary", [100, 4096, 6400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nats(vocabulary, dtype):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(7, vocabulary, generator=generator) * 4).to(DEVICE, dtype)
    target = torch.tensor([0, vocabulary - 1, 5, 50, 51, 52, 53]).to(DEVICE)
    weight = torch.tensor([1.0, 2.0, 0.0, 0.5, 1.0, 1.0, -1.0]).to(DEVICE)
    exact = logits.double().requires_grad_()
    wanted = functional.cross_entropy(exact, target, reduction="none") * weight
    wanted.sum().backward()
    before = logits.clone()
    got = gpu.cross_entropy_inplace(logits, target, weight, False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(got.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(gpu.cross_entropy_inplace(logits, target, weight, True), got)
    assert share(logits, exact.grad) < {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]


def test_small_cards_get_small_tiles():
    assert tiles.tiles(64, 100 << 10) is tiles.SMALL
    assert tiles.tiles(65, 227 << 10) is tiles.TILES[96]
    assert tiles.tiles(97, 227 << 10) is tiles.TILES[128]


def test_heads_are_held_in_as_few_dimensions_as_can_be():
    found = {size: gpu.split_head_dim(size) for size in range(16, 129, 8)}
    assert all(size <= sum(parts) and (parts[1] == 0 or parts[0] < size) for size, parts in found.items())
    assert {16: (16, 0), 24: (32, 0), 40: (32, 16), 64: (64, 0), 80: (64, 16), 96: (64, 32), 104: (128, 0)}.items() <= (
        found.items()
    )


def test_nothing_of_it_on_a_cpu():
    assert gpu.reason(torch.device("cpu"), torch.bfloat16)
    assert gpu.reason(torch.device("cuda"), torch.float32)


HEADS = [
    # heads, key heads, dimensions, turned, normalised, rows of the table
    (2, 1, 32, 32, True, 1),
    (3, 3, 16, 16, False, 2),
    (4, 2, 24, 24, True, 2),
    (2, 1, 64, 32, True, 1),
]


@pytest.mark.parametrize(("heads", "groups", "size", "turned", "normal", "tables"), HEADS)
def test_heads(heads, groups, size, turned, normal, tables):
    """Norm, gain and turn of queries and keys, then attention: equal to the parts in float64."""
    generator, num_tokens = torch.Generator().manual_seed(5), 70
    document_BT = rows(2, num_tokens, 30)
    made = torch.randn(2, num_tokens, (heads + 2 * groups) * size, generator=generator)
    packed = made.to(DEVICE, torch.float16).requires_grad_()
    gains = [(torch.rand(size, generator=generator) + 0.5).to(DEVICE).requires_grad_() for _ in range(2)]
    angle = torch.rand(tables, num_tokens, 1, turned // 2, generator=generator).to(DEVICE) * 6
    rotary, ranges = (angle.cos(), angle.sin()), key_ranges(document_BT)
    got = gpu.fused_qk_norm_rope_attention(
        packed, tuple(gains) if normal else None, 1e-5, rotary, ranges, heads, groups
    )
    upstream = torch.randn(got.shape, generator=generator).to(DEVICE, torch.float16)

    exact = packed.detach().double().requires_grad_()
    exact_gains = [gain.detach().double().requires_grad_() for gain in gains]
    q, k, v = (x.unflatten(-1, (-1, size)) for x in exact.split([heads * size, groups * size, groups * size], dim=-1))
    turned_parts = []
    for x, gain in zip((q, k), exact_gains, strict=True):
        if normal:
            x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * gain
        low, high, rest = x.split([turned // 2, turned // 2, size - turned], dim=-1)
        cosine, sine = angle.double().cos(), angle.double().sin()
        turned_parts.append(torch.cat((low * cosine - high * sine, high * cosine + low * sine, rest), dim=-1))
    q, k = turned_parts
    wanted = attention(q, k.transpose(1, 2), v.transpose(1, 2), document_mask(document_BT))
    assert share(got.detach(), wanted.detach()) < 2e-3
    mine = torch.autograd.grad(got, [packed, *(gains if normal else [])], upstream)
    its = torch.autograd.grad(wanted, [exact, *(exact_gains if normal else [])], upstream.double())
    for one, other in zip(mine, its, strict=True):
        assert share(one, other) < 3e-3


@pytest.mark.parametrize("size", [40, 256, 700])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gated(size, dtype):
    generator = torch.Generator().manual_seed(6)
    packed = torch.randn(3, 5, 2 * size, generator=generator).to(DEVICE, dtype).requires_grad_()
    upstream = torch.randn(3, 5, size, generator=generator).to(DEVICE, dtype)
    exact = packed.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    wanted = functional.silu(gate) * up
    got = gpu.packed_swiglu(packed)
    bound = 1e-3 if dtype == torch.float16 else 4e-3
    assert share(got.detach(), wanted.detach()) < bound
    (mine,), (its,) = torch.autograd.grad(got, packed, upstream), torch.autograd.grad(wanted, exact, upstream.double())
    assert share(mine, its) < bound


def test_gated_rows_of_different_weight():
    generator = torch.Generator().manual_seed(7)
    packed, upstream = (torch.randn(9, n, generator=generator).to(DEVICE, torch.float16) for n in (600, 300))
    weight = torch.rand(9, generator=generator).to(DEVICE)
    exact, counts = packed.double().requires_grad_(), weight.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    inner = functional.silu(gate) * up * counts[:, None]
    its = torch.autograd.grad(inner, (exact, counts), upstream.double())
    grad, weighted, grad_weight = gpu.weighted_swiglu_backward(upstream, packed, weight)
    assert share(weighted, inner.detach()) < 1e-3
    assert share(grad, its[0]) < 1e-3
    assert share(grad_weight, its[1]) < 1e-5


@pytest.mark.parametrize("weighted", [False, True])
def test_experts_are_combined(weighted):
    generator = torch.Generator().manual_seed(8)
    y = torch.randn(12, 300, generator=generator).to(DEVICE, torch.float16)
    row = torch.randint(12, (5, 3), generator=generator).to(DEVICE)
    weight = torch.rand(5, 3, generator=generator).to(DEVICE) if weighted else None
    wanted = (y[row].double() * (1 if weight is None else weight[..., None].double())).sum(dim=1)
    assert share(gpu.combine_experts(y, row, weight), wanted) < 1e-3


class Way:
    """A model of every part, in float16, with kernels or without."""

    def __init__(self, architecture, monkeypatch):
        more = (
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            if architecture == "qwen3_moe"
            else {}
        )
        sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        self.config = ModelConfig(architecture=architecture, **sizes, **heads, **more)
        self.monkeypatch = monkeypatch

    def __call__(self, kernels, dtype, how="off", recompute="none", rank=0):
        self.monkeypatch.setattr(gpu, "has_kernels", lambda device: kernels)
        self.monkeypatch.setattr(
            experts,
            "dispatch_to_experts",
            lambda expert, num, on_host: DISPATCH(expert, num, on_host=on_host and not kernels),
        )
        torch._dynamo.reset()
        model = Transformer(self.config)
        initialise(model, 1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():  # residual outputs begin at zero, and would hide what is before them
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        if rank:
            add_adapter(model, Lora(rank=rank), seed=3)
            for layer in adapted(model).values():  # B, too, begins at zero
                layer.adapters[DEFAULT].B.data.normal_(0, 0.1, generator=generator)
        recompute_activations(model, recompute)
        model.to(DEVICE)
        set_compute_dtype(model, None if dtype == torch.float32 else dtype)
        if how == "blocks":
            for block in model.blocks:
                block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        elif how == "with its loss":
            model.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        ids_BT = torch.randint(300, (1, 50), generator=generator).to(DEVICE)
        document_BT = rows(1, 49, 20)
        found = model(
            ids_BT[:, :-1], document_BT, score=CrossEntropy(ids_BT[:, 1:].flatten(), torch.ones(49, device=DEVICE))
        )
        loss = (found[0] if isinstance(found, tuple) else found) / 49
        (loss * 1024).backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]) / 1024


# The interpreter takes seconds for each.
USUAL = (("qwen3", "with its loss"), ("llama", "off"), ("qwen3_moe", "off"))
DEEP = [(name, how) for name in ("qwen3", "llama", "qwen3_moe") for how in ("off", "blocks", "with its loss")]


@pytest.mark.parametrize(
    ("architecture", "how"),
    [pytest.param(*each, marks=() if each in USUAL else IN_THE_DEEP_SET) for each in DEEP],
)
def test_a_model_of_kernels_is_the_plain_one(architecture, how, monkeypatch):
    """Compiled too: what a compiler is told of each operator is what it does."""
    if architecture == "qwen3_moe" and not HAS_GPU:
        pytest.skip("grouped matmuls on a CPU take no float16")
    dtype = torch.bfloat16 if architecture == "qwen3_moe" and how != "off" else torch.float16
    way = Way(architecture, monkeypatch)
    wanted, got = way(False, torch.float32), way(True, dtype, how)
    bound = 8 if dtype == torch.bfloat16 else 1  # that many times as wide are its steps
    assert abs(got[0] - wanted[0]) <= 2e-3 * bound
    assert share(got[1], wanted[1]) <= 1e-2 * bound


@pytest.mark.parametrize("how", ["off", pytest.param("blocks", marks=IN_THE_DEEP_SET)])
def test_adapters_beside_kernels(how, monkeypatch):
    way = Way("qwen3", monkeypatch)
    wanted, got = way(False, torch.float32, rank=4), way(True, torch.float16, how, rank=4)
    assert abs(got[0] - wanted[0]) <= 2e-3
    assert share(got[1], wanted[1]) <= 1e-2


@pytest.mark.parametrize("what", [pytest.param(what, marks=IN_THE_DEEP_SET) for what in ("mlp", "block")])
def test_activations_are_made_again_by_kernels(what, monkeypatch):
    way = Way("qwen3", monkeypatch)
    (loss, gradient), (again, its) = way(True, torch.float16), way(True, torch.float16, recompute=what)
    assert loss == again
    assert torch.equal(gradient, its)


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("llama", marks=IN_THE_DEEP_SET)])
def test_kernels_are_tried_before_they_are_used(architecture, monkeypatch):
    monkeypatch.setattr(gpu, "has_kernels", lambda device: gpu._is_on)
    monkeypatch.setattr(gpu, "_is_on", True)
    monkeypatch.setattr(kernel_selection, "TEST_TOKENS", 200 if HAS_GPU else 70)
    model = Transformer(Way(architecture, monkeypatch).config)
    assert kernel_selection.check_kernels(model, DEVICE, torch.float64) == ""
    assert "attention" in kernel_selection.check_kernels(model, DEVICE, torch.float16)
    plain = gpu.cross_entropy_inplace
    monkeypatch.setattr(gpu, "cross_entropy_inplace", lambda *given: plain(*given) * 1.2)
    with pytest.warns(UserWarning, match="kernels of our own are not used, torch's are: off by 0.2"):
        assert kernel_selection.check_kernels(model, DEVICE, torch.float16) == ""
    assert gpu.reason(DEVICE, torch.float16)


def test_kernels_that_a_card_has_something_against_are_not_used(monkeypatch):
    def refuse(*_):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(gpu, "has_kernels", lambda device: gpu._is_on)
    monkeypatch.setattr(gpu, "_is_on", True)
    monkeypatch.setattr(gpu, "cross_entropy_inplace", refuse)
    monkeypatch.setattr(kernel_selection, "TEST_TOKENS", 200 if HAS_GPU else 10)
    with pytest.warns(UserWarning, match="RuntimeError: out of resource"):
        kernel_selection.check_kernels(Transformer(Way("qwen3", monkeypatch).config), DEVICE, torch.float16)
    assert not gpu._is_on
