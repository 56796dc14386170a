"""Registries: plain dicts of strings, `{"wandb": "penjing.track.wandb:Wandb"}`. Lazy, greppable, no decorators."""

import importlib
from collections.abc import Mapping
from typing import Any

from penjing.base.errors import UserError, own_line, suggest


def look_up(table: Mapping[str, str], name: str, *, what: str) -> Any:
    """Import and return the object that `table` lists under `name`; `what` names the kind of object in the error."""
    if name not in table:
        raise UserError(f"no {what} is called {name!r}", next_step=suggest(name, table))
    module_name, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module_name), attribute)


def look_up_or_import(table: Mapping[str, str], name: str, *, what: str) -> Any:
    """The same, or an object of the user's own, which is named `module:Class`."""
    if ":" not in name:
        return look_up(table, name, what=what)
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # user code may raise anything
        hint = "Give MODULE:CLASS; a module in this folder is found with PYTHONPATH=. before the command."
        problem = f"the {what} cannot be imported: {type(error).__name__}: {error}"
        raise UserError(problem, where=name, got=own_line(error) or None, next_step=hint) from None
