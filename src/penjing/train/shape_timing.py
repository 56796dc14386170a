"""Times a few passes of models that nobody has prepared a run for, on random rows: to choose among sizes."""

import time
from dataclasses import dataclass

import torch

from penjing import devices
from penjing.devices.choose import local_device
from penjing.model.init import initialise
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer
from penjing.train.config import Run
from penjing.train.precision import Precision

ROWS, TRIES = 4, 3  # rows of a pass; the first try warms up, the quickest counts


@dataclass
class StepTimer:
    """On a CPU: processor seconds, times wall over processor seconds of all tries so far. Other programs interrupt
    single tries; so a busy machine slows all sizes alike."""

    wall: float = 0.0
    spent: float = 0.0

    def time_step(self, run: Run) -> tuple[float, float]:
        """Seconds of a forward and backward pass per row, and of the optimizer's step, of the run's model."""
        device, seq_len = local_device(run.compute.device), run.data.seq_len
        clock = time.process_time if devices.of(device).is_host else time.perf_counter
        model = Transformer(run.model)
        initialise(model, run.seed)
        model.to(device)
        Precision.resolve(run.compute, device).apply(model, model)
        optimizers = run.optimizer.build(model)
        generator = torch.Generator().manual_seed(run.seed)
        ids_BT = torch.randint(run.model.vocab_size, (ROWS, seq_len), generator=generator).to(device)
        weight_N = torch.ones(ids_BT.numel(), device=device)
        tries = []
        for attempt in range(TRIES):
            began, start = time.perf_counter(), clock()
            scored = model(ids_BT, torch.zeros_like(ids_BT), score=CrossEntropy(ids_BT.flatten(), weight_N))
            (scored if isinstance(scored, torch.Tensor) else scored[0]).backward()
            devices.of(device).synchronize(device)
            middle = clock()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            devices.of(device).synchronize(device)
            end = clock()
            tries.append(((middle - start) / ROWS, end - middle))
            if attempt:
                self.wall, self.spent = self.wall + time.perf_counter() - began, self.spent + end - start
        slower = self.wall / self.spent
        return slower * min(row for row, _ in tries), slower * min(step for _, step in tries)
