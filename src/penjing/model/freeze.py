"""Freezes weights by name pattern."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from penjing.base.errors import UserError, suggest


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze parameters whose dotted name matches a pattern (`embed.*`, `blocks.[0-3].*`, `*norm.weight`). Raises
    UserError for a pattern that matches nothing, or if no parameter stays trainable."""
    parameters = dict(model.named_parameters())
    patterns = tuple(patterns)
    for pattern in patterns:
        matches = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matches:
            raise UserError("matches no parameter", where="freeze", got=pattern, next_step=suggest(pattern, parameters))
        for name in matches:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError("no parameter is trainable", where="freeze", got=", ".join(patterns))
