"""Record the allocations and frees of a step: run it under a `Tracer` and replay the recorded trace.

Tensors on the meta device have a size but no memory, so a step of a model of any size is traced in seconds. The tracer
sees every operation that reaches torch's dispatcher. A storage is allocated when an operation first returns it, and
freed with its last tensor.
"""

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
from penjing.plan.memory import meta_results
from penjing.plan.memory.kernels import WORKSPACE, is_matmul, temporaries

Phase = Literal["build", "forward", "backward", "optimizer", "evaluate"]
Component = Literal[  # from permanent to short-lived
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
    """One storage: its size, origin and component.

    num_bytes: WORKSPACE stands for a cuBLAS workspace; the replay fills in its size.
    """

    num_bytes: int
    operation: str
    line: str  # file:line of the call outside torch; in a backward pass that of the forward call
    phase: Phase
    component: Component = "temporaries"


@dataclass(slots=True)
class Trace:
    """Allocations (n + 1) and frees (-n - 1) of `storages[n]`, in order."""

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    def live_bytes(self) -> list[int]:
        """Live bytes after each event, without rounding; workspaces count 0."""
        live, curve = 0, []
        for event in self.events:
            size = max(0, self.storages[abs(event) - 1].num_bytes)
            live += size if event > 0 else -size
            curve.append(live)
        return curve


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage on `device` while active; `phase` and `tag` assign their purpose.

    vocabulary: V of the model. Tensors V wide, and those made in `loss_files`, count as logits and loss.
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
                self._mark_activations()
        name = func.name()
        if self._with_temporaries and is_matmul(name) and backward not in self._workspaces:
            # Each thread has its own cuBLAS handle, whose workspace stays allocated: forward and autograd.
            self._workspaces.add(backward)
            self._record_alloc(WORKSPACE, name, "workspaces")
        out = meta_results.call(func, args, kwargs)
        if self._with_temporaries:  # allocated and freed within a kernel
            numbers = [self._record_alloc(size, name, "temporaries") for size in temporaries(name, args, out)]
            self.trace.events += [-number - 1 for number in numbers]
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._record_tensor(value, name, args)
        return out

    def _record_tensor(self, tensor: Tensor, name: str, args: tuple[Any, ...] = ()) -> int | None:
        if tensor.device.type != self.device or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._number:
            return self._number[key]
        number = self._record_alloc(storage.nbytes(), name, self._guess_component(tensor, name, args))
        self._number[key] = number
        self._alive[key] = weakref.ref(storage, lambda _, key=key, number=number: self._record_free(key, number))  # type: ignore[misc]
        return number

    def _record_alloc(self, num_bytes: int, name: str, component: Component) -> int:
        phase: Phase = "backward" if self._in_backward else self.phase
        number = len(self.trace.storages)
        line = self._line()
        if component == "temporaries" and any(part in line for part in self.loss_files):
            component = "logits and loss"
        self.trace.storages.append(Storage(num_bytes, name.removeprefix("aten::"), line, phase, component))
        self.trace.events.append(number + 1)
        return number

    def _record_free(self, key: int, number: int) -> None:
        self.trace.events.append(-number - 1)
        if self._number.get(key) == number:
            del self._number[key], self._alive[key]

    def _guess_component(self, tensor: Tensor, name: str, args: tuple[Any, ...]) -> Component:
        source = args[0] if name == "aten::_to_copy" else None
        if isinstance(source, Tensor) and source.untyped_storage()._cdata in self._parameters:
            return "weights"  # a copy of a master weight in the dtype of the matmuls
        if self.vocabulary and tensor.ndim and tensor.shape[-1] == self.vocabulary and tensor.ndim > 1:
            return "logits and loss"
        return "temporaries"

    def _mark_activations(self) -> None:
        """Backward begins: live storages of the forward pass are activations."""
        for number in self._number.values():
            storage = self.trace.storages[number]
            if storage.phase == "forward" and storage.component == "temporaries":
                storage.component = "activations"

    def _line(self) -> str:
        if not self._in_backward:
            return innermost_line()
        node = torch._C._current_autograd_node()
        # Nodes of operations that torch decomposes have no line; they follow directly after one that has.
        self._last_line = (_notes(node).get("line") if node is not None else None) or self._last_line
        return self._last_line

    def tag(self, tensors: Iterable[Tensor | None], component: Component) -> None:
        """Assign a component to tensors; unseen ones are recorded as allocated now."""
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                number = None if tensor is None else self._record_tensor(tensor, component)
                if number is not None:
                    self.trace.storages[number].component = component

    def tag_model(self, model: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        """Weights and buffers; weights wider than the matmul dtype are master weights."""
        for parameter in model.parameters():
            # Frozen weights are stored in the matmul dtype and are not master weights.
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
        previous, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = previous


def innermost_line() -> str:
    """file:line of the innermost call outside torch, this package and the arena; files of this package by path."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _HERE, arena.__file__, "<")) and "contextlib" not in name:
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@cache
def _short(name: str) -> str:
    """penjing/model/mlp.py for files of this package, the bare file name for others; independent of the checkout."""
    path = Path(name)
    return path.relative_to(_PACKAGE.parent).as_posix() if path.is_relative_to(_PACKAGE) else path.name


def note_line(result: Any) -> None:
    """Store in the autograd graph which line made a result, for use in the backward pass."""
    for value in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            notes = _notes(value.grad_fn)
            if "line" not in notes:
                notes["line"] = innermost_line()


def _notes(node: Any) -> dict[str, Any]:
    """The metadata of an autograd node."""
    notes: dict[str, Any] = node.metadata
    return notes
