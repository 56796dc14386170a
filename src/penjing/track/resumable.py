"""One curve for a run, whatever interrupts it: a file in the run's folder says what each tracker has."""

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from penjing.base.files import write_json
from penjing.track.background import Delays
from penjing.track.base import Tracker, Trackers
from penjing.track.run_record import RunRecord


class ResumableTracker(Trackers):
    """Passes a run on to a tracker, and what an earlier process could not pass on from the run's own files.

    So a run that was killed, or had another tracker before, has the same curve everywhere: no gap and no step twice.
    """

    def __init__(self, name: str, tracker: Tracker, folder: Path, step: int, delays: Delays | None = None) -> None:
        """name: in the table. folder: of the run. step: of the checkpoint that it goes on from, else 0."""
        self.tracker, self.step = tracker, step
        self._folder, self._delays = folder, delays or Delays()
        self._file = folder / f"{name}.json"
        # All calls for steps up to `_complete` are stored, those up to `_last` were made.
        self._complete = self._last = self._held = -1
        self._begun: deque[tuple[float, int]] = deque()  # when the calls for a step began, and the step
        self._saved = 0.0
        self._names: set[str] = set()  # of the metrics of step `_last`

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any], run_id: str = "") -> None:
        state = RunRecord(folder).fields(self._file)
        self._id = state.text("id") or run_id or secrets.token_hex(4)
        self.tracker.start(folder, project=project, name=name, config=config, run_id=self._id)
        if state:
            complete = state.number("complete")
            told = self.step if complete is None else int(complete)
            expected = min(told, self.step)
            self._held = self.tracker.held(expected)
            may_have_more = told > self.step or not state.raw.get("ended")
            if may_have_more and self._held == expected:
                self.tracker.rewind(expected)
        self._pass_on_again(self.step)

    def _pass_on_again(self, step: int) -> None:
        """What the run's files have after the last step that the tracker holds, up to `step`."""
        self._begun.clear()
        self._complete = self._last = self._held
        self._save(ended=False)
        # Of a run that begins, they may have lines of an earlier attempt.
        steps, record = range(self._held + 1, step + 1 if step else 0), RunRecord(self._folder, problems=[])
        calls: list[tuple[int, Callable[[], None]]] = []
        for row in record.metrics:
            numbers = {name: row.number(name) for name in row.raw if name != "step"}
            metrics = {name: value for name, value in numbers.items() if value is not None}
            calls.append((row.raw["step"], partial(self.log, row.raw["step"], metrics)))
        samples = (row.raw for row in record.lines(record.folder.samples))
        for at, group in groupby(samples, key=lambda row: int(row["step"])):
            calls.append((at, partial(self.tracker.sample, at, list(group))))
        calls += [(row.raw["step"], partial(self.tracker.incident, row.raw)) for row in record.incidents]
        for _, call in sorted((call for call in calls if call[0] in steps), key=lambda call: call[0]):
            call()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._held:  # a run that begins again validates again before its first step
            return
        now = time.monotonic()
        if step > self._last:
            self._begun.append((now, step))
            self._last, self._names = step, set()
        self.tracker.log(step, {name: value for name, value in metrics.items() if name not in self._names})
        self._names |= metrics.keys()
        while self._begun and self._begun[0][0] < now - self._delays.stored:
            self._complete = self._begun.popleft()[1] - 1
        if now - self._saved > self._delays.save:
            self._save(ended=False)

    def _call_all(self, method: str, *arguments: Any) -> None:
        getattr(self.tracker, method)(*arguments)

    def rewind(self, step: int) -> None:
        self.tracker.rewind(step)
        self._held = self.tracker.held(min(step, self._last))
        self._pass_on_again(step)

    def end(self) -> None:
        self.tracker.end()
        self._complete = self._last
        self._save(ended=True)

    def _save(self, *, ended: bool) -> None:
        write_json(self._file, {"id": self._id, "complete": self._complete, "ended": ended})
        self._saved = time.monotonic()
