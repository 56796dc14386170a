"""Clean files into a folder of JSON lines: on all cores, in bounded memory, and a run that was killed continues.

out/documents-00000.jsonl ...   what is kept, a shard for each piece of the input
out/_cleaning/                  pipeline.toml, trace.jsonl, counts.json, and work/ until it is done
"""

import itertools
import multiprocessing
import os
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import penjing
from penjing.base.config import to_dict
from penjing.base.errors import UserError
from penjing.base.files import (
    atomic_write,
    disk_errors,
    make_folder,
    printable,
    read_json,
    sha256_file,
    sha256_text,
    write_json,
    write_text,
)
from penjing.base.lock import locked
from penjing.data.clean.clean_piece import LANGUAGES, Histogram, clean_piece, finish_piece
from penjing.data.clean.cluster import Cluster, Task
from penjing.data.clean.compare_pieces import compare_pieces
from penjing.data.clean.pieces import make_pieces, piece_folder
from penjing.data.clean.pipeline import Pipeline
from penjing.data.clean.rule import CorpusRule, Dropped, Rule
from penjing.data.formats import Kind, list_files
from penjing.data.formats.fields import Columns
from penjing.data.formats.files import CLEANING, content_of, size_of

Progress = Callable[[float, str], None]  # gets the fraction of the input's bytes that is done, and what is being done

_WORKER_BYTES = 300 << 20  # of one process
_EXAMPLES = 5  # of each rule


def clean(
    files: Sequence[Path],
    out: Path,
    *,
    kind: Kind,
    pipeline: Pipeline,
    columns: Columns | None = None,
    workers: int = 0,
    memory_gb: float = 2.0,
    cluster: Cluster | None = None,
    progress: Progress = lambda fraction, what: None,
) -> dict[str, Any]:
    """Clean files of one kind into `out`, and return what its `counts.json` says. If nothing changed, nothing is done.

    files: files, folders, and names with wildcards; each is a source in the report. workers: processes; 0: as many as
    the cores and the memory allow. memory_gb: for all processes together.
    Raises UserError for a folder that holds something else.
    """
    sources = [(path, number) for number, name in enumerate(files) for path in list_files([name])]
    _check_folder(out, [path for path, _ in sources])
    make_folder(out)
    with locked(out / CLEANING):
        cleaning = _Cleaning(out, kind, pipeline, columns or {}, memory_gb, workers, cluster, progress)
        made_from = cleaning.fingerprint([path for path, _ in sources])
        before = read_json(cleaning.counts_file) if cleaning.counts_file.is_file() else {}
        if before.get("made_from") == made_from and _is_whole(out, before["shards"]):
            return {**before, "is_new": False}
        counts = cleaning.run(sources, [printable(name) for name in files], made_from)
        cleaning.publish(counts, before.get("shards", {}))
    return {**counts, "is_new": True}


def _check_folder(out: Path, files: Iterable[Path]) -> None:
    inside = next((file for file in files if file.resolve().is_relative_to(out.resolve())), None)
    if inside:
        raise UserError("the input lies in the output folder", where=out, got=inside, next_step="Choose another --out.")
    if out.is_dir() and not (out / CLEANING).is_dir() and any(not (path / CLEANING).is_dir() for path in out.iterdir()):
        raise UserError("the folder holds other files", where=out, next_step="Choose an empty folder.")


def _is_whole(out: Path, shards: dict[str, int]) -> bool:
    sizes = ((out / name, size) for name, size in shards.items())
    return all(path.is_file() and path.stat().st_size == size for path, size in sizes)


@dataclass
class _Cleaning:
    out: Path
    kind: Kind
    pipeline: Pipeline
    columns: Columns
    memory_gb: float
    workers: int
    cluster: Cluster | None
    progress: Progress

    @property
    def counts_file(self) -> Path:
        return self.out / CLEANING / "counts.json"

    @property
    def work(self) -> Path:
        return self.out / CLEANING / "work"

    @cached_property
    def rules(self) -> dict[str, Rule]:
        return self.pipeline.make_rules()

    def fingerprint(self, files: Sequence[Path]) -> dict[str, Any]:
        """What decides the output: the files, the rules with their settings and files, and the program."""
        package = Path(penjing.__file__).parent / "data"
        code = sorted(path for folder in ("clean", "formats") for path in (package / folder).glob("*.[pct]*"))
        return {
            "files": [[printable(path), *content_of(path)] for path in files],
            "kind": self.kind,
            "columns": dict(self.columns),
            "pipeline": self.pipeline.fingerprint(),
            "program": [penjing.__version__, sha256_text("".join(map(sha256_file, code)))],
        }

    def run(
        self, sources: Sequence[tuple[Path, int]], names: Sequence[str], made_from: dict[str, Any]
    ) -> dict[str, Any]:
        """All of the work. What an earlier run with the same fingerprint did is not done again."""
        made_from_file = self.work / "made_from.json"
        if not made_from_file.is_file() or read_json(made_from_file) != made_from:
            shutil.rmtree(self.work, ignore_errors=True)
            write_json(made_from_file, made_from)
        folders, todo, done = list[Path](), list[int](), 0

        def arguments() -> Iterator[tuple[Any, ...]]:
            nonlocal done
            for piece in make_pieces(sources, self.work):
                folders.append(piece_folder(self.work, piece.number))
                if folders[-1].is_dir():
                    done += piece.num_bytes
                    continue
                todo.append(piece.num_bytes)
                yield piece, self.kind, folders[-1], self.columns

        total = sum(size_of(path) for path, _ in sources) or 1
        for number in self._in_processes(clean_piece, arguments()):
            done += todo[number]
            self.progress(0.9 * done / total, "cleaning")
        dropped: list[dict[int, Dropped]] = [{} for _ in folders]
        for name, rule in self.rules.items():
            if isinstance(rule, CorpusRule):
                self.progress(0.9, name.replace("_", " "))
                compare_pieces(name, rule, folders, dropped, max(1 << 26, int(self.memory_gb * 1e9) // 4))
        shards = [self.work / "shards" / f"{self.kind}-{folder.name}.jsonl" for folder in folders]
        to_finish = list(zip(folders, dropped, shards, strict=True))
        for finished, _ in enumerate(self._in_processes(finish_piece, iter(to_finish)), 1):
            self.progress(0.9 + 0.1 * finished / len(folders), "writing")
        counts = _totals([read_json(folder / "whole_counts.json") for folder in folders])
        sizes = {shard.name: shard.stat().st_size for shard in shards if shard.stat().st_size}
        return {"made_from": made_from, "sources": list(names), "shards": sizes, **counts}

    def publish(self, counts: dict[str, Any], old_shards: Iterable[str]) -> None:
        """Put the shards in place, and the old ones away; `counts.json` is last, and says that all is done."""
        with disk_errors(self.out), atomic_write(self.out / CLEANING / "trace.jsonl") as trace:
            for folder in sorted(self.work.glob("*/whole_trace.jsonl")):
                with open(folder, "rb") as part:
                    shutil.copyfileobj(part, trace)
        write_text(self.out / CLEANING / "pipeline.toml", self.pipeline.resolved())
        with disk_errors(self.out):
            for name in set(old_shards) - counts["shards"].keys():
                (self.out / name).unlink(missing_ok=True)
            for name in counts["shards"]:
                os.replace(self.work / "shards" / name, self.out / name)
        write_json(self.counts_file, counts)
        shutil.rmtree(self.work, ignore_errors=True)

    def _in_processes(self, work: Callable[..., None], arguments: Iterator[tuple[Any, ...]]) -> Iterator[int]:
        """Call `work` with each of the arguments; yield the number of each as it is done. One process, or one piece, is
        worked on in this one. Only a few arguments are taken in advance."""
        spec = {name: to_dict(settings) for name, settings in self.pipeline.rules.items()}
        if self.cluster is not None:
            if tasks := list(arguments):
                yield from self.cluster.run(Task(work, spec, tasks), self.work / "logs")
            return
        by_memory = int((self.memory_gb * 1e9 - _WORKER_BYTES) // _WORKER_BYTES)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        first = list(itertools.islice(arguments, max(1, min(self.workers or cores, by_memory))))
        workers, arguments = len(first), itertools.chain(first, arguments)
        if workers <= 1:
            for number, each in enumerate(arguments):
                work(self.rules, *each)
                yield number
            return
        context = multiprocessing.get_context("spawn")  # a fork hangs if a thread of this process holds a lock
        pool = ProcessPoolExecutor(workers, context, _start_worker, (spec, os.getpid()))
        try:
            pending: dict[Future[None], int] = {}
            for number, each in enumerate(arguments):
                pending[pool.submit(_in_worker, work, each)] = number
                if len(pending) == 2 * workers:
                    yield from _finished(pending)
            while pending:
                yield from _finished(pending)
        except BrokenProcessPool:
            hint = "Probably the memory was full: run it again with fewer --workers; it continues."
            raise UserError("a process that cleans was killed", where=self.out, next_step=hint) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _finished(pending: dict[Future[None], int]) -> Iterator[int]:
    """Take the futures that are done, of at least one, from those that are not."""
    for future in wait(pending, return_when=FIRST_COMPLETED).done:
        future.result()
        yield pending.pop(future)


_worker_rules: dict[str, Rule] = {}  # of a process that cleans pieces


def _start_worker(spec: dict[str, Any], parent: int) -> None:
    """Make the rules, leave Ctrl-C to the parent, and end with it, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _worker_rules.update(Pipeline(spec).make_rules())


def _in_worker(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    work(_worker_rules, *arguments)


def _totals(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    totals, examples, ignored = Counter[str](), dict[str, list[Any]](), dict[str, list[Any]]()
    for piece in pieces:
        totals.update(piece["totals"])
        for example in piece["examples"]:
            shown = examples.setdefault(f"{example['action']} {example['rule']}", [])
            shown += [example] if len(shown) < _EXAMPLES else []
        for name, (number, first) in piece["ignored"].items():
            ignored[name] = [number + ignored.get(name, [0])[0], ignored.get(name, [0, first])[1]]
    for warning in dict.fromkeys(warning for piece in pieces for warning in piece["warnings"]):
        warnings.warn(warning, stacklevel=2)
    rules: list[list[Any]] = [[*key.split("\t"), number] for key, number in totals.most_common()]
    of_action = {name: [row[-1] for row in rules if row[0] == name] for name in ("dropped", "broken", "changed")}
    return {
        **{name: sum(piece[name] for piece in pieces) for name in ("records", "kept")},
        **{name: sum(numbers) for name, numbers in of_action.items()},
        "rules": rules,
        "languages": list(LANGUAGES),
        **{when: _histogram(piece[when] for piece in pieces) for when in ("before", "after")},
        "ignored": ignored,
        "examples": [example for shown in examples.values() for example in shown],
    }


def _histogram(parts: Iterable[list[list[int]]]) -> list[list[int]]:
    """Rows of source, language, bits of the length in characters, records, bytes."""
    sums = Histogram()
    for source, language, length, records, num_bytes in itertools.chain.from_iterable(parts):
        sums.add((source, language, length), records, num_bytes)
    return sums.rows()
