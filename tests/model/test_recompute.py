"""Activations made again give the same gradients, bit for bit, and are not kept."""

import pytest
import torch
from small_models import sizes

from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer, recompute_activations

SHAPE = ModelConfig(**sizes(64, 32, 3, 2, 1, 16, 96))


def gradients_and_kept_bytes(what):
    model = Transformer(SHAPE)
    initialise(model, 0)
    recompute_activations(model, what)
    ids_BT = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(1))
    kept = []

    def pack(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = model(ids_BT, torch.zeros_like(ids_BT), score=CrossEntropy(ids_BT.flatten(), torch.ones(128)))
    total.backward()
    return [parameter.grad for parameter in model.parameters()], sum(kept)


@pytest.mark.parametrize("what", ["mlp", "block"])
def test_same_gradients_from_less_memory(what):
    plain, usual = gradients_and_kept_bytes("none")
    again, fewer = gradients_and_kept_bytes(what)
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)
    assert fewer < (0.8 if what == "mlp" else 0.6) * usual
