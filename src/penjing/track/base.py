"""The contract of a tracker, and a group of trackers whose failures do not stop training."""

import importlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar


class Tracker:
    """Hears of a run, in rank 0. A tracker overrides what it wants to know."""

    package: ClassVar[str] = ""  # that it imports; the extra of penjing that installs it has the tracker's name

    def load(self, folder: Path) -> None:
        """Import the package, in the tracker's own process while the run's data are prepared. folder: of the run."""
        if self.package:
            importlib.import_module(self.package)

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any], run_id: str) -> None:
        """Before the first step, also of a resumed run. project, name: of `log`. config: the run's settings. run_id:
        eight hexadecimal digits, the same when the run is resumed."""

    def held(self, step: int) -> int:
        """The last step of which it surely has all metrics, asked when a run is resumed, and after `rewind`: what comes
        after it is passed on again. step: all up to here were passed on a while before."""
        return step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, by name. A step may have several calls: of training, then of validation."""

    def sample(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Texts of the model, each with `prompt` and `text`. They replace earlier ones of this step."""

    def incident(self, incident: Mapping[str, Any]) -> None:
        """What went wrong: `step`, `kind`, and more by its kind."""

    def summary(self, name: str, figures: Mapping[str, Any]) -> None:
        """Figures of the whole run, JSON values. name: `plan` before the first step, `outcome` after the last."""

    def attach(self, path: Path) -> None:
        """A file of the run, such as its report."""

    def rewind(self, step: int) -> None:
        """The run rolls back to `step`, or is resumed from it after a kill: later steps will be logged again."""

    def end(self) -> None:
        """After the last step, or when training is interrupted."""


class Trackers(Tracker):
    """Several trackers as one. A tracker that fails gives one warning and is not called again."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._active = list(trackers)

    def add(self, trackers: Iterable[Tracker]) -> None:
        self._active += trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call_all("log", step, metrics)

    def sample(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._call_all("sample", step, samples)

    def incident(self, incident: Mapping[str, Any]) -> None:
        self._call_all("incident", incident)

    def summary(self, name: str, figures: Mapping[str, Any]) -> None:
        self._call_all("summary", name, figures)

    def attach(self, path: Path) -> None:
        self._call_all("attach", path)

    def rewind(self, step: int) -> None:
        self._call_all("rewind", step)

    def end(self) -> None:
        self._call_all("end")

    def _call_all(self, method: str, *arguments: Any) -> None:
        for tracker in list(self._active):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # whatever a tracker's library raises, training goes on
                self._active.remove(tracker)
                name = type(tracker).__name__
                warnings.warn(f"{name} failed and is left out from here on: {error}", stacklevel=3)
