"""Peak bytes of tensors that each rank holds in two steps of a run. Run by torchrun: rank_bytes.py FOLDER SETTING..."""

import gc
import json
import sys
import time
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penjing.base import config
from penjing.loader.batch_source import Source
from penjing.parallel.base import make_strategy
from penjing.train.batch_geometry import batch_geometry
from penjing.train.build_model import build_run
from penjing.train.loop import TrainingContext, step
from penjing.train.precision import Precision
from penjing.train.stages.base import make_stage
from penjing.train.throughput import Meter
from penjing.workflows.train import resolve_run

CPU = torch.device("cpu")


class Held(TorchDispatchMode):
    """Sum of all living storages, also of those whose size changes, as FSDP2's does."""

    def __init__(self):
        super().__init__()
        self.sizes, self.total, self.peak = {}, 0, 0
        resize = torch.UntypedStorage.resize_

        def resized(storage, size):
            resize(storage, size)
            self.see_storage(storage)
            return storage

        torch.UntypedStorage.resize_ = resized

    def see(self, value):
        local = getattr(value, "_local_tensor", value)
        if isinstance(local, torch.Tensor) and local.device == CPU:
            self.see_storage(local.untyped_storage())

    def see_storage(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self.free, key)
        self.total += storage.nbytes() - self.sizes.get(key, 0)
        self.sizes[key] = storage.nbytes()

    def free(self, key):
        self.total -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, out)):
            self.see(value)
        self.peak = max(self.peak, self.total)
        return out


class Batches(Source):
    """Example batches, which have no values, with some."""

    def __init__(self, make):
        self.make = make

    def __next__(self):
        batch = self.make()
        for value in tree_leaves(vars(batch)):
            if isinstance(value, torch.Tensor):
                value.fill_(1 if value.is_floating_point() else 0)
        return batch

    def state(self):
        return {}

    def restore(self, state):
        pass


def main(folder, *words):
    run = resolve_run("pretrain", config.parse_overrides(list(words)))
    strategy = make_strategy("cpu", run.parallel.strategy)
    precision = Precision.resolve(run.compute, CPU)
    stage, geometry = make_stage(run, strategy), batch_geometry(run, strategy.world, CPU)
    stage.assume_data()
    built = build_run(stage, strategy, precision)
    context = TrainingContext(
        strategy=strategy, model=built.wrapped, objective=built.objective,
        source=Batches(lambda: stage.example_batch(geometry.micro_size, CPU)), optimizers=built.optimizers,
        schedule=run.schedule, meter=Meter(0.0, None), num_steps=3, accumulate=geometry.accumulation,
        max_grad_norm=run.max_grad_norm,
    )  # fmt: skip
    held = Held()
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor):
            held.see(value)
    with held:
        step(context, 0)
        held.peak = 0
        step(context, 1)
    time.sleep(0.2)  # gloo's threads let go of what they have sent
    (Path(folder) / f"{strategy.rank}.json").write_text(json.dumps({"peak": held.peak, "after": held.total}))
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
