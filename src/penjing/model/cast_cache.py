"""Weights cast once for a whole generation."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penjing.kernels import casts
from penjing.model.linear import Linear
from penjing.model.transformer import Transformer

_lock, _users = threading.Lock(), [0]


@contextmanager
def cache_casted_weights(model: Transformer) -> Iterator[None]:
    """For generation: cast weights to `compute_dtype` once instead of at every matmul without
    gradients, so that a token takes little longer than reading the weights, which must not change meanwhile. Also run
    eagerly: compiled code would be compiled again for every length."""
    _set_stance(1, "force_eager")
    try:
        with casts.kept(_matmul_weights(model)):
            yield
    finally:
        _set_stance(-1, "default")


def _set_stance(change: int, stance: str) -> None:
    """Set the stance when one enters, and when the last one leaves, in whatever order they do. If dynamo is not
    imported, nothing is compiled; importing it takes seconds."""
    with _lock:
        _users[0] += change
        if (change > 0 or not _users[0]) and "torch._dynamo" in sys.modules:
            torch.compiler.set_stance(stance)


def casted_weights(model: Transformer) -> list[Tensor]:
    return casts.of(weight for weight, _ in _matmul_weights(model))


def _matmul_weights(model: Transformer) -> list[tuple[Tensor, torch.dtype | None]]:
    layers = [layer for layer in model.modules() if type(layer) is Linear and layer is not model.head]
    weights = [(layer.weight, layer.compute_dtype) for layer in layers]
    return [*weights, (model.head_weight_VD, model.compute_dtype)]
