"""The contract of a tracker, and the group that keeps their troubles away from training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
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
        for tracker in list(self._working):
            try:
                tracker.log(step, figures)
            except Exception as error:  # whatever a tracker's library raises, training goes on
                self._drop(tracker, error)

    def rewind(self, step: int) -> None:
        """The run goes back to `step`: what was said of later ones is about to be said again."""
        for tracker in list(self._working):
            try:
                getattr(tracker, "rewind", lambda step: None)(step)
            except Exception as error:
                self._drop(tracker, error)

    def close(self) -> None:
        for tracker in list(self._working):
            try:
                tracker.close()
            except Exception as error:
                self._drop(tracker, error)

    def _drop(self, tracker: Tracker, error: Exception) -> None:
        self._working.remove(tracker)
        warnings.warn(f"{type(tracker).__name__} failed and is left out from here on: {error}", stacklevel=3)
