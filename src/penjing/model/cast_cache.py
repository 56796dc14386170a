"""Weights cast once for a whole generation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from penjing.model.linear import Linear
from penjing.model.transformer import Transformer


@contextmanager
def cache_casted_weights(model: Transformer) -> Iterator[None]:
    """For generation: cast weights to `compute_dtype` once instead of at every matmul without
    gradients, so that a token takes little longer than reading the weights, which must not change meanwhile. Also run
    eagerly: compiled code would be compiled again for every length."""
    layers = [layer for layer in model.modules() if type(layer) is Linear and layer is not model.head]
    cast_layers = [layer for layer in layers if layer.cast is None and _needs_cast(layer.weight, layer.compute_dtype)]
    casts_head = model.head_cast is None and _needs_cast(model.head_weight_VD, model.compute_dtype)
    for layer in cast_layers:
        layer.cast = layer.weight.detach().to(layer.compute_dtype)
    if casts_head:
        model.head_cast = model.head_weight_VD.detach().to(model.compute_dtype)
    # If dynamo is not imported, nothing is compiled; importing it takes seconds.
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with stance:
            yield
    finally:
        for layer in cast_layers:
            layer.cast = None
        model.head_cast = None if casts_head else model.head_cast


def _needs_cast(weight: Tensor, dtype: torch.dtype | None) -> bool:
    return type(weight) is nn.Parameter and not weight.is_meta and dtype not in (None, weight.dtype)
