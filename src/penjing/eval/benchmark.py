"""Tasks whose examples are in published files: find and read them, and put solved examples before each."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from penjing.base.errors import UserError
from penjing.data.formats.dispatch import rows_of
from penjing.eval.task import LogLikelihood, Task

SHOTS_SEED = 1234  # as in lm-evaluation-harness
Row = Mapping[str, Any]


class Benchmark(Task):
    """A task of `--data DIR`.

    patterns: names of its files at any depth of DIR; the first one that exists counts. shot_patterns: of the files with
    solved examples; without any, examples are of the same files. archives: names of archives that hold such files.
    """

    name: ClassVar[str]
    patterns: ClassVar[Sequence[str]]
    shot_patterns: ClassVar[Sequence[str]] = ()
    archives: ClassVar[Sequence[str]] = ()
    shows_answers = False

    def __init__(self, data: Path | None = None, *, shots: int | None = None) -> None:
        """Raises UserError if the files are not in the folder."""
        if data is None:
            raise UserError(
                "needs a folder of data",
                where=f"task {self.name}",
                next_step="Give --data DIR; in training, eval.data=DIR.",
            )
        self.data, self.shots = data, self.shots if shots is None else shots
        self.paths = self.find(self.patterns)
        if not self.paths:
            what = f"no files of {self.name}" if data.is_dir() else "is a file" if data.exists() else "no such folder"
            raise UserError(
                what,
                where=data,
                wanted=f"a folder with {' or '.join([*self.patterns, *self.archives])}",
                next_step="docs/evaluate.md says where they are; `penjing data list` those that can be fetched.",
            )

    def find(self, patterns: Sequence[str]) -> list[Path]:
        """The files of the first pattern that has any."""
        archives = (path for pattern in self.archives for path in _matches(self.data, pattern))
        for folder in chain([self.data], (Path(_unpacked(path, self.name).name) for path in archives)):
            for pattern in patterns:
                if found := _matches(folder, pattern):
                    return found
        return []

    def request(self, row: Row, where: str) -> Any:
        """The request of a row, without solved examples. May raise what a row without its fields does."""
        raise NotImplementedError

    def rows(self, path: Path) -> Iterator[tuple[str, Row]]:
        """(file and line, row) of a file. Raises UserError for the first broken one."""
        for line, row in self.numbered(path):
            if isinstance(row, UserError):
                raise row
            yield f"{path}:{line}", row

    def numbered(self, path: Path) -> Iterator[tuple[int, Any]]:
        """(line, row or error) of a file."""
        return rows_of(path)

    def read(self, paths: Iterable[Path]) -> Iterator[Any]:
        """The requests of files. Raises UserError for the first row that is none."""
        for path in paths:
            for where, row in self.rows(path):
                with row_errors(self.name, where):
                    request = self.request(row, where)
                yield request

    def requests(self) -> Iterable[Any]:
        requests = self.read(self.paths)
        return self.with_shots(list(requests)) if self.shots else requests

    def with_shots(self, requests: Sequence[Any]) -> Iterator[Any]:
        """For each request in turn, one generator draws `shots` others: lm-evaluation-harness's rule."""
        own = self.shot_pool()
        draw, pool, more = Random(SHOTS_SEED), own or requests, not own
        if len(pool) < self.shots + more:
            raise UserError("too few examples", where=f"task {self.name}", got=len(pool), wanted=self.shots + more)
        for request in requests:
            drawn = draw.sample(pool, self.shots + more)
            yield shown_before(solved([one for one in drawn if one.where != request.where][: self.shots]), request)

    def shot_pool(self) -> list[Any]:
        """The examples of files of their own, if there are any."""
        return list(self.read(self.find(self.shot_patterns)))


@contextmanager
def row_errors(name: str, where: str) -> Iterator[None]:
    """Raises UserError for what a row without the fields of its task does."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        got = f"no field {error}" if isinstance(error, KeyError) else error
        raise UserError(f"not a record of {name}", where=where, got=got) from error


def name_of_file(where: str) -> str:
    """The subject or paradigm after which its file is named, or as a configuration of the hub its folder."""
    path = Path(where.rpartition(":")[0])
    if path.suffix == ".parquet":
        return path.parent.name
    return path.name.partition(".")[0].removesuffix("_" + path.parent.name)


def solved(examples: Iterable[Any]) -> str:
    """Examples with their answers, an empty line after each."""
    return "".join(f"{example.text}{_solution(example)}\n\n" for example in examples)


def _solution(example: Any) -> str:
    if not isinstance(example, LogLikelihood):
        return f" {example.answer}"
    choice = example.choices[example.answer]
    return example.texts[example.answer] + choice if example.texts else choice


def shown_before(text: str, request: Any) -> Any:
    if isinstance(request, LogLikelihood) and request.texts:
        return replace(request, texts=[text + own for own in request.texts])
    return replace(request, text=text + request.text)


def _matches(folder: Path, pattern: str) -> list[Path]:
    """Files by this name in a folder at any depth; the folder itself may be the name's first part. Hidden ones are
    those of programs that copy files, such as `hf download`."""
    inside = [pattern.removeprefix(f"{folder.name}/")] if pattern.startswith(f"{folder.name}/") else []
    found = {path for name in (f"**/{pattern}", *inside) for path in folder.glob(name) if path.is_file()}
    return sorted(path for path in found if "/." not in f"/{path.relative_to(folder).as_posix()}")


@cache
def _unpacked(path: Path, name: str) -> tempfile.TemporaryDirectory[str]:
    """A folder in which an archive's files are in a folder of this name; it lasts as long as the process."""
    parent = tempfile.TemporaryDirectory(prefix="penjing-eval-")
    try:
        shutil.unpack_archive(path, Path(parent.name, name), filter=None if path.suffix == ".zip" else "data")
    except Exception as error:  # each format and compression has errors of its own
        raise UserError(f"broken archive: {error}", where=path) from error
    return parent
