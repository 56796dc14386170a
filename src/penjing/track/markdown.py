"""Samples, incidents and figures as Markdown, for trackers that show texts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penjing.base.untrusted import Fields, text
from penjing.track.base import Tracker
from penjing.track.run_record import continuation, flatten


class MarkdownTracker(Tracker):
    """Shows samples, incidents and summaries as texts. `log` sets `_step`."""

    _step = 0  # of the last metrics

    def _text(self, name: str, markdown: str, step: int) -> None:
        raise NotImplementedError

    def sample(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._text("samples", samples_markdown(samples), step)

    def incident(self, incident: Mapping[str, Any]) -> None:
        self._text("incidents", incident_text(incident), incident["step"])

    def summary(self, name: str, figures: Mapping[str, Any]) -> None:
        self._text(name, table_markdown(figures), self._step)


class LibraryRun(MarkdownTracker):
    """A tracker whose library has a run like that of wandb. `start` sets `_run`, and `_markdown`: its type of texts."""

    _run: Any
    _markdown: Callable[[str], Any]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)
        self._step = step

    def _text(self, name: str, markdown: str, step: int) -> None:
        self._run.log({name: self._markdown(markdown)}, step=step)

    def attach(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def end(self) -> None:
        self._run.finish()


def samples_markdown(samples: Sequence[Mapping[str, Any]]) -> str:
    """Prompts in bold, each with the model's text as a block of code, since it may hold anything."""
    parts = []
    for one in map(Fields, samples):
        code = text(continuation(one)).replace("\n", "\n    ")
        parts.append(f"**{_plain(one.text('prompt'))}**\n\n    {code}")
    return "\n\n".join(parts)


def incident_text(incident: Mapping[str, Any]) -> str:
    """One line: the kind, and what else is known."""
    details = (f"{name}: {value}" for name, value in flatten(incident).items() if name not in ("step", "kind"))
    return ", ".join([text(incident["kind"]), *details])


def table_markdown(figures: Mapping[str, Any]) -> str:
    """A table of names and values; those of tables inside as `outer.inner`."""
    rows = (f"| {name} | {_plain(value)} |" for name, value in flatten(figures).items())
    return "\n".join(["| name | value |", "|---|---|", *rows])


def _plain(value: str) -> str:
    return " ".join(value.replace("|", "\\|").split())
