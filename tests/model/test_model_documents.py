"""What a position may look at: its own document's past and nothing else."""

from __future__ import annotations

import pytest
import torch

from penjing.kernels.attention_metadata import cache_mask, document_mask

IDS_BT = torch.randint(0, 61, (1, 14), generator=torch.Generator().manual_seed(2))
LENGTHS = (5, 1, 8)


def gradient_reach(model, document_BT):
    """reach[i, j]: whether the logits at position i depend on the embedding of position j."""
    embedded = model.embed(IDS_BT).detach().requires_grad_()
    handle = model.embed.register_forward_hook(lambda *_: embedded)
    logits_TV = model(IDS_BT, document_BT)[0]
    handle.remove()
    noise_TV = torch.randn(logits_TV.shape, generator=torch.Generator().manual_seed(0))
    reach = torch.zeros(14, 14, dtype=torch.bool)
    for position in range(14):
        (slope,) = torch.autograd.grad((logits_TV * noise_TV)[position].sum(), embedded, retain_graph=True)
        reach[position] = slope[0].abs().sum(-1) > 0
    return reach


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_causality_by_gradient(make_model, architecture):
    reach = gradient_reach(make_model(architecture=architecture), None)
    assert torch.equal(reach, torch.ones(14, 14, dtype=torch.bool).tril())


def test_packed_documents_cannot_see_each_other_by_gradient(make_model):
    document_T = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    reach = gradient_reach(make_model(), document_T[None])
    same = document_T[:, None] == document_T
    assert torch.equal(reach, same.tril())


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_packed_document_reads_as_it_does_alone(make_model, architecture):
    model = make_model(architecture=architecture)
    document_BT = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None]
    with torch.no_grad():
        packed = model(IDS_BT, document_BT)
        alone = torch.cat([model(part) for part in IDS_BT.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert (model(IDS_BT) - alone).abs().max() > 1e-2, "documents made no difference: the test shows nothing"


def test_padding_changes_nothing_before_it(make_model):
    model = make_model()
    document_BT = torch.tensor([[0] * 9 + [-1] * 5])
    with torch.no_grad():
        torch.testing.assert_close(model(IDS_BT, document_BT)[:, :9], model(IDS_BT[:, :9]), rtol=0, atol=1e-5)


def test_masks_against_the_rule_written_out():
    document_BT = torch.tensor([[0, 0, 1, 1, 1], [3, 2, 2, -1, -1]])
    mask = document_mask(document_BT)
    assert mask.shape == (2, 1, 5, 5)
    for row in range(2):
        for query in range(5):
            for key in range(5):
                allowed = key <= query and document_BT[row, query] == document_BT[row, key]
                assert bool(mask[row, 0, query, key]) == allowed
    cached = cache_mask(torch.tensor([[0, 1], [3, 4]]), 6)
    assert cached.shape == (2, 1, 2, 6)
    assert cached.sum(-1).tolist() == [[[1, 2]], [[4, 5]]]
