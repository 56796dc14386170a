"""When memory does not suffice: the same samples in the same order, in smaller passes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from penjing.base.errors import UserError
from penjing.kernels.memory_errors import is_out_of_memory
from penjing.loader.batch_source import Source, WrappedSource
from penjing.train.batch_geometry import batch_geometry, smaller_micro_size
from penjing.train.stages.base import Stage

Result = TypeVar("Result")


class ResizableBatchSource(WrappedSource):
    """A source whose batches can become smaller on the way: the same samples in the same order."""

    micro_size: int

    def __init__(
        self, make: Callable[[int], Source], micro_size: int, *, indivisible: int = 1, exact: bool = True
    ) -> None:
        """make: the source with so many units (rows, pairs, prompts) in a batch, at the beginning.

        indivisible: units that stay in one batch.
        """
        super().__init__(make(micro_size))
        self._make, self.micro_size = make, micro_size
        self.indivisible, self.exact = indivisible, exact

    def fresh(self) -> ResizableBatchSource:
        other = ResizableBatchSource(self._make, self.micro_size, indivisible=self.indivisible, exact=self.exact)
        other.split = self.split
        return other

    def shrink(self, position: dict[str, Any]) -> bool:
        """Of an odd number of units: the largest part that divides it."""
        smaller = smaller_micro_size(self.micro_size, self.indivisible)
        if smaller is None:
            return False
        self.close()
        self.split *= self.micro_size // smaller
        self.micro_size = smaller
        self.source = self._make(smaller)
        self.source.restore(position)
        return True


class SmallestPass(UserError):
    """Memory does not suffice for a pass that cannot become smaller."""

    def __init__(self, micro_size: int, message: str) -> None:
        super().__init__(
            f"out of memory even with a micro-batch of {micro_size}: {message}",
            where="batch.micro_size",
            next_step="Take a smaller model or data.seq_len.",
        )


def retry_on_oom(work: Callable[[], Result], reduce_memory: Callable[[str], None]) -> Result:
    """The result of `work`; where memory does not suffice, `reduce_memory(message)` is called, and `work` again.

    What no tensor holds any more is given back first.
    """
    while True:
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = " ".join(str(error).split())[:200]
        # Outside of the handler: the error holds the frames, and those hold what filled the memory.
        empty_cache()
        reduce_memory(message)


def empty_cache() -> None:
    """Give back what no tensor holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def halve_micro_batch(source: Source, position: dict[str, Any], message: str, world: int) -> None:
    """Make the passes of a step smaller and put its source back to where the step began.

    Raises UserError with several ranks, which would no longer take the same number of passes, and where a pass is as
    small as can be already.
    """
    if world > 1 or source.micro_size is None:
        raise UserError(f"out of memory: {message}", where="batch.micro_size", next_step="Halve it.")
    if not source.shrink(position):
        raise SmallestPass(source.micro_size, message)
    same = "gradients unchanged" if source.exact else "the routers' balance loss is taken over each pass"
    warnings.warn(
        f"out of memory: micro-batch is now {source.micro_size}, accumulation {source.split} times as much; {same}",
        stacklevel=2,
    )


def in_smaller_passes(stage: Stage[Any], work: Callable[[], Result]) -> Result:
    """The result of `work`, which passes the stage's micro-batches through a model: smaller ones where memory does not
    suffice. Raises SmallestPass where it never does, and UserError with several ranks."""
    strategy = stage.strategy

    def halve(message: str) -> None:
        if strategy.world > 1:
            raise UserError(f"out of memory: {message}", where="batch.micro_size", next_step="Halve it.")
        geometry = batch_geometry(stage.run, strategy.world, strategy.device)
        smaller = smaller_micro_size(geometry.micro_size, geometry.indivisible)
        if smaller is None:
            raise SmallestPass(geometry.micro_size, message)
        stage.run = replace(stage.run, batch=replace(stage.run.batch, micro_size=smaller))

    return retry_on_oom(work, halve)


def validate_with_retry(stage: Stage[Any]) -> dict[str, float]:
    """A stage's figures, in smaller passes where memory does not suffice; none if it never does: training goes on."""
    try:
        return in_smaller_passes(stage, stage.validate)
    except SmallestPass as error:
        warnings.warn(f"no validation, {error.what}", stacklevel=2)
        return {}
