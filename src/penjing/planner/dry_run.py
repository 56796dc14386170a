"""A dry run of a layout in one process: its strategy takes a run's steps beside ranks that do not exist.

torch's fake process group stands for the other ranks, and its collectives return at once; tensors are on the meta
device. So sizes alone are real: what this rank holds and sends, beside what the plan says of both.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from penjing.base.errors import UserError
from penjing.devices import HOST
from penjing.devices.shards import local_part
from penjing.parallel.base import make_strategy
from penjing.plan.layout import STATE_BYTES, Layout
from penjing.plan.memory import Target
from penjing.plan.memory.trace import Tracer
from penjing.plan.shape import shape_of
from penjing.plan.step_workload import Workload
from penjing.planner.inputs import trainable_part as part
from penjing.train.build_model import build_model, complete
from penjing.train.config import Run
from penjing.train.loop import step
from penjing.train.memory_trace.dummy_batches import META, on_target
from penjing.train.memory_trace.trace import STEPS, TraceShape, context_of, predict_memory
from penjing.train.precision import Precision
from penjing.train.stages.base import make_stage

TARGET = Target(kind=HOST.type, name="a CPU", memory_bytes=1 << 50)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that a rank holds, in storages that may change their size, and sends, in rings."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self.sent, self._sizes = 0, 0.0, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # FakeDeviceMode would hide where tensors are
            for tensor in (tensors := _meta((*args, out))):
                self.see(local_part(tensor).untyped_storage())
            if tensors and func.namespace == "c10d":
                size = max(sum(one.nbytes for one in _meta(value)) for value in args[:2])
                group = next(one for one in args if isinstance(one, torch.ScriptObject) and "Group" in str(one._type()))
                ranks = distributed.ProcessGroup.unbox(group).size()
                self.sent += (1 + ("allreduce" in func.name())) * size * (ranks - 1) / ranks
        self.peak = max(self.peak, sum(self._sizes.values()))
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            weakref.finalize(storage, self._sizes.pop, storage._cdata, 0)
        self._sizes[storage._cdata] = storage.nbytes()


def _meta(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_meta]


@contextmanager
def _fake_ranks(layout: Layout, ledger: Ledger) -> Iterator[None]:
    """This process is rank 0 of the layout, as its strategy sees it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init, group, resize = distributed.init_process_group, distributed.new_group, torch.UntypedStorage.resize_
    mesh = distributed.device_mesh.init_device_mesh

    def real_mesh(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # its numbers are read
            return mesh(*args, **kwargs)

    def resized(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        ledger.see(storage)

    fakes = {
        "penjing.parallel.process_group.rendezvous": lambda *_, **__: iter([(FakeStore(), 0, layout.ranks)]),
        "torch.distributed.init_process_group": lambda _, **kwargs: init("fake", **{**kwargs, "store": FakeStore()}),
        "torch.distributed.new_group": lambda *args, **kwargs: group(*args, **{**kwargs, "backend": "fake"}),
        "torch.UntypedStorage.resize_": resized,
        "penjing.parallel.fsdp2.init_device_mesh": real_mesh,
    }
    if layout.strategy == "zero3":  # ranks compare values
        fakes["deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks"] = lambda _: None
    local = layout.ranks // layout.nodes
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": layout.ranks, "LOCAL_WORLD_SIZE": local}
    with patch.dict(os.environ, {name: str(value) for name, value in variables.items()}), ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch(name, fake))
        yield


def dry_run(run: Run, layout: Layout) -> dict[str, tuple[int, int]]:
    """Bytes of rank 0 in a step, (of the dry run, planned): what it holds before weights change, sends and at most
    holds. Raises UserError as training would."""
    if layout.group < 2:
        wanted = "--strategy fsdp2, hsdp or zero1 to zero3, and several ranks"
        raise UserError("each rank holds everything", where="dry run", got=layout.strategy, wanted=wanted)
    plan = predict_memory(run, TARGET, layout=layout, process_bytes=0)
    ledger, held, precision = Ledger(), dict[str, int](), Precision.resolve(run.compute, HOST)
    with _fake_ranks(layout, ledger), closing(make_strategy(HOST.type, layout.strategy)) as strategy:
        stage, take = make_stage(run, strategy), strategy.step

        def seen(optimizers: Any, *rest: Any) -> tuple[Tensor, Tensor]:
            held.update({name: sum(one.nbytes for one in parts) for name, parts in strategy.held(optimizers).items()})
            return take(optimizers, *rest)

        with on_target(TARGET), META:
            model = build_model(stage, precision, META)
        with on_target(TARGET), ledger, patch.object(strategy, "step", seen):
            stage.assume_data()
            built = complete(model, stage, strategy, precision)
            rows, passes = built.geometry.micro_size, built.geometry.accumulation
            context = context_of(built, TraceShape(micro_size=rows, accumulate=passes), Tracer())
            for index in range(STEPS):  # the second one is counted
                ledger.peak, ledger.sent = 0, 0.0
                step(context, index)
    work = Workload(
        shape=shape_of(run.model), tokens=1, seq_len=1, keys=1.0, passes=passes, layout=layout, trainable=part(run)
    )
    gradients = round(STATE_BYTES["gradients"] * work.trained / layout.parts("gradients"))
    planned = {**plan.waterfall, "gradients": gradients, "sent in a step": round(sum(work.communication_bytes()))}
    planned["weights"] = planned.get("master weights") or planned["weights"]
    held["sent in a step"] = round(ledger.sent)
    if not layout.strategy.startswith("zero"):  # DeepSpeed has meta tensors of its own
        held["peak of tensors"], planned["peak of tensors"] = ledger.peak, plan.peak_allocated_bytes
    return {name: (size, planned[name]) for name, size in held.items()}
