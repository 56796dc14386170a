"""Reading with a cache gives what reading without gives."""

from __future__ import annotations

import pytest
import torch

from penjing.model.cache import Cache

IDS_BT = torch.randint(0, 61, (4, 20), generator=torch.Generator().manual_seed(3))


def new_cache(model, rows, max_tokens=24, dtype=torch.float32):
    return Cache(model.config, rows, max_tokens, device="cpu", dtype=dtype)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("cuts", [(20,), (1,) * 20, (7, 1, 1, 5, 6), (19, 1)])
@torch.no_grad()
def test_cache_equals_no_cache(make_model, architecture, cuts):
    model = make_model(architecture=architecture)
    cache = new_cache(model, 4)
    parts = [model(part, cache=cache) for part in IDS_BT.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(IDS_BT), rtol=0, atol=1e-5)
    assert cache.length_B.tolist() == [20] * 4


@torch.no_grad()
def test_ragged_prompts(make_model):
    model = make_model()
    lengths = [3, 11, 1, 8]
    cache = new_cache(model, 4)
    prompt_BT = IDS_BT[:, :11].clone()
    for row, length in enumerate(lengths):
        prompt_BT[row, length:] = 60  # rubbish behind the shorter prompts
    model(prompt_BT, cache=cache)
    cache.length_B = torch.tensor(lengths)
    rows = [0, 1, 2, 3]
    for _ in range(6):
        next_B = torch.tensor([IDS_BT[row, lengths[row]] for row in rows])
        logits_BV = model(next_B[:, None], cache=cache)[:, 0]
        for place, row in enumerate(rows):
            lengths[row] += 1
            alone = model(IDS_BT[row : row + 1, : lengths[row]])[0, -1]
            torch.testing.assert_close(logits_BV[place], alone, rtol=0, atol=1e-5)
    assert cache.length_B.tolist() == lengths


@torch.no_grad()
def test_bfloat16_cache_is_close(make_model):
    model = make_model()
    cache = new_cache(model, 4, dtype=torch.bfloat16)
    torch.testing.assert_close(model(IDS_BT, cache=cache), model(IDS_BT), rtol=0.05, atol=0.3)


def test_a_cached_row_is_one_document(make_model):
    model = make_model()
    with pytest.raises(AssertionError):
        model(IDS_BT, torch.zeros_like(IDS_BT), cache=new_cache(model, 4))
