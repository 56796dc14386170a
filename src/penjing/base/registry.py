"""Registries: plain dicts of strings, `{"wandb": "penjing.track.wandb:Wandb"}`. Lazy, greppable, no decorators."""

import importlib
from collections.abc import Mapping
from typing import Any

from penjing.base.errors import UserError, suggest


def look_up(table: Mapping[str, str], name: str, *, what: str) -> Any:
    """Import and return the object that `table` lists under `name`; `what` names the kind of object in the error."""
    if name not in table:
        raise UserError(f"no {what} is called {name!r}", next_step=suggest(name, table))
    module_name, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module_name), attribute)
