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
def test_ragged_prompts_and_dropped_rows(make_model):
    model = make_model()
    lengths = [3, 11, 1, 8]
    cache = new_cache(model, 4)
    prompt_BT = IDS_BT[:, :11].clone()
    for row, length in enumerate(lengths):
        prompt_BT[row, length:] = 60  # rubbish behind the shorter prompts
    model(prompt_BT, cache=cache)
    cache.length_B = torch.tensor(lengths)
    rows = [0, 1, 2, 3]
    for drop in (None, 1, None, 0, 3, None):
        if drop is not None:
            place_N = torch.tensor([place for place, row in enumerate(rows) if row != drop])
            cache.select_rows(place_N)
            rows.remove(drop)
        next_B = torch.tensor([IDS_BT[row, lengths[row]] for row in rows])
        logits_BV = model(next_B[:, None], cache=cache)[:, 0]
        for place, row in enumerate(rows):
            lengths[row] += 1
            alone = model(IDS_BT[row : row + 1, : lengths[row]])[0, -1]
            torch.testing.assert_close(logits_BV[place], alone, rtol=0, atol=1e-5)
    assert rows == [2]
    assert cache.length_B.tolist() == [lengths[2]]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 3], [3, 1], [2], [], [1, 0, 3, 2]])
def test_keep_takes_rows_in_any_order(make_model, order):
    model = make_model()
    cache = new_cache(model, 4)
    cache.key_LBGSK.normal_()
    cache.value_LBGSK.normal_()
    cache.length_B = torch.tensor([5, 6, 7, 8])
    row_N = torch.tensor(order, dtype=torch.long)
    key, value, length = cache.key_LBGSK[:, row_N], cache.value_LBGSK[:, row_N], cache.length_B[row_N]
    storage = cache.key_LBGSK.data_ptr()
    cache.select_rows(row_N)
    assert torch.equal(cache.key_LBGSK, key)
    assert torch.equal(cache.value_LBGSK, value)
    assert torch.equal(cache.length_B, length)
    assert not order or cache.key_LBGSK.data_ptr() == storage, "rows move in place"
    one_BTGK = torch.ones(len(order), 1, 2, 8)
    cache.write(1, torch.zeros(len(order), 1, dtype=torch.long), one_BTGK, 2 * one_BTGK)
    assert bool((cache.key_LBGSK[1, :, :, 0] == 1).all()), "a narrowed cache can still be written"
    assert bool((cache.value_LBGSK[1, :, :, 0] == 2).all())


@torch.no_grad()
def test_bfloat16_cache_is_close(make_model):
    model = make_model()
    cache = new_cache(model, 4, dtype=torch.bfloat16)
    torch.testing.assert_close(model(IDS_BT, cache=cache), model(IDS_BT), rtol=0.05, atol=0.3)


def test_a_cached_row_is_one_document(make_model):
    model = make_model()
    with pytest.raises(AssertionError):
        model(IDS_BT, torch.zeros_like(IDS_BT), cache=new_cache(model, 4))
