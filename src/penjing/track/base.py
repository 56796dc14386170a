"""The contract of a tracker, and a group of trackers whose failures do not stop training."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Tracker:
    """Hears of a run, in rank 0. A tracker overrides what it wants to know."""

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any]) -> None:
        """Before the first step, also of a resumed run. project, name: of `log`. config: the run's settings."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's metrics, by name."""

    def sample(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Texts of the model, each with `prompt` and `text`. They replace earlier ones of this step."""

    def incident(self, incident: Mapping[str, Any]) -> None:
        """What went wrong: `step`, `kind`, and more by its kind."""

    def rewind(self, step: int) -> None:
        """The run rolls back to `step`: later steps will be logged again."""

    def end(self) -> None:
        """After the last step, or when training is interrupted."""


class Trackers(Tracker):
    """Several trackers as one. A tracker that fails gives one warning and is not called again."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._active = list(trackers)

    def add(self, trackers: Iterable[Tracker]) -> None:
        self._active += trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call_all(lambda tracker: tracker.log(step, metrics))

    def sample(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._call_all(lambda tracker: tracker.sample(step, samples))

    def incident(self, incident: Mapping[str, Any]) -> None:
        self._call_all(lambda tracker: tracker.incident(incident))

    def rewind(self, step: int) -> None:
        self._call_all(lambda tracker: tracker.rewind(step))

    def end(self) -> None:
        self._call_all(lambda tracker: tracker.end())

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._active):
            try:
                call(tracker)
            except Exception as error:  # whatever a tracker's library raises, training goes on
                self._active.remove(tracker)
                name = type(tracker).__name__
                warnings.warn(f"{name} failed and is left out from here on: {error}", stacklevel=3)
