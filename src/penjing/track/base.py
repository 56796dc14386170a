"""The contract of a tracker, and the group that keeps their troubles away from training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Tracker(Protocol):
    """Takes figures by name at a step."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Several trackers as one. The first failure of each is a warning; after that it is left alone."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._working = list(trackers)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, figures))

    def rewind(self, step: int) -> None:
        """The run goes back to `step`: what was said of later ones is about to be said again."""
        self._each(lambda tracker: getattr(tracker, "rewind", lambda step: None)(step))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._working):
            try:
                call(tracker)
            except Exception as error:  # whatever a tracker's library raises, training goes on
                self._working.remove(tracker)
                name = type(tracker).__name__
                warnings.warn(f"{name} failed and is left out from here on: {error}", stacklevel=3)
