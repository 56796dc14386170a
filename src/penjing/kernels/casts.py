"""Weights that are cast once for a whole generation, not at every matmul."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_casts: dict[int, Tensor] = {}  # by the id of the weight


def active() -> bool:
    """Whether casts are used now: without gradients, inside `kept`."""
    return bool(_casts) and not torch.is_grad_enabled()


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`: its kept cast, if that has this dtype."""
    kept_cast = _casts.get(id(weight)) if active() else None
    return weight.to(dtype) if kept_cast is None or kept_cast.dtype != dtype else kept_cast


def of(weights: Iterable[Tensor]) -> list[Tensor]:
    return [_casts[id(weight)] for weight in weights if id(weight) in _casts]


@contextmanager
def kept(weights: Iterable[tuple[Tensor, torch.dtype | None]]) -> Iterator[None]:
    """Keep each weight's cast to its dtype, where it has another. The weights must not change meanwhile."""
    made = {
        id(weight): weight.detach().to(dtype)
        for weight, dtype in weights
        if type(weight) is nn.Parameter
        and not weight.is_meta
        and dtype not in (None, weight.dtype)
        and id(weight) not in _casts
    }
    _casts.update(made)
    try:
        yield
    finally:
        for number in made:
            del _casts[number]
