"""Which parameter gets what: gains and embeddings never decay."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class ParamGroups:
    """The trainable parameters of a model by their part: block matrices, tables (embedding and head), gains.

    Adapters' A and B are block matrices like any other, and DoRA's magnitudes are gains.
    """

    matrices: list[nn.Parameter]
    tables: list[nn.Parameter]
    gains: list[nn.Parameter]


def group(model: nn.Module) -> ParamGroups:
    """Sort trainable parameters; a shared (tied) one is listed once."""
    groups = ParamGroups([], [], [])
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            groups.gains.append(parameter)
        elif name.endswith(("embed.weight", "head.weight")):
            groups.tables.append(parameter)
        else:
            groups.matrices.append(parameter)
    return groups


def embeddings(model: nn.Module) -> set[nn.Parameter]:
    """Those that ids are looked up in, shared with a head or not."""
    return {parameter for name, parameter in model.named_parameters() if name.endswith("embed.weight")}
