"""Recovery from out-of-memory errors: the same samples in the same order, in smaller passes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch

from penjing import devices
from penjing.base.errors import EXIT_SMALLER_PASSES, UserError, is_out_of_memory
from penjing.base.files import read_json, write_json
from penjing.loader.batch_source import Source, WrappedSource
from penjing.track.run_dir import RunDir
from penjing.train.batch_geometry import batch_geometry, micro_sizes
from penjing.train.config import Run
from penjing.train.resolve import decide
from penjing.train.signals import Ended
from penjing.train.stages.base import Stage

Result = TypeVar("Result")


class ResizableBatchSource(WrappedSource):
    """A source whose batches can shrink during a run: the same samples in the same order."""

    micro_size: int

    def __init__(
        self, make: Callable[[int], Source], micro_size: int, *, sizes: Sequence[int] = (), exact: bool = True
    ) -> None:
        """make: returns the source at its beginning, with this many units (rows, pairs, prompts) in a batch.

        sizes: those that it may shrink to, largest first; none: the divisors of `micro_size`.
        """
        super().__init__(make(micro_size))
        self._make, self.micro_size = make, micro_size
        self.sizes, self.exact = sizes or micro_sizes(micro_size), exact

    def fresh(self) -> ResizableBatchSource:
        other = ResizableBatchSource(self._make, self.micro_size, sizes=self.sizes, exact=self.exact)
        other.split = self.split
        return other

    def shrink(self, position: dict[str, Any]) -> bool:
        smaller = next((size for size in self.sizes if size < self.micro_size), None)
        if smaller is None:
            return False
        self.close()
        self.split *= Fraction(self.micro_size, smaller)
        self.micro_size = smaller
        self.source = self._make(smaller)
        self.source.restore(position)
        return True


class SmallestPass(UserError):
    """Out of memory in a pass that cannot become smaller."""

    def __init__(self, micro_size: int, message: str) -> None:
        super().__init__(
            f"out of memory even with a micro-batch of {micro_size}: {message}",
            where="batch.micro_size",
            next_step="Use a smaller model or data.seq_len.",
        )


class SmallerPasses(Ended):
    """Out of memory on one of several ranks. The others wait for it inside a collective, so that all end; they continue
    from the last checkpoint with a smaller micro-batch."""

    exit_code = EXIT_SMALLER_PASSES

    def __init__(self, micro_size: int, message: str) -> None:
        self.micro_size, self.message = micro_size, message
        super().__init__(f"out of memory: with batch.micro_size={micro_size} it continues from the last checkpoint")


@contextmanager
def smaller_passes_kept(folder: RunDir) -> Iterator[None]:
    """Write the micro-batch of `SmallerPasses` into the run's folder, for the next start."""
    try:
        yield
    except SmallerPasses as error:
        write_json(folder.micro_size, {"micro_size": error.micro_size, "message": error.message})
        raise


def kept_micro_size(run: Run, world: int) -> tuple[int, str]:
    """The micro-batch with which a run continues after a rank ran out of memory, and why; 0: that of the settings."""
    path = RunDir(Path(run.out)).micro_size
    kept = read_json(path) if path.is_file() else {"micro_size": 0}
    rows = int(kept["micro_size"])
    if not rows or run.batch.size % (rows * world) or 0 < run.batch.micro_size < rows:
        return 0, ""
    return rows, f"a rank ran out of memory: {kept['message']}"


def retry_on_oom(work: Callable[[], Result], reduce_memory: Callable[[str], None]) -> Result:
    """The result of `work`. After an out-of-memory error, free cached memory, call `reduce_memory(message)`, retry."""
    while True:
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = " ".join(str(error).split())[:200]
        # Outside the handler: the error references the frames, and these the tensors that filled the memory.
        empty_cache()
        reduce_memory(message)


def empty_cache() -> None:
    """Free cached memory that no tensor uses."""
    gc.collect()
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None:
        devices.of(other).empty_cache()


def halve_micro_batch(source: Source, position: dict[str, Any], message: str, world: int) -> None:
    """Make the passes of a step smaller and set its source back to the step's start.

    Raises SmallerPasses with several ranks, and UserError if the passes cannot become smaller.
    """
    if source.micro_size is None:
        raise UserError(f"out of memory: {message}", where="batch.micro_size", next_step="Halve it.")
    if not source.shrink(position):
        raise SmallestPass(source.micro_size, message)
    if world > 1:
        raise SmallerPasses(source.micro_size, message)
    effect = "gradients unchanged" if source.exact else "the routers' balance loss is computed over each pass"
    warnings.warn(
        f"out of memory: micro-batch is now {source.micro_size}, {float(source.split):g} times as many; {effect}",
        stacklevel=2,
    )


def with_smaller_passes(stage: Stage[Any], work: Callable[[], Result]) -> Result:
    """The result of `work`, which runs the stage's micro-batches through a model, with smaller ones after an
    out-of-memory error. Raises SmallestPass if none is small enough, and SmallerPasses with several ranks."""
    strategy = stage.strategy

    def halve(message: str) -> None:
        geometry = batch_geometry(stage.run, strategy.world, strategy.device)
        smaller = next((size for size in geometry.micro_sizes if size < geometry.micro_size), None)
        if smaller is None:
            raise SmallestPass(geometry.micro_size, message)
        if strategy.world > 1:
            raise SmallerPasses(smaller, message)
        stage.run = decide(stage.run, "batch.micro_size", smaller, f"out of memory: {message}")

    return retry_on_oom(work, halve)


def validate_with_retry(stage: Stage[Any]) -> dict[str, float]:
    """A stage's validation metrics, with smaller passes after an out-of-memory error; none if no pass is small enough,
    so that training goes on."""
    try:
        return with_smaller_passes(stage, stage.validate)
    except SmallestPass as error:
        warnings.warn(f"no validation, {error.what}", stacklevel=2)
        return {}
