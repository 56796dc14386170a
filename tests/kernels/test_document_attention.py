"""Attention by documents equals the masked reference: values, gradients, windows, branches, any length of row."""

from dataclasses import replace

import pytest
import torch

from penjing.kernels import tiled_attention as tiled
from penjing.kernels import varlen_attention as varlen
from penjing.kernels.attention_metadata import AttentionInputs, document_mask, tree_mask
from penjing.kernels.reference import masked_attention
from penjing.kernels.tiled_attention import tiled_attention
from penjing.kernels.varlen_attention import varlen_attention
from penjing.loader.batch import cu_seqlens
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.fake_device_mode import FakeDeviceMode


def rows(num_rows, num_tokens, mean_length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(num_rows, num_tokens, generator=generator) < 1 / mean_length).long().cumsum(1)


def inputs(num_rows, num_tokens, heads=4, groups=2, size=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = ((heads, size), (groups, size), (groups, size))
    made = [torch.randn(num_rows, num_tokens, *shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made]


def reference(q_BTHK, k_BTGK, v_BTGK, mask_B1TS):
    return masked_attention(q_BTHK, k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2), mask_B1TS)


def same(run, wanted, tensors, **tolerance):
    upstream = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(2)).to(tensors[0])
    got, expected = run(), wanted()
    torch.testing.assert_close(got, expected, **tolerance)
    for one, other in zip(
        torch.autograd.grad(got, tensors, upstream), torch.autograd.grad(expected, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("num_tokens", "mean_length", "window"),
    [(128, 20, 0), (300, 70, 0), (640, 1000, 0), (200, 90, 33), (70, 5, 4), (1100, 300, 0)],
)
def test_documents(groups, num_tokens, mean_length, window):
    document_BT = rows(3, num_tokens, mean_length)
    tensors = inputs(3, num_tokens, groups=groups)
    mask_B1TS = document_mask(document_BT, window)
    same(lambda: tiled_attention(*tensors, document_BT, None, window), lambda: reference(*tensors, mask_B1TS), tensors)


def test_probabilities_made_again_are_those_that_were_kept(monkeypatch):
    document_BT, tensors = rows(2, 192, 60), inputs(2, 192)
    kept = torch.autograd.grad(tiled_attention(*tensors, document_BT).square().sum(), tensors)
    monkeypatch.setattr(tiled, "MAX_KEPT_KEYS", 0)
    again = torch.autograd.grad(tiled_attention(*tensors, document_BT).square().sum(), tensors)
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("window", [0, 20])
def test_branches(window):
    """A prompt of 30, then two answers of 25 that each go on where it ends; a second document; padding."""
    document_T = torch.tensor([0] * 80 + [1] * 20 + [-1] * 10)
    end_T = torch.tensor([80] * 30 + [55] * 25 + [80] * 25 + [100] * 20 + [110] * 10)
    parts = (range(30), range(30, 55), range(30, 55), range(20), [0] * 10)
    position_T = torch.tensor([place for part in parts for place in part])
    document_BT, position_BT = document_T[None], position_T[None]
    mask_B1TS, tensors = tree_mask(end_T[None], position_BT, window), inputs(1, 110)
    same(lambda: tiled_attention(*tensors, document_BT, mask_B1TS), lambda: reference(*tensors, mask_B1TS), tensors)


def test_bfloat16_is_as_near_to_the_truth_as_an_eager_softmax():
    document_BT, exact = rows(2, 256, 80), inputs(2, 256, dtype=torch.float32)
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    wanted = reference(*exact, document_mask(document_BT))
    got = tiled_attention(*rounded, document_BT)
    assert (got.float() - wanted).abs().max() < 0.03


def test_a_document_does_not_depend_on_its_neighbours():
    tensors = inputs(1, 100, dtype=torch.float32)
    document_BT = torch.tensor([[0] * 40 + [1] * 60])
    before = tiled_attention(*tensors, document_BT)[:, 40:].clone()
    with torch.no_grad():
        for x in tensors:
            x[:, :40] += 100
    assert torch.equal(tiled_attention(*tensors, document_BT)[:, 40:], before)


@pytest.mark.parametrize("window", [0, 33])
def test_a_compiled_block_computes_the_same(window):
    document_BT, tensors = rows(2, 100, 30), inputs(2, 100)
    compiled = torch.compile(tiled_attention, fullgraph=True, dynamic=False, backend="aot_eager")
    mask_B1TS = document_mask(document_BT, window)
    same(lambda: compiled(*tensors, document_BT, None, window), lambda: reference(*tensors, mask_B1TS), tensors)


def test_edges_of_documents():
    document_BT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, -1]])
    edge_S = cu_seqlens(document_BT)
    assert edge_S[:4].tolist() == [0, 2, 4, 7]
    assert edge_S[4:].eq(8).all()
    assert edge_S.dtype == torch.int32
    same_shape = [len(cu_seqlens(rows(8, 512, mean, seed))) for mean in (90, 200, 5000) for seed in (1, 2)]
    assert set(same_shape) == {65}
    assert len(cu_seqlens(torch.arange(4096).view(8, 512))) == 4097


@pytest.mark.parametrize("knows_groups", [False, True])
@pytest.mark.parametrize("window", [0, 7])
def test_the_kernel_is_told_what_its_version_knows(knows_groups, window, monkeypatch):
    """A stand-in that attends as the kernel says it does, by its edges, with the heads it is given."""
    document_BT = rows(2, 64, 20)
    q_BTHK, k_BTGK, v_BTGK = inputs(2, 64)

    def kernel(q_NHK, k_NGK, v_NGK, edge_q, edge_k, longest_q, longest_k, window_size, **told):
        assert told == ({"enable_gqa": True} if knows_groups else {})
        assert longest_q == longest_k == 64
        assert window_size == ((6, 0) if window else (-1, 0))
        assert (k_NGK.shape[1] == q_NHK.shape[1]) == (not knows_groups)
        number_N = torch.searchsorted(edge_q.long(), torch.arange(128), right=True)
        return reference(q_NHK[None], k_NGK[None], v_NGK[None], document_mask(number_N[None], window))[0]

    monkeypatch.setattr(varlen, "_kernel", lambda: (kernel, knows_groups))
    got = varlen_attention(q_BTHK, k_BTGK, v_BTGK, cu_seqlens(document_BT), 64, window)
    torch.testing.assert_close(got, reference(q_BTHK, k_BTGK, v_BTGK, document_mask(document_BT, window)))


def test_the_kernel_is_for_half_precision_on_cuda():
    number_BT = torch.zeros(1, 8, dtype=torch.long)
    asked = AttentionInputs(
        position_BT=number_BT, document_BT=number_BT, cu_seqlens_S=number_BT[0], heads=(2, 64), dtype=torch.bfloat16
    )
    assert varlen.supports("attention_metadata", asked) == "for GPUs only"
    with FakeDeviceMode(Target(capability=(9, 0))):
        there = replace(asked, position_BT=number_BT.to("cuda"))
        assert not varlen.supports("attention_metadata", there)
        for more in (
            {"dtype": torch.float32},
            {"heads": (2, 300)},
            {"cu_seqlens_S": None},
            {"subtree_end_BT": number_BT},
        ):
            assert varlen.supports("attention_metadata", replace(there, **more))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("window", [0, 33])
def test_the_kernel_equals_the_reference(window):
    document_BT = rows(4, 512, 90).cuda()
    tensors = [x.detach().cuda().bfloat16().requires_grad_() for x in inputs(4, 512, size=64, dtype=torch.float32)]
    edge_S = cu_seqlens(document_BT.cpu()).cuda()
    same(
        lambda: varlen_attention(*tensors, edge_S, 512, window),
        lambda: reference(*tensors, document_mask(document_BT, window)),
        tensors,
        rtol=2e-2,
        atol=2e-2,
    )
