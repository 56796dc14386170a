"""A step's storages, in order of birth and death: run anything under a `Tracer` and replay what it recorded.

Tensors on the meta device have a size and no memory, so that a step of a model of any size is traced in seconds. Every
operation that reaches torch's dispatcher is seen; a storage is born when an operation first returns it and dies when
its last tensor does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penjing.kernels.cpu import tensor_arena as arena
from penjing.plan.memory.kernels import WORKSPACE, is_matmul, temporaries

Phase = Literal["build", "forward", "backward", "optimizer", "evaluate"]
Component = Literal[  # from what stays to what comes and goes
    "weights",
    "master weights",
    "gradients",
    "optimizer state",
    "activations",
    "logits and loss",
    "batch",
    "temporaries",
    "workspaces",
    "communication",
]
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PACKAGE = Path(__file__).parents[2]


@dataclass(slots=True)
class Storage:
    """One storage: its size, what made it, and what it turned out to be.

    num_bytes: WORKSPACE stands for what the device's matrix library keeps, which the replay fills in.
    """

    num_bytes: int
    operation: str
    line: str  # file:line of the call outside torch; in a backward pass that of the forward call
    phase: Phase
    component: Component = "temporaries"


@dataclass(slots=True)
class Trace:
    """Births (n + 1) and deaths (-n - 1) of `storages[n]` in order."""

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    def live_bytes(self) -> list[int]:
        """Bytes alive after each event, before any rounding; workspaces count nothing."""
        live, curve = 0, []
        for event in self.events:
            size = max(0, self.storages[abs(event) - 1].num_bytes)
            live += size if event > 0 else -size
            curve.append(live)
        return curve


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage on `device` while it is entered; `phase` and `tag` say what they are for.

    vocabulary: V of the model; tensors that are V wide, and what is made in the files named by `loss_files`, are called
    logits and loss.
    """

    def __init__(
        self,
        device: str = "meta",
        *,
        vocabulary: int = 0,
        loss_files: Iterable[str] = (),
        kernel_temporaries: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.device, self.vocabulary, self.loss_files = device, vocabulary, tuple(loss_files)
        self.phase: Phase = "build"
        self._with_temporaries = kernel_temporaries
        self._number: dict[int, int] = {}  # of a living storage, by the address of its C++ object
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._parameters: set[int] = set()
        self._workspaces: set[bool] = set()
        self._in_backward = False
        self._last_line = "?"

    # --- what happens --------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # FakeDeviceMode would hide where tensors are
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        backward = torch._C._current_graph_task_id() != -1
        if backward != self._in_backward:
            self._in_backward = backward
            if backward:
                self._hold()
        name = func.name()
        if self._with_temporaries and is_matmul(name) and backward not in self._workspaces:
            # Each thread that multiplies has a handle of its own, whose workspace stays: forward's and autograd's.
            self._workspaces.add(backward)
            self._born(WORKSPACE, name, "workspaces")
        out = func(*args, **kwargs)
        if self._with_temporaries:  # what a CUDA kernel allocates for itself and gives back before it returns
            numbers = [self._born(size, name, "temporaries") for size in temporaries(name, args, out)]
            self.trace.events += [-number - 1 for number in numbers]
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._see(value, name, args)
        return out

    def _see(self, tensor: Tensor, name: str, args: tuple[Any, ...] = ()) -> int | None:
        if tensor.device.type != self.device or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._number:
            return self._number[key]
        number = self._born(storage.nbytes(), name, self._guess(tensor, name, args))
        self._number[key] = number
        self._alive[key] = weakref.ref(storage, lambda _, key=key, number=number: self._died(key, number))  # type: ignore[misc]
        return number

    def _born(self, num_bytes: int, name: str, component: Component) -> int:
        phase: Phase = "backward" if self._in_backward else self.phase
        number = len(self.trace.storages)
        line = self._line()
        if component == "temporaries" and any(part in line for part in self.loss_files):
            component = "logits and loss"
        self.trace.storages.append(Storage(num_bytes, name.removeprefix("aten::"), line, phase, component))
        self.trace.events.append(number + 1)
        return number

    def _died(self, key: int, number: int) -> None:
        self.trace.events.append(-number - 1)
        if self._number.get(key) == number:
            del self._number[key], self._alive[key]

    def _guess(self, tensor: Tensor, name: str, args: tuple[Any, ...]) -> Component:
        if name == "aten::_to_copy" and args and self._is_parameter(args[0]):
            return "weights"  # a copy of a master weight in the dtype of the matmuls
        if self.vocabulary and tensor.ndim and tensor.shape[-1] == self.vocabulary and tensor.ndim > 1:
            return "logits and loss"
        return "temporaries"

    def _is_parameter(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._parameters

    def _hold(self) -> None:
        """A backward pass begins: what the forward pass made and is still there was kept for it."""
        for number in self._number.values():
            storage = self.trace.storages[number]
            if storage.phase == "forward" and storage.component == "temporaries":
                storage.component = "activations"

    def _line(self) -> str:
        if not self._in_backward:
            return innermost_line()
        node = torch._C._current_autograd_node()
        # Nodes of what torch takes apart by itself have no line of their own; they come right after the one that has.
        self._last_line = (_notes(node).get("line") if node is not None else None) or self._last_line
        return self._last_line

    # --- what the caller says ------------------------------------------------------------------------------------

    def tag(self, tensors: Iterable[Tensor | None], component: Component) -> None:
        """Say what these tensors are; those not seen before are born now."""
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                number = None if tensor is None else self._see(tensor, component)
                if number is not None:
                    self.trace.storages[number].component = component

    def tag_model(self, model: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        """Weights and buffers; weights that are wider than the dtype of the matmuls are master weights."""
        for parameter in model.parameters():
            # Frozen weights are kept in the dtype of the matmuls, and are nobody's master.
            narrower = compute_dtype is not None and compute_dtype.itemsize < parameter.element_size()
            self.tag([parameter], "master weights" if narrower and parameter.requires_grad else "weights")
            self._parameters.add(parameter.untyped_storage()._cdata)
        self.tag(model.buffers(), "weights")

    def tag_gradients(self, model: nn.Module) -> None:
        self.tag((parameter.grad for parameter in model.parameters()), "gradients")

    def tag_state(self, optimizers: Iterable[Any]) -> None:
        for optimizer in optimizers:
            for state in getattr(optimizer, "state", {}).values():
                self.tag((value for value in state.values() if isinstance(value, Tensor)), "optimizer state")

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def innermost_line() -> str:
    """file:line of the innermost call outside torch, this package and the arena, the file as module path below its
    package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _HERE, arena.__file__, "<")) and "contextlib" not in name:
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@cache
def _short(name: str) -> str:
    """penjing/model/mlp.py of this package's files, the bare name of others, wherever the checkout lies."""
    path = Path(name)
    return path.relative_to(_PACKAGE.parent).as_posix() if path.is_relative_to(_PACKAGE) else path.name


def note_line(result: Any) -> None:
    """Remember in the graph which line made a result, for the backward pass to name it."""
    for value in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            notes = _notes(value.grad_fn)
            if "line" not in notes:
                notes["line"] = innermost_line()


def _notes(node: Any) -> dict[str, Any]:
    """What can be written down at a node of the graph."""
    notes: dict[str, Any] = node.metadata
    return notes
