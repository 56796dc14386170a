"""The weighted mean of several models of one shape ("model soup", arXiv:2203.05482; of one run, arXiv:1803.05407)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penjing.base.errors import UserError

State = dict[str, Tensor]


def average(models: Sequence[tuple[object, Callable[[], State]]], weights: Sequence[float] = ()) -> State:
    """The mean of the models' weights, added up in float64, in the dtype of the first.

    models: (name for messages, function that reads the state dict); one is held at a time besides the sum.
    weights: what each counts, in any scale; empty: all the same.
    Raises UserError if names or shapes differ, or the weights are not one positive sum.
    """
    shares = _shares(len(models), weights)
    total: State = {}
    first: State = {}
    for number, ((name, read), share) in enumerate(zip(models, shares, strict=True)):
        state = read()
        if number == 0:
            first = {key: value.new_empty(0) for key, value in state.items()}
            total = {key: torch.zeros(value.shape, dtype=torch.float64) for key, value in state.items()}
        differing = sorted(
            key
            for key in total.keys() | state.keys()
            if key not in total or key not in state or total[key].shape != state[key].shape
        )
        if differing:
            raise UserError(
                "another shape of model than the first",
                where=name,
                got=f"{differing[0]} {_shape(state, differing[0])}",
                wanted=_shape(total, differing[0]),
            )
        for key, value in state.items():
            total[key].add_(value.double(), alpha=share)
    return {key: value.to(first[key].dtype) for key, value in total.items()}


def _shares(count: int, weights: Sequence[float]) -> list[float]:
    if count < 1:
        raise UserError("nothing to average", wanted="at least one checkpoint")
    if weights and len(weights) != count:
        raise UserError("not one weight each", where="--weights", got=len(weights), wanted=count)
    given = list(weights) or [1.0] * count
    if not sum(given) > 0 or min(given) < 0:
        raise UserError("not weights", where="--weights", got=given, wanted="0 or more each, not all 0")
    return [weight / sum(given) for weight in given]


def _shape(state: State, name: str) -> object:
    return tuple(state[name].shape) if name in state else "none"
