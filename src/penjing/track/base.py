"""The interface of a tracker, and a group of trackers whose failures do not stop training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Tracker(Protocol):
    """Receives a step's metrics, by name."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """The run rolls back to `step`: later steps will be logged again."""
        ...

    def close(self) -> None: ...


class Trackers:
    """Several trackers as one. A tracker that fails gives one warning and is not called again."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._active = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call_all(lambda tracker: tracker.log(step, metrics))

    def rewind(self, step: int) -> None:
        self._call_all(lambda tracker: tracker.rewind(step))

    def close(self) -> None:
        self._call_all(lambda tracker: tracker.close())

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._active):
            try:
                call(tracker)
            except Exception as error:  # whatever a tracker's library raises, training goes on
                self._active.remove(tracker)
                name = type(tracker).__name__
                warnings.warn(f"{name} failed and is left out from here on: {error}", stacklevel=3)
