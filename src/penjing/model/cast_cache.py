"""Weights cast once, for as long as text is generated."""

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
    """For generation: weights on a CPU are cast to `compute_dtype` once, not at every matmul without gradients, so that
    a token takes little longer than reading its weights; they must not change meanwhile. And nothing compiled is used,
    which would be compiled again for every length."""
    layers = [layer for layer in model.modules() if type(layer) is Linear and layer is not model.head]
    mine = [layer for layer in layers if layer.cast is None and _is_cast(layer.weight, layer.compute_dtype)]
    has_head = model.head_cast is None and _is_cast(model.head_weight_VD, model.compute_dtype)
    for layer in mine:
        layer.cast = layer.weight.detach().to(layer.compute_dtype)
    if has_head:
        model.head_cast = model.head_weight_VD.detach().to(model.compute_dtype)
    # What was never loaded has compiled nothing, and takes seconds to load.
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with stance:
            yield
    finally:
        for layer in mine:
            layer.cast = None
        model.head_cast = None if has_head else model.head_cast


def _is_cast(weight: Tensor, dtype: torch.dtype | None) -> bool:
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and dtype not in (None, weight.dtype)
