"""Sorts parameters into groups; norm gains and embeddings have no weight decay."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class ParamGroups:
    """A model's trainable parameters: block matrices, tables (embedding and head), and norm gains.

    Adapters' A and B count as block matrices, and DoRA's magnitudes as gains.
    """

    matrices: list[nn.Parameter]
    tables: list[nn.Parameter]
    gains: list[nn.Parameter]


def group_parameters(model: nn.Module) -> ParamGroups:
    """Sort the trainable parameters; a tied one is listed once."""
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
    """The parameters of the input embedding, tied to the head or not."""
    return {parameter for name, parameter in model.named_parameters() if name.endswith("embed.weight")}
