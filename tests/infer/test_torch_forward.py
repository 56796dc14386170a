"""The forward pass by torch: sequences in slots, read in any mixture of chunks and single tokens, are what the model
computes of each as a whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import small_model

from penjing.devices.cpu import Cpu
from penjing.infer.forward import bytes_per_slot, default_slots, ints
from penjing.infer.generate import make_forward
from penjing.infer.torch_forward import TorchForward
from penjing.model.cast_cache import casted_weights
from penjing.model.linear import Linear, set_compute_dtype

SHAPES = {
    "qwen3": {},
    "window": {"architecture": "qwen2", "sliding_window": 6},
    "experts": {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
SLOTS, TOKENS = 5, 40


@pytest.fixture(params=list(SHAPES))
def model(request):
    return small_model(vocab_size=37, tie_word_embeddings=False, **SHAPES[request.param]).eval()


def whole(model, ids):
    with torch.no_grad():
        found = model(torch.tensor([ids]))
    return (found[0] if isinstance(found, tuple) else found)[0]


def rows(read):
    """Arrays of one pass: (slot, first position, ids) of each sequence."""
    slot_N = ints([slot for slot, _, ids in read for _ in ids])
    position_N = ints([first + number for _, first, ids in read for number in range(len(ids))])
    return slot_N, position_N, ints([index for _, _, ids in read for index in ids])


@pytest.mark.parametrize("multiple", [Cpu.row_multiple, 1], ids=["as on a CPU", "as elsewhere"])
def test_any_mixture_of_chunks_and_single_tokens(model, monkeypatch, multiple):
    monkeypatch.setattr(Cpu, "row_multiple", multiple)
    generator = np.random.default_rng(0)
    forward = TorchForward(model, num_slots=SLOTS, max_tokens=TOKENS)
    texts = generator.integers(0, 37, (SLOTS, TOKENS)).tolist()
    expected = [whole(model, text) for text in texts]
    read = [0] * SLOTS
    while any(length < TOKENS for length in read):
        parts = []
        for slot in generator.permutation(SLOTS).tolist():
            count = min(int(generator.choice([0, 1, 1, 1, 3, 9])), TOKENS - read[slot])
            if count:
                parts.append((slot, read[slot], texts[slot][read[slot] : read[slot] + count]))
        if not parts:
            continue
        arrays = rows(parts)
        at_R = np.sort(generator.permutation(len(arrays[0]))[: 1 + len(arrays[0]) // 2])
        logits_RV = forward(*arrays, at_R)
        for row, at in enumerate(at_R.tolist()):
            slot, position = int(arrays[0][at]), int(arrays[1][at])
            torch.testing.assert_close(logits_RV[row], expected[slot][position], rtol=1e-4, atol=1e-4)
        for slot, first, ids in parts:
            read[slot] = first + len(ids)
    forward.close()


def test_a_copied_beginning_is_the_beginning(model):
    forward = TorchForward(model, num_slots=3, max_tokens=TOKENS)
    text, other = list(range(20)), [*range(12), 30, 31, 32]
    forward(*rows([(2, 0, text)]), ints([0]))
    forward(*rows([(0, 0, [5]), (1, 0, [6])]), ints([0]))  # rows change places
    forward.copy_prefix(2, 0, 12)
    logits_RV = forward(*rows([(0, 12, other[12:]), (2, 20, [9])]), ints([2, 3]))
    torch.testing.assert_close(logits_RV[0], whole(model, other)[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_RV[1], whole(model, [*text, 9])[-1], rtol=1e-4, atol=1e-4)
    forward.close()


def test_the_model_is_left_as_it_was():
    model = small_model().train()
    set_compute_dtype(model, torch.bfloat16)
    layers = [layer for layer in model.modules() if type(layer) is Linear]
    forward = TorchForward(model, num_slots=1, max_tokens=8)
    assert not model.training and len(casted_weights(model)) >= len(layers)
    assert not forward(*rows([(0, 0, [1, 2])]), ints([1])).requires_grad
    forward.close()
    assert model.training and not casted_weights(model)


def test_what_a_slot_takes():
    model = small_model()
    config = model.config
    assert bytes_per_slot(config, 10, torch.bfloat16) == 2 * 2 * 1 * 8 * 10 * 2  # keys and values, layers, heads, K
    forward = make_forward(model, num_slots=2, max_tokens=32)
    assert forward.bytes_per_slot == bytes_per_slot(config, 32, torch.float32)
    forward.close()
    assert default_slots(model, 64) == 64


def test_fewer_slots_where_keys_and_values_would_take_the_memory(monkeypatch):
    model = small_model()
    memory = int(4.0 * 10.5 * bytes_per_slot(model.config, 64, torch.float32))
    monkeypatch.setattr(Cpu, "memory_bytes", lambda self, device: memory)
    assert default_slots(model, 64) == 10
    assert default_slots(model, 6400) == 1
