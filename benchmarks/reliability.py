"""Run the deep tests, keep what they counted under results/, and render docs/reliability.md from it.

python benchmarks/reliability.py              # `make test-deep`: the large counts, and all tests marked `nightly`
python benchmarks/reliability.py kills order  # of these files only
python benchmarks/reliability.py --usual      # the counts of `make test`
python benchmarks/reliability.py --render     # only the page, from the newest results

What a file of tests counted is written as soon as it has passed. The same command again on the same day and commit goes
on with the files that are left; --fresh runs them all. What is measured, and not counted, is a row of the same table:
benchmarks/saving.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from penjing.base.files import read_json, write_json

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "reliability"
PAGE = ROOT / "docs" / "reliability.md"
SIZES = {"usual": "`make test`", "deep": "`make test-deep`"}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LONG = ("kills", "signals_and_locks", "quickstart_kills")  # begun first
BEGIN, END = "<!-- counts: rendered by benchmarks/reliability.py -->", "<!-- end of counts -->"

# What is promised, and the file of tests that holds it to that.
PROMISES = (
    ("A run killed with `kill -9` at any instant, also inside a save, ends in the same bits, in every stage", "kills"),
    ("The quickstart, killed with `kill -9` at any instant, goes on by the same command, says from where, and ends in"
     " the same weights", "quickstart_kills"),
    ("Ended at any call of a save, rotation or load, or by a power cut that forgets what was not synced, a whole"
     " checkpoint is found; a disk that refuses costs a checkpoint and nothing else", "crash_points"),
    ("Any damage to a checkpoint is found, the file named, and the one before it taken", "corruption"),
    ("The order of samples is the same for any ranks, workers, passes and resumes", "order"),
    ("Ctrl-C, kill and a closed terminal save and say so; one writer in a folder; another run is refused field by"
     " field", "signals_and_locks"),
    ("A NaN or Inf loss or gradient costs one step; many in a row go back; spikes are written down"
     " with their samples", "bad_steps"),
    ("Out of memory means smaller passes over the same rows", "memory"),
    ("A full disk and a tracker that hangs change nothing", "disk_and_trackers"),
    ("A rank that dies, hangs or fails ends the run within a minute and is named", "ranks"),
    ("A run on two ranks of which a random one is killed continues by itself, and ends in the same bits", "rank_kills"),
    ("A machine of two that is lost and comes back costs a run the steps since its last checkpoint", "two_machines"),
    ("Broken data of every kind is set aside and every record accounted for", "data"),
    ("Files from strangers run nothing and cost no more than they should", "untrusted"),
    ("What users type never becomes a control token", "control_tokens"),
    ("A checkpoint that forgot any one part of the state would be noticed", "mutations"),
    ("`penjing doctor RUN` says what is sound and from where it continues", "doctor"),
)  # fmt: skip


def deep_elsewhere() -> list[str]:
    """Files outside tests/reliability with tests of the deep set, by their path under tests/ without ending."""
    others = (path for path in sorted(TESTS.parent.rglob("test_*.py")) if TESTS not in path.parents)
    marked = (path for path in others if "mark.nightly" in path.read_text(encoding="utf-8"))
    return [str(path.relative_to(TESTS.parent).with_suffix("")) for path in marked]


def run_file(name: str, deep: bool) -> dict[str, Any] | None:
    """Run one file of tests: how many passed, and what they counted; None if one failed."""
    elsewhere = "/" in name
    path = TESTS.parent / f"{name}.py" if elsewhere else TESTS / f"test_{name}.py"
    which = ["-m", "nightly" if elsewhere else "not usual"] if deep else []
    with tempfile.TemporaryDirectory() as folder:
        counts, report = Path(folder) / "counts.jsonl", Path(folder) / "report.xml"
        environment = {**os.environ, **ENVIRONMENT, "PENJING_RELIABILITY_COUNTS": str(counts)}
        command = [sys.executable, "-m", "pytest", "-q", "-rs", *which, f"--junitxml={report}", str(path)]
        began = time.monotonic()
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        print(f"{name}: {done.stdout.strip().splitlines()[-1]}", flush=True)
        if done.returncode:
            print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
            return None
        suite = report.read_text(encoding="utf-8").split("<testsuite ")[1].split(">")[0]
        facts = dict(part.split('="') for part in suite.split('" ') if '="' in part)
        lines = counts.read_text(encoding="utf-8").splitlines() if counts.exists() else []
        return {
            "passed": int(facts["tests"]) - int(facts["skipped"]),
            "skipped": int(facts["skipped"]),
            "size": "deep" if deep else "usual",
            "commit": commit(),
            "seconds": round(time.monotonic() - began),
            "counts": summed([json.loads(line) for line in lines]),
        }


def commit() -> str:
    """The commit that is tested, with a plus sign where the code differs from it; empty outside git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    differs = git("status", "--porcelain", "--untracked-files=no", "--", "src", "tests", "benchmarks")
    return git("rev-parse", "--short=9", "HEAD") + ("+" if differs else "")


class Record:
    """What was counted today, written anew with every file of tests that has passed."""

    def __init__(self) -> None:
        self.date = time.strftime("%Y-%m-%d")
        self.path = ROOT / "results" / f"reliability_{self.date}.json"
        known = read_json(self.path) if self.path.is_file() else {}
        self.files: dict[str, Any] = known.get("files", {})
        self.lock = Lock()

    def is_done(self, name: str, deep: bool) -> bool:
        """Whether this file was run so at this commit, or more deeply."""
        facts = self.files.get(name)
        if facts is None or facts.get("commit") != commit():
            return False
        return facts.get("size") == "deep" or not deep

    def add(self, name: str, facts: dict[str, Any]) -> None:
        with self.lock:
            self.files[name] = facts
            machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
            found = {"date": self.date, "machine": machine, "files": dict(sorted(self.files.items()))}
            write_json(self.path, found)


def run(names: list[str], workers: int, deep: bool, fresh: bool) -> None:
    """Run files of tests, so many at a time, and record them. Exits if one fails, after all have run."""
    record = Record()
    left = [name for name in names if fresh or not record.is_done(name, deep)]
    if len(left) < len(names):
        print(f"{len(names) - len(left)} of {len(names)} files were run today at this commit; --fresh runs them again")

    def one(name: str) -> bool:
        facts = run_file(name, deep)
        if facts is not None:
            record.add(name, facts)
        return facts is not None

    with ThreadPoolExecutor(workers) as pool:
        passed = dict(zip(left, pool.map(one, left), strict=True))
    print(record.path)
    failed = [name for name, good in passed.items() if not good]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def summed(lines: list[dict[str, Any]]) -> dict[str, int]:
    """{what: how many}, the cases of a test added up."""
    found: dict[str, int] = defaultdict(int)
    for line in lines:
        found[line["name"]] += line["value"]
    return dict(sorted(found.items()))


def table(results: dict[str, Any], saving: dict[str, Any] | None) -> str:
    """The promises, each with its tests and what they counted or what was measured, in Markdown."""
    rows = ["| Promise | Tests | Size | Counted |", "|---|---|---|---|"]
    files = results["files"]
    promises = [(promise, name, f"reliability/test_{name}") for promise, name in PROMISES]
    promises += [("The deep tests of this file pass", name, name) for name in sorted(files) if "/" in name]
    for promise, name, path in promises:
        file = f"[{Path(path).name}.py](../tests/{path}.py)"
        facts = files.get(name)
        if facts is None:
            rows.append(f"| {promise} | {file} | - | not counted |")
            continue
        skipped = f", {facts['skipped']} skipped" if facts.get("skipped") else ""
        size = SIZES.get(facts.get("size", ""), "-")
        counted = told_counts(facts["counts"]) or "-"
        rows.append(f"| {promise} | {file}, {facts['passed']} passed{skipped} | {size} | {counted} |")
    measured = {
        "What saving beside training costs; the goal is 1 % of step time": told_cost(saving),
        "How soon Ctrl-C, kill and a closed terminal end a run; the goal is 5 s": told_signals(saving),
    }
    rows += [f"| {what} | [saving.py](../benchmarks/saving.py) | - | {told} |" for what, told in measured.items()]
    passed = sum(facts["passed"] for facts in files.values())
    seconds = sum(facts.get("seconds", 0) for facts in files.values())
    taken = f"; {seconds / 60:.0f} minutes of tests, some beside each other," if seconds else ""
    commits = sorted({facts["commit"] for facts in files.values() if facts.get("commit")})
    at = f", commit {', '.join(commits)}" if commits else ""
    rows += ["", f"Counted on {results['date']}{at}: {passed:,} tests passed{taken} on {results['machine']}."]
    return "\n".join(rows)


def told_counts(counts: dict[str, int]) -> str:
    """Counts of one thing in several groups, `dpo: kills` and `sft: kills`, as their sum and the groups behind it."""
    by_what: dict[str, dict[str, int]] = defaultdict(dict)
    for name, value in counts.items():
        group, _, what = name.rpartition(": ")
        by_what[what][group] = value
    told = []
    for what, groups in sorted(by_what.items()):
        values = set(groups.values())
        if list(groups) == [""]:
            behind = ""
        elif len(values) == 1:
            behind = f" ({', '.join(groups)}: {values.pop():,} each)" if len(groups) > 1 else f" ({next(iter(groups))})"
        else:
            behind = f" ({', '.join(f'{group} {value:,}' for group, value in groups.items())})"
        told.append(f"{what}: {sum(groups.values()):,}{behind}")
    return "; ".join(told)


def told_cost(saving: dict[str, Any] | None) -> str:
    """What saving was measured to cost."""
    if saving is None:
        return "not measured"
    cost, share = saving["saving"], saving["saving"]["share"]
    step = statistics.median(cost["seconds_without"])
    return (
        f"{share['median']:.2%} of step time ({share['low']:.2%} to {share['high']:.2%} in"
        f" {len(cost['seconds_with'])} rounds), {statistics.median(cost['still_share']):.2%} standing still,"
        f" a save every {cost['every']} steps of {1000 * step:.0f} ms;"
        f" {where(saving)}"
    )


def told_signals(saving: dict[str, Any] | None) -> str:
    """How soon signals were measured to end a run."""
    if saving is None:
        return "not measured"
    told = [
        f"{name}: {statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f}, {len(taken)} times)"
        for name, taken in saving["signal_seconds"].items()
    ]
    return f"{'; '.join(told)}; {where(saving)}"


def where(saving: dict[str, Any]) -> str:
    """On what it was measured."""
    machine = saving["machine"]
    device = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    return f"{saving['model']} on {machine['cores']} cores, {device}, {saving['date']}"


def render(page: str, results: dict[str, Any], saving: dict[str, Any] | None) -> str:
    """The page with its table made anew. saving: the record of benchmarks/saving.py; None: not measured yet."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(results, saving)}\n{END}{rest.partition(END)[2]}"


def newest(name: str) -> dict[str, Any] | None:
    """The newest record of that name, if there is one."""
    found = sorted((ROOT / "results").glob(f"{name}_*.json"))
    return dict(read_json(found[-1])) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files of tests, such as kills; none means all")
    parser.add_argument("--usual", action="store_true", help="the counts of `make test` instead of the large ones")
    parser.add_argument("--workers", type=int, default=2, help="files at a time")
    parser.add_argument("--fresh", action="store_true", help="also those files that were run today at this commit")
    parser.add_argument("--render", action="store_true", help="only the page, from the newest results")
    asked = parser.parse_args()
    if not asked.render:
        names = [name for _, name in PROMISES]
        if not asked.usual:
            names = [*deep_elsewhere(), *LONG, *(name for name in names if name not in LONG)]
        run(asked.names or names, asked.workers, not asked.usual, asked.fresh)
    results = newest("reliability")
    if results is None:
        sys.exit("no results yet: run without --render")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), results, newest("saving")), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
