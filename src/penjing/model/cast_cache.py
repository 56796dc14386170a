"""Weights cast once for a whole generation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from penjing.kernels import casts
from penjing.model.linear import Linear
from penjing.model.transformer import Transformer


@contextmanager
def cache_casted_weights(model: Transformer) -> Iterator[None]:
    """For generation: cast weights to `compute_dtype` once instead of at every matmul without
    gradients, so that a token takes little longer than reading the weights, which must not change meanwhile. Also run
    eagerly: compiled code would be compiled again for every length."""
    # If dynamo is not imported, nothing is compiled; importing it takes seconds.
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with casts.kept(_matmul_weights(model)), stance:
        yield


def casted_weights(model: Transformer) -> list[Tensor]:
    """The kept casts of the model's weights."""
    return casts.of(weight for weight, _ in _matmul_weights(model))


def _matmul_weights(model: Transformer) -> list[tuple[Tensor, torch.dtype | None]]:
    layers = [layer for layer in model.modules() if type(layer) is Linear and layer is not model.head]
    weights = [(layer.weight, layer.compute_dtype) for layer in layers]
    return [*weights, (model.head_weight_VD, model.compute_dtype)]
