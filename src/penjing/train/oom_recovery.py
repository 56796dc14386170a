"""When memory does not suffice: the same samples in the same order, in smaller passes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from penjing.base.errors import UserError
from penjing.loader.batch_source import Source, place_of, samples_between
from penjing.train.batch_geometry import smaller_micro_size

Result = TypeVar("Result")


class ResizableBatchSource:
    """A source whose micro-batches can be made smaller on the way. `times`: how many are now made of one at first."""

    def __init__(
        self, make: Callable[[int], Source], micro_units: int, *, together: int = 1, exact: bool = True
    ) -> None:
        """make: the source with so many units (rows, pairs, prompts) in a batch, at the beginning.

        together: units that are never parted. exact: whether the gradient is the same however a step is cut up.
        """
        self._make, self.micro_units, self.times = make, micro_units, 1
        self.together, self.exact = together, exact
        self.source = make(micro_units)

    def __next__(self) -> Any:
        return next(self.source)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def place(self) -> dict[str, Any]:
        return place_of(self.source)

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state)

    def samples(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return samples_between(self.source, before, after)

    def close(self) -> None:
        close = getattr(self.source, "close", None)
        if close is not None:
            close()

    def fresh(self) -> ResizableBatchSource:
        """Another one at the beginning, with batches of the same size: for trials."""
        other = ResizableBatchSource(self._make, self.micro_units, together=self.together, exact=self.exact)
        other.times = self.times
        return other

    def shrink(self, at: dict[str, Any]) -> bool:
        """Halve the batches (of an odd number of units: the largest part that divides it) and go back to `at`.

        False if a batch is as small as can be already.
        """
        smaller = smaller_micro_size(self.micro_units, self.together)
        if smaller is None:
            return False
        self.close()
        self.times *= self.micro_units // smaller
        self.micro_units = smaller
        self.source = self._make(smaller)
        self.source.restore(at)
        return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "out of memory" in str(error))


def with_room(work: Callable[[], Result], make_room: Callable[[str], None]) -> Result:
    """The result of `work`; where memory does not suffice, `make_room(what was said)` is called, and `work` again."""
    while True:
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = " ".join(str(error).split())[:200]
        # Outside of the handler: the error holds the frames, and those hold what filled the memory.
        make_room(said)


def release() -> None:
    """Give back what no tensor holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def shrink_step(source: Any, at: dict[str, Any], said: str, world: int) -> None:
    """Make the passes of a step smaller and put its source back to where the step began.

    Raises UserError with several ranks, which would no longer take the same number of passes, and where a pass is as
    small as can be already.
    """
    release()
    if world > 1 or not hasattr(source, "shrink"):
        raise UserError(f"out of memory: {said}", where="batch.micro_rows", next_step="Halve it.")
    if not source.shrink(at):
        raise UserError(
            f"out of memory even with {'one row' if source.micro_units == 1 else source.micro_units} in a pass: {said}",
            where="batch.micro_rows",
            next_step="Take a smaller model or data.row_tokens.",
        )
    learned = "what is learned stays the same" if source.exact else "the routers' balance is taken over a smaller pass"
    warnings.warn(
        f"out of memory: {source.micro_units} in a pass from here on, and {source.times} times as many passes;"
        f" {learned}",
        stacklevel=2,
    )
