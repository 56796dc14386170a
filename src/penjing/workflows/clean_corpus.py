"""penjing data clean: clean files with a progress bar, print what was kept and dropped, and write the report."""

import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import Progress

from penjing.base import formatting as units
from penjing.base.files import read_json
from penjing.base.markup import escape_markup, print_table
from penjing.data.clean.cluster import Cluster
from penjing.data.clean.engine import clean
from penjing.data.clean.pipeline import Pipeline
from penjing.data.formats import READERS, Kind
from penjing.data.formats.fields import parse_columns
from penjing.data.formats.files import CLEANING
from penjing.data.formats.read import files_by_kind
from penjing.report.cleaning import totals_by, write_cleaning_report

_RULES_SHOWN, _SOURCES_SHOWN = 40, 12


def clean_corpus(
    files: Sequence[Path],
    out: Path | None,
    console: Console,
    *,
    pipeline: Sequence[str] = ("default",),
    kind: Kind | None = None,
    columns: Sequence[str] = (),
    workers: int = 0,
    memory_gb: float = 2.0,
    cluster: Path | None = None,
) -> list[dict[str, Any]]:
    """Clean files into `out`, each kind of records into a folder of its own if there are several; print the counts.

    out: None writes nothing. pipeline: as data.clean. columns: as data.columns. cluster: a TOML file. For the rest see
    `data.clean.engine`.
    """
    named = parse_columns(columns)
    settings: dict[str, Any] = {"pipeline": Pipeline.load(pipeline), "columns": named, "workers": workers}
    settings |= {"memory_gb": memory_gb, "cluster": None if cluster is None else Cluster.load(cluster)}
    groups = {kind: list(files)} if kind else files_by_kind(files, named)
    counts, written = [], set[Path]()
    for each, of_kind in groups.items():
        kept = out and str(out if len(groups) == 1 else out / each)
        with nullcontext(kept) if kept else TemporaryDirectory() as folder, _bar(console) as progress:
            written.add(Path(folder))
            counts.append(clean(of_kind, Path(folder), kind=each, progress=progress, **settings))
            if out is not None and counts[-1]["is_new"]:
                write_cleaning_report(counts[-1], Path(folder) / CLEANING)
        _print(counts[-1], console, None if out is None else Path(folder))
    if out is not None:
        _remove_stale({out, *(out / name for name in READERS)} - written)
    return counts


def _remove_stale(folders: Iterable[Path]) -> None:
    """What an earlier run wrote, when the files held other kinds of records."""
    for folder in folders:
        if (folder / CLEANING / "counts.json").is_file():
            for name in read_json(folder / CLEANING / "counts.json")["shards"]:
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / CLEANING)
            if not any(folder.iterdir()):
                folder.rmdir()


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[float, str], None]]:
    """A function that shows the fraction that is done, and what is being done; on a terminal."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("cleaning", total=1.0)
        yield lambda fraction, what: bar.update(task, completed=fraction, description=what)


def _print(counts: dict[str, Any], console: Console, out: Path | None) -> None:
    total = max(1, counts["records"])
    names = ("kept", "dropped", "broken")
    shares = ", ".join(f"{counts[name]:,} {name} ({counts[name] / total:.1%})" for name in names)
    console.print(f"{counts['records']:,} records of {counts['made_from']['kind']}: {shares}", highlight=False)
    rows = [(rule, action, why, f"{num:,}", f"{num / total:.2%}") for action, rule, why, num in counts["rules"]]
    if rows:
        print_table(console, ("rule", "records are", "why", "records>", "of all>"), rows[:_RULES_SHOWN])
    sizes = [
        (name, *map(units.megabytes, num_bytes), *map(units.count, tokens))
        for name, (_, num_bytes, tokens) in totals_by(counts, 0, counts["sources"])
    ]
    headings = ("source", "before>", "after>", "tokens before>", "after (estimate)>")
    print_table(console, headings, sizes[:_SOURCES_SHOWN])
    fields = ", ".join(f"{name} ({number:,}, the first {first})" for name, (number, first) in counts["ignored"].items())
    if fields:
        console.print(escape_markup("not learned", fields, indent=""), highlight=False, soft_wrap=True)
    if out is None:
        console.print("a dry run: nothing is written", highlight=False)
        return
    use = f"train on it with data.train={shlex.quote(str(out))}" if counts["kept"] else "no record is left to train on"
    done = f"report and trace: {out / CLEANING}; {use}"
    done = done if counts["is_new"] else f"nothing changed since the last run; {done}"
    console.print(done, soft_wrap=True, highlight=False, markup=False)
