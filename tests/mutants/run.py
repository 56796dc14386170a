"""Small wrong changes of the code (mutants), each of which a test must see: `python tests/mutants/run.py [NAME ...]`.

mutants.toml lists them: a file, a text that stands in it exactly once, what is put in its place, and the tests that are
to fail then. Nothing is changed in place: the tree is copied, and every run is a fork of one process that has imported
torch and pytest, but nothing of penjing. First the named tests run on the unchanged copy and must pass.

Ends with 1 if a mutant survives, no longer fits the code, or cannot be judged. --out FILE: a JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
TRAVELS = (
    "src",
    "tests",
    "docs",
    "benchmarks",
    "results",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "README.zh-CN.md",
)
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".pytest_cache", "*.pyc")
SECONDS = 300.0  # after which a mutant is taken to hang, which is no way to pass either
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`old` stands in `file` exactly once; with `new` in its place one of `tests` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        return text.replace(self.old, self.new)


@dataclass
class Outcome:
    """What a run of tests came to: pytest's exit code (None: it did not end), tests by outcome, what was printed."""

    code: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    text: str = ""

    @property
    def verdict(self) -> str:
        """caught, survived, or why that cannot be said."""
        if self.code is None:
            return "caught"  # it hangs
        if self.code == 1 and self.failed:
            return "caught"
        if self.code == 0 and self.counts.get("passed"):
            return "survived"
        return "its tests were skipped" if self.code == 0 else f"pytest ended with {self.code}"


def load(path: Path = LIST) -> list[Mutant]:
    with open(path, "rb") as stream:
        return [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in tomllib.load(stream)["mutant"]]


def misfits(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """What no longer fits the code: a line each."""
    found = []
    for mutant in mutants:
        path = root / mutant.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        times = text.count(mutant.old)
        if times != 1:
            found.append(f"{mutant.name}: its old text stands {times} times in {mutant.file}")
        elif path.suffix == ".py" and not _is_python(mutant.applied(text)):
            found.append(f"{mutant.name}: {mutant.file} is no Python with it")
        if mutant.old == mutant.new or not mutant.tests:
            found.append(f"{mutant.name}: changes nothing, or names no test")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            source = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
            if f"def {name.partition('[')[0]}(" not in source:
                found.append(f"{mutant.name}: no such test: {test}")
    return found


def _is_python(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class Tree:
    """A copy of the tree in which tests run, each time in a process that imports penjing anew."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log = folder / "tree", folder / "log"
        self._tick = int(time.time())
        for name in TRAVELS:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.root / name, ignore=LEFT_OUT)
            elif source.is_file():
                shutil.copy(source, self.root / name)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        text = path.read_text(encoding="utf-8")
        self._write(path, mutant.applied(text))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: what Python compiled of a file of the same second and size would be taken for it."""
        path.write_text(text, encoding="utf-8")
        self._tick += 10
        os.utime(path, (self._tick, self._tick))

    def run(self, tests: Sequence[str], *, stop: bool = True) -> Outcome:
        """stop: at the first failure."""
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            self._be_pytest(tests, stop, writing)
        os.close(writing)
        code = _wait(process)
        with open(reading, encoding="utf-8") as stream:
            told = stream.read()
        outcome = Outcome(code, text=self.log.read_text(encoding="utf-8", errors="replace"))
        if told:
            outcome.counts, outcome.failed = json.loads(told)
        return outcome

    def _be_pytest(self, tests: Sequence[str], stop: bool, writing: int) -> None:
        """In the fork: run the tests, tell what came of each, and end."""
        code = 99
        try:
            os.setpgid(0, 0)
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self.root)
            sys.path.insert(0, str(self.root / "src"))
            os.environ["PYTHONPATH"] = str(self.root / "src")
            import pytest

            counts = Counts()
            options = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:cov", "-p", "no:xdist"]
            code = int(pytest.main([*options, *(["-x"] if stop else []), *tests], plugins=[counts]))
            os.write(writing, json.dumps([counts.counts, counts.failed]).encode())
        finally:
            sys.stdout.flush()
            os._exit(code)


class Counts:
    """A plugin of pytest's that counts."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: object) -> None:
        outcome, when = report.outcome, report.when  # type: ignore[attr-defined]
        if when == "call" or outcome != "passed":
            self.counts[outcome] = self.counts.get(outcome, 0) + 1
        if outcome == "failed":
            self.failed.append(report.nodeid)  # type: ignore[attr-defined]


def _wait(process: int) -> int | None:
    """The exit code of a child; None if it did not end in time."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def judge(mutants: Sequence[Mutant], tell: Callable[[str, str, Outcome], None]) -> int:
    """How many were not caught; tells (name, verdict, outcome) of each."""
    os.environ.update(ENVIRONMENT)
    import pytest
    import torch

    torch.set_num_threads(1)
    pytest.main(["--version"])  # its plugins are then imported in every fork
    assert not any(name.partition(".")[0] == "penjing" for name in sys.modules), "forks would share unchanged modules"
    with tempfile.TemporaryDirectory(prefix="penjing-mutants-") as folder:
        os.environ["PENJING_HOME"] = str(Path(folder) / "home")
        tree = Tree(Path(folder))
        plain = tree.run(sorted({test for mutant in mutants for test in mutant.tests}), stop=False)
        if plain.code != 0:
            tell("(unchanged)", "red without any change", plain)
            return len(mutants)
        missed = 0
        for mutant in mutants:
            with tree.changed(mutant):
                outcome = tree.run(mutant.tests)
            missed += outcome.verdict != "caught"
            tell(mutant.name, outcome.verdict, outcome)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants to try; none: all")
    parser.add_argument("--out", type=Path, help="file for a JSON line of each")
    given = parser.parse_args()
    every = load()
    mutants = [mutant for mutant in every if not given.names or mutant.name in given.names]
    unknown = set(given.names) - {mutant.name for mutant in every}
    if lines := [*misfits(mutants), *(f"no mutant is called {name}" for name in sorted(unknown))]:
        print("\n".join(lines))
        return 1
    began = time.monotonic()

    def tell(name: str, verdict: str, outcome: Outcome) -> None:
        print(f"{verdict:10} {name}  {outcome.failed[0] if outcome.failed else ''}", flush=True)
        if verdict != "caught":
            print(outcome.text[-3000:], flush=True)
        if given.out is not None:
            with open(given.out, "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"name": name, "verdict": verdict, "failed": outcome.failed[:1]}) + "\n")

    missed = judge(mutants, tell)
    print(f"{len(mutants) - missed} of {len(mutants)} mutants caught in {time.monotonic() - began:.0f} s")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
