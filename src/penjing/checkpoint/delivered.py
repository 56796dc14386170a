"""Which checkpoint of a run is used where nothing else is said. Imports no torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penjing.base.untrusted import Fields

TOLERANCE = 0.002  # the newest is used if its held-out loss is not higher than the lowest by more than this fraction


class Delivered(NamedTuple):
    """The step of the checkpoint that is used, and of the newest one; if the run follows a held-out loss, its values at
    both, of the newest one none if it is NaN or Inf, and the name of its metric."""

    step: int
    newest: int
    loss: float | None = None
    newest_loss: float | None = None
    metric: str = ""

    @property
    def why(self) -> str:
        """A sentence; empty if there is nothing to choose by."""
        if self.loss is None:
            return ""
        name = f"held-out {self.metric.replace('_', ' ')}"
        newest = "NaN or Inf" if self.newest_loss is None else f"{self.newest_loss:.4f}"
        if self.step != self.newest:
            after = f"at the newest step, {self.newest}, it is {newest}"
            return f"step {self.step} is used: {name} {self.loss:.4f}, the lowest; {after}"
        is_lowest = self.newest_loss is not None and self.newest_loss <= self.loss
        what = "the lowest" if is_lowest else f"the lowest is {self.loss:.4f}"
        return f"step {self.step}, the newest, is used: {name} {newest}, {what}"


def choose(best: Mapping[str, Any], newest: int) -> Delivered:
    """best: what the newest checkpoint's state has of `train/best.py`, or nothing."""
    kept, last = Fields(best).fields("kept"), Fields(best).number("last")
    step, loss = kept.number("step"), kept.number("loss")
    if step is None or loss is None:
        return Delivered(newest, newest)
    metric = Fields(best).text("_measure").partition(" ")[0].removeprefix("val_") or "loss"
    is_newest_good = last is not None and last - loss <= TOLERANCE * abs(loss)
    return Delivered(newest if is_newest_good else int(step), newest, loss, last, metric)
