"""Recovery from out-of-memory errors: the same samples in the same order, in smaller passes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import torch

from penjing import devices
from penjing.base.errors import UserError
from penjing.kernels.memory_errors import is_out_of_memory
from penjing.loader.batch_source import Source, WrappedSource
from penjing.train.batch_geometry import batch_geometry, micro_sizes
from penjing.train.resolve import decide
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

    Raises UserError with several ranks, whose numbers of passes would differ, and if the passes cannot become smaller.
    """
    if world > 1 or source.micro_size is None:
        raise UserError(f"out of memory: {message}", where="batch.micro_size", next_step="Halve it.")
    if not source.shrink(position):
        raise SmallestPass(source.micro_size, message)
    effect = "gradients unchanged" if source.exact else "the routers' balance loss is computed over each pass"
    warnings.warn(
        f"out of memory: micro-batch is now {source.micro_size}, {float(source.split):g} times as many; {effect}",
        stacklevel=2,
    )


def with_smaller_passes(stage: Stage[Any], work: Callable[[], Result]) -> Result:
    """The result of `work`, which runs the stage's micro-batches through a model, with smaller ones after an
    out-of-memory error. Raises SmallestPass if none is small enough, and UserError with several ranks."""
    strategy = stage.strategy

    def halve(message: str) -> None:
        if strategy.world > 1:
            raise UserError(f"out of memory: {message}", where="batch.micro_size", next_step="Halve it.")
        geometry = batch_geometry(stage.run, strategy.world, strategy.device)
        smaller = next((size for size in geometry.micro_sizes if size < geometry.micro_size), None)
        if smaller is None:
            raise SmallestPass(geometry.micro_size, message)
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
