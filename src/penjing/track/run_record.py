"""The one reader of what training wrote into a run's folder."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import open_regular
from penjing.base.lock import is_locked
from penjing.base.untrusted import MAX_NUMBER, Fields, number, parse_lines, read_fields, read_lines, text
from penjing.checkpoint.delivered import Delivered, choose
from penjing.checkpoint.manifest import MANIFEST, STATE, folder_name, steps
from penjing.track.run_dir import RunDir

T = TypeVar("T")
MARK_BYTES = 256  # the last that were read, by which a growing file is known again


class RunRecord:
    """A run, as its files tell it; each file is read when it is first asked for, and empty if it is missing.

    A file that cannot be read raises a UserError; with `problems` it is empty too, and its path is added there.
    """

    def __init__(self, path: Path, problems: list[Path] | None = None) -> None:
        self.folder, self._problems = RunDir(path), problems

    @property
    def exists(self) -> bool:
        """Whether this is a run's folder, not that of a checkpoint."""
        folder = self.folder
        files = (folder.settings, folder.metrics, folder.plan, folder.outcome)
        try:
            is_run = any(file.is_file() for file in files) or folder.checkpoints.is_dir()
            return is_run and not (folder.path / MANIFEST).exists()
        except PermissionError:  # of another user
            return False

    def _read(self, load: Callable[[Path], T], path: Path, empty: T) -> T:
        try:
            return load(path) if path.exists() else empty
        except (UserError, OSError) as error:
            if self._problems is not None:
                self._problems.append(path)
                return empty
            raise error if isinstance(error, UserError) else UserError(f"cannot be read: {error}", where=path) from None

    def fields(self, path: Path) -> Fields:
        """The JSON object in a file of the folder."""
        return self._read(read_fields, path, Fields())

    def lines(self, path: Path) -> list[Fields]:
        """The JSON objects in a file of the folder, each with its `step`."""
        return self._read(lambda path: list(map(Fields, read_lines(path))), path, [])

    def end_of(self, path: Path, start: int) -> bytes:
        """What a file of the folder has from the byte `start` on."""
        return self._read(lambda path: _read_from(path, start), path, b"")

    @cached_property
    def settings(self) -> dict[str, str]:
        """`table.name`, and its value as text."""
        return flatten(self._read(config.read_toml, self.folder.settings, {}))

    @cached_property
    def plan(self) -> Fields:
        return self.fields(self.folder.plan)

    @cached_property
    def outcome(self) -> Fields:
        """Of a finished run."""
        return self.fields(self.folder.outcome)

    @cached_property
    def ended(self) -> Fields:
        """Of a run that did not reach its last step."""
        return self.fields(self.folder.ended)

    @cached_property
    def answers(self) -> Fields:
        """The answers to `eval.questions`."""
        return self.fields(self.folder.questions)

    @cached_property
    def metrics(self) -> list[Fields]:
        """In the order in which they were written."""
        return self.lines(self.folder.metrics)

    @cached_property
    def figures(self) -> dict[str, dict[int, float]]:
        """Values by step, sorted, for each metric. A resumed run repeats steps: the later line wins."""
        figures = GrowingFigures()
        figures.add(self.metrics)
        return {name: dict(sorted(values.items())) for name, values in figures.by_name.items()}

    @cached_property
    def samples(self) -> dict[tuple[str, str], dict[int, str]]:
        """The model's text by step, sorted, for each prompt (text, language). Here too the later line wins."""
        samples: dict[tuple[str, str], dict[int, str]] = {}
        for line in self.lines(self.folder.samples):
            prompt = line.text("prompt"), line.text("language")
            samples.setdefault(prompt, {})[line.raw["step"]] = continuation(line)
        return {prompt: dict(sorted(texts.items())) for prompt, texts in samples.items()}

    @cached_property
    def incidents(self) -> list[Fields]:
        return self.lines(self.folder.incidents)

    @property
    def checkpoints(self) -> list[int]:
        """The steps that were saved, damaged ones too, newest first."""
        return steps(self.folder.checkpoints)

    @property
    def delivered(self) -> Delivered | None:
        """The checkpoint that chat, eval and export use, and why; None without a checkpoint."""
        present = self.checkpoints
        if not present:
            return None
        newest = self.fields(self.folder.checkpoints / folder_name(present[0]) / STATE)
        chosen = choose(newest.fields("best").raw, present[0])
        return chosen if chosen.step in present else chosen._replace(step=present[0])

    @property
    def last_step(self) -> int:
        return self.reached(max((line.raw["step"] for line in self.metrics), default=0))

    @property
    def is_running(self) -> bool:
        return not self.outcome and is_locked(self.folder.path)

    def reached(self, logged: int) -> int:
        """The last step that its files know of. logged: that of its metrics, which are written every so many steps."""
        ended = 0.0 if self.is_running else self.ended.number("steps_done") or 0.0
        return max([logged, int(ended), *self.checkpoints[:1]])

    def state(self, step: int) -> str:
        """running, finished, stopped, failed, interrupted, out of memory, or killed: then nothing wrote why it ended.
        step: the last one that it reached."""
        if self.is_running:
            return "running"
        return "finished" if self.outcome else self.ending(step).text("ended") or "killed"

    def ending(self, step: int) -> Fields:
        """`ended`, unless the run went on after it. step: the last one that it reached."""
        return self.ended if step <= (self.ended.number("steps_done") or 0) else Fields()


class GrowingFigures:
    """Values by step of each metric, as a run's file grows. A resumed run repeats steps: the later line wins."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[int, float]] = {}
        self._by_key: dict[str, dict[int, float]] = {}  # as the file has the names
        self._num_read, self._mark = 0, b""  # bytes that were read, and the last of them

    def read(self, record: RunRecord) -> bool:
        """Take in the complete lines written since the last time; whether there were any. If the file was written anew,
        by a rollback or a resumed run, or is gone, earlier lines are void."""
        path = record.folder.metrics
        written = record.end_of(path, self._num_read - len(self._mark))
        if restarted := not written.startswith(self._mark):
            self._by_key.clear()
            self._num_read, self._mark = 0, b""
            written = record.end_of(path, 0)
        new = written[len(self._mark) : written.rfind(b"\n") + 1]
        self._num_read += len(new)
        self._mark = (self._mark + new[-MARK_BYTES:])[-MARK_BYTES:]
        self.add(map(Fields, parse_lines(new.split(b"\n"))))
        return bool(new) or restarted

    def add(self, lines: Iterable[Fields]) -> None:
        for line in lines:
            if (step := line.raw["step"]) >= 0:
                for key, value in line.raw.items():
                    # Nearly all are such floats: `number` would take half of the time of reading.
                    real = value if type(value) is float and abs(value) < MAX_NUMBER else number(value)
                    if real is not None:
                        self._by_key.setdefault(key, {})[step] = real
        self.by_name = {text(key): values for key, values in self._by_key.items() if key != "step"}


def _read_from(path: Path, start: int) -> bytes:
    with open_regular(path) as stream:
        stream.seek(start)
        return stream.read()


def find_runs(path: Path) -> list[RunRecord]:
    """The run at `path`, and those directly below it. Raises UserError if there are none."""
    folders = [path, *sorted(folder for folder in path.iterdir() if folder.is_dir())] if path.is_dir() else []
    runs = [run for run in map(RunRecord, folders) if run.exists]
    if not runs:
        raise no_run(path)
    return runs


def no_run(path: Path) -> UserError:
    what = "no run in this folder" if path.is_dir() else "is a file" if path.exists() else "no such folder"
    return UserError(what, where=path, wanted="a folder made by `penjing train` or `penjing quickstart`")


def continuation(sample: Fields) -> str:
    """The model's text after the prompt."""
    return sample.text("text").removeprefix(sample.text("prompt"))


def flatten(table: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as `table.name`, with values as text."""
    shown: dict[str, str] = {}
    for name, value in config.flat(table):
        listed = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        shown[text(name)] = text(str(listed).lower() if isinstance(listed, bool) else listed)
    return shown
