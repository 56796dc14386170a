"""Memory per rank when several devices share a step.

What a strategy holds besides the model is traced: DDP's buckets, the whole weights and gradients of a block that FSDP2
gathers and reduces, ZeRO's flat copies and buckets. What a rank holds a part of is traced whole, and divided later.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penjing.plan.layout import Layout
from penjing.plan.memory.trace import Component, Storage, Trace, Tracer
from penjing.plan.step_workload import ZERO_LIVE

META = torch.device("meta")
SENT: Component = "communication"
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes; torch's defaults
# NCCL's buffers on two GPUs grew from 0.55 to 2.00 GiB at the first barrier (S. Bekman); the increase is used.
COMMUNICATION_BYTES = int(1.45 * (1 << 30))
COMMUNICATION_NOTE = "communication buffers are an estimate: 1.45 GiB, as NCCL took on two GPUs"


def _flat(tracer: Tracer, count: int, component: Component = SENT) -> Tensor:
    """A tensor of so many values."""
    flat = torch.empty(count, device=META)
    tracer.tag([flat], component)
    return flat


def _parts(tracer: Tracer, parameters: list[nn.Parameter]) -> list[Tensor]:
    """A rank's parts of gradients: whole here, and divided later."""
    parts = [torch.empty_like(parameter) for parameter in parameters]
    tracer.tag(parts, "gradients")
    return parts


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


class GradientBuckets:
    """DDP's gradient buckets: full copies of all gradients in the order of the backward pass, last layers first.

    Gradients become views of the buckets when they are reduced (`gradient_as_bucket_view`).
    """

    def __init__(self, model: nn.Module) -> None:
        self.requires_sync = True
        self.tensors: list[Tensor] = []
        capacity, sizes, parts = FIRST_BUCKET, list[int](), list[list[nn.Parameter]]()
        for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
            if not parts or sizes[-1] >= capacity or parts[-1][0].dtype != parameter.dtype:
                capacity = FIRST_BUCKET if not parts else BUCKET
                parts.append([])
                sizes.append(0)
            parts[-1].append(parameter)
            sizes[-1] += parameter.numel() * parameter.element_size()
        for part in parts:
            bucket = torch.empty(_count(part), dtype=part[0].dtype, device="meta")
            self.tensors.append(bucket)
            offset = 0
            for parameter in part:
                self._watch(parameter, bucket[offset : offset + parameter.numel()].view(parameter.shape))
                offset += parameter.numel()

    def _watch(self, parameter: nn.Parameter, view: Tensor) -> None:
        def reduce(ready: Tensor) -> None:
            if self.requires_sync:
                ready.grad = view

        parameter.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]


class GatheredUnits:
    """FSDP2's blocks: each is gathered before its forward and its backward pass, and the next one beside it.

    The root (embedding, head, last norm) stays gathered from its first use to the end of the backward pass. A unit's
    gradients are whole until all of them are there, and then reduced.
    keeps_whole: until the last backward pass of a step, the only one that frees and reduces them.
    """

    def __init__(self, model: nn.Module, tracer: Tracer, *, keeps_whole: bool) -> None:
        self._keeps_whole, self.frees = keeps_whole, True
        self.last_received: Tensor | None = None
        self.last_sent: Tensor | None = None
        blocks = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        root = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        self._units = [_Unit(list(block.parameters()), self, tracer) for block in blocks]
        self._root = _Unit(root, self, tracer)
        model.register_forward_pre_hook(lambda *_: self._root.gather())
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, number=number: self._units[number].gather())
            block.register_forward_hook(lambda _, inputs, output, number=number: self._after(number, output))

    def _after(self, number: int, output: Any) -> None:
        """After a block's forward pass. Its backward pass begins with the gradient of its output."""
        hidden = output[0] if isinstance(output, tuple) else output
        if torch._C._current_graph_task_id() != -1:  # computed again in the backward pass
            return
        if not self._keeps_whole:
            self._units[number].release()
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._before_backward(number))

    def _before_backward(self, number: int) -> None:
        for later in self._units[number + 1 :] if self.frees else ():
            later.release()
        self._units[number].gather()
        if number:
            self._units[number - 1].prefetch()

    def before_pass(self, *, last: bool) -> None:
        """last: of the step."""
        self.frees = last or not self._keeps_whole
        for unit in () if self._keeps_whole else (*self._units, self._root):
            unit.set_parts_aside()

    def after_pass(self, *, last: bool) -> None:
        """The buffer of the gradients that were sent last lives until the step's last pass."""
        self.last_sent = None if last else self.last_sent
        self.last_received = None
        for unit in (*self._units, self._root) if self.frees else ():
            unit.release()
            unit.put_parts_back()


class _Unit:
    """Parameters that are gathered and reduced together."""

    def __init__(self, parameters: list[nn.Parameter], units: GatheredUnits, tracer: Tracer) -> None:
        self._parameters, self._units, self._tracer = parameters, units, tracer
        self._received: Tensor | None = None
        self._gathered: Tensor | None = None
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._parts: list[Tensor] = []
        self._ready = 0
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]

    def prefetch(self) -> None:
        if self._gathered is None and self._received is None:
            self._received = _flat(self._tracer, _count(self._parameters))

    def gather(self) -> None:
        if self._gathered is None:
            self.prefetch()
            self._gathered = _flat(self._tracer, _count(self._parameters))  # copied out of what was received
            # In the forward pass that is kept until the next unit's.
            self._units.last_received = None if torch._C._current_graph_task_id() != -1 else self._received
            self._received = None

    def release(self) -> None:
        self._received = self._gathered = None

    def set_parts_aside(self) -> None:
        """A pass makes whole gradients anew."""
        self._parts = [one.grad for one in self._trained if one.grad is not None]
        for one in self._trained:
            one.grad = None

    def put_parts_back(self) -> None:
        for one, part in zip(self._trained, self._parts, strict=False):  # none where a pass reached nothing
            one.grad = part

    def _reduce(self, parameter: Tensor) -> None:
        """A parameter's gradient is there; the unit's are exchanged when all are."""
        self._tracer.tag([parameter.grad], SENT)
        if not self._units.frees:
            return
        self._ready += 1
        if self._ready < len(self._trained):
            return
        self._ready = 0
        self.release()
        self._units.last_sent = None
        self._units.last_sent = _flat(self._tracer, _count(self._trained))  # kept until the next unit's
        for one in self._trained:
            one.grad = None
        self._parts = self._parts or _parts(self._tracer, self._trained)


class ZeroBuffers:
    """What DeepSpeed 0.19 holds: always a float32 copy of a rank's weights, and with stage 3 its gradients; in a
    backward pass a bucket that gradients are moved into, and at its end all of them again for the exchange, with stage
    3 twice. It keeps gathered weights, up to ZERO_LIVE numbers, until the backward pass has used them."""

    def __init__(self, model: nn.Module, tracer: Tracer, layout: Layout, bucket: int) -> None:
        """bucket: numbers of reduce_bucket_size."""
        self._model, self._tracer, self._bucket_size = model, tracer, bucket
        self._shards, self._keeps_whole = layout.shards, layout.keeps_whole
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._count = _count(self._trained)
        self._copy = _flat(tracer, self._count, "optimizer state")
        self._parts: list[Tensor] = _parts(tracer, self._trained) if "weights" in layout.shards else []
        self._gathered: Tensor | None = None
        for parameter in self._trained if "gradients" in layout.shards else ():
            parameter.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]

    def _move(self, parameter: Tensor) -> None:
        if self._exchanges:
            parameter.grad = None  # it is in the bucket
        else:
            self._tracer.tag([parameter.grad], SENT)

    def before_pass(self, *, last: bool) -> None:
        """last: of the step."""
        self._exchanges = last or not self._keeps_whole
        if "gradients" in self._shards:
            if "weights" not in self._shards and self._trained[0].grad is None:  # the first pass of a step
                self._parts = []
            for one in () if self._keeps_whole else self._trained:
                one.grad = None
        if "weights" in self._shards:
            self._gathered = _flat(self._tracer, min(ZERO_LIVE, _count(self._model.parameters())))

    def backward(self, total: Tensor) -> None:
        bucket = _flat(self._tracer, self._bucket_size if self._exchanges else 0)
        total.backward()  # type: ignore[no-untyped-call]
        if "gradients" not in self._shards:
            self._tracer.tag_gradients(self._model)
        if "gradients" not in self._shards or not self._exchanges:
            return
        self._gathered = None
        sent = _flat(self._tracer, self._count * (2 if "weights" in self._shards else 1))
        if "weights" not in self._shards:
            self._parts = _parts(self._tracer, self._trained)  # added up with those of the passes before
        del bucket, sent
        for one, part in zip(self._trained, self._parts, strict=True):
            one.grad = part


def rank_memory(
    trace: Trace, layout: Layout, on_host: frozenset[str] = frozenset()
) -> tuple[Trace, int, tuple[str, ...]]:
    """The trace of one rank: its parts of what the layout shards, without those that lie `on_host` (offload). Also its
    bytes outside PyTorch's count, and notes on estimates."""
    if layout.ranks < 2:
        return trace, 0, ()

    def of_rank(storage: Storage) -> Storage:
        component = storage.component.removeprefix("master ")
        # Copies of weights in the matmul dtype are made of gathered weights.
        whole = component == "weights" and storage.operation != storage.component
        if component in on_host and not whole:
            return replace(storage, num_bytes=0)
        return replace(
            storage, num_bytes=storage.num_bytes if whole else -(-storage.num_bytes // layout.parts(component))
        )

    storages = [of_rank(storage) for storage in trace.storages]
    notes = [COMMUNICATION_NOTE]
    if on_host:
        notes.append(f"parallel.offload: {', '.join(sorted(on_host))} are in the host's memory, and not counted here")
    return Trace(storages, trace.events), COMMUNICATION_BYTES, tuple(notes)
