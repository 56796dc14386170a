"""Chooses the backend of each op, by the table `BACKENDS` of this package: the last row that supports the inputs.

A backend is a module. It has a function for each op that it computes, by the op's name, and `supports(op, *inputs)`,
which says why it does not take these inputs; empty: it does. The inputs are what decides, tensors or dtypes, in the
order in which the callers of `find` name them.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from penjing.kernels import BACKENDS

_backends: dict[str, ModuleType] = {}  # by name, in the order in which they are tried
_with_op: dict[str, list[ModuleType]] = {}


def load() -> dict[str, ModuleType]:
    """The backends by name, in the order in which they are tried. Imported once, and not while something compiles."""
    if len(_backends) != len(BACKENDS):
        _backends.clear()
        _backends.update((name, import_module(BACKENDS[name])) for name in reversed(BACKENDS))
        _with_op.clear()
        for backend in _backends.values():
            for op in vars(backend):
                _with_op.setdefault(op, []).append(backend)
    return _backends


def find_fused(op: str, *inputs: Any) -> Callable[..., Tensor] | None:
    """The op of the backend that computes it for these inputs; None: none does."""
    for backend in _with_op.get(op, ()):
        if not backend.supports(op, *inputs):
            function: Callable[..., Tensor] = getattr(backend, op)
            return function
    return None


def find(op: str, *inputs: Any) -> Callable[..., Tensor]:
    """The op of the backend that computes it for these inputs; some ops give several. The reference takes all."""
    found = find_fused(op, *inputs)
    assert found is not None, f"no backend has {op}"
    return found


def reasons(op: str, *inputs: Any) -> tuple[str, dict[str, str]]:
    """The backend that computes the op for these inputs, and why those tried before it do not."""
    why_not: dict[str, str] = {}
    for name, backend in load().items():
        if hasattr(backend, op):
            reason = backend.supports(op, *inputs)
            if not reason:
                return name, why_not
            why_not[name] = reason
    return "", why_not
