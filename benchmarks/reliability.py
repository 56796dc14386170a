"""Run the reliability tests, keep what they counted under results/, and render docs/reliability.md from it.

python benchmarks/reliability.py              # CI counts
python benchmarks/reliability.py --nightly    # and ten times as many of those drawn by chance
python benchmarks/reliability.py --render     # only the page, from the newest results

What is measured, and not counted, is a row of the same table: benchmarks/saving.py.
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
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "reliability"
PAGE = ROOT / "docs" / "reliability.md"
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
    ("A loss or gradient that is no number costs one step; many in a row go back; spikes are written down"
     " with their samples", "bad_steps"),
    ("Out of memory means smaller passes over the same rows", "memory"),
    ("A full disk and a tracker that hangs change nothing", "disk_and_trackers"),
    ("A rank that dies, hangs or fails ends the run within a minute and is named", "ranks"),
    ("Broken data of every kind is set aside and every record accounted for", "data"),
    ("Files from strangers run nothing and cost no more than they should", "untrusted"),
    ("What users type never becomes a control token", "control_tokens"),
    ("A checkpoint that forgot any one part of the state would be noticed", "mutations"),
    ("`penjing doctor RUN` says what is sound and from where it continues", "doctor"),
)  # fmt: skip


def run(names: list[str], workers: int, nightly: bool) -> dict[str, Any]:
    """Run files of tests, so many at a time; {file: what came of it}. Exits if one fails."""
    with ThreadPoolExecutor(workers) as pool:
        done = dict(zip(names, pool.map(lambda name: run_file(name, nightly), names), strict=True))
    failed = [name for name, facts in done.items() if facts is None]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    return done


def run_file(name: str, nightly: bool) -> dict[str, Any] | None:
    """Run one file of tests: how many passed, and what they counted; None if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        counts, report = Path(folder) / "counts.jsonl", Path(folder) / "report.xml"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PENJING_RELIABILITY_COUNTS": str(counts),
        }
        which = ["-m", "nightly or not nightly"] if nightly else []
        command = [sys.executable, "-m", "pytest", "-q", *which, f"--junitxml={report}", str(TESTS / f"test_{name}.py")]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        print(f"{name}: {done.stdout.strip().splitlines()[-1]}", flush=True)
        if done.returncode:
            print(done.stdout[-6000:], flush=True)
            return None
        suite = report.read_text(encoding="utf-8").split("<testsuite ")[1].split(">")[0]
        facts = dict(part.split('="') for part in suite.split('" ') if '="' in part)
        lines = counts.read_text(encoding="utf-8").splitlines() if counts.exists() else []
        return {
            "passed": int(facts["tests"]) - int(facts["skipped"]),
            "nightly": nightly,
            "counts": summed([json.loads(line) for line in lines]),
        }


def summed(lines: list[dict[str, Any]]) -> dict[str, int]:
    """{what: how many}, the cases of a test added up."""
    found: dict[str, int] = defaultdict(int)
    for line in lines:
        found[line["name"]] += line["value"]
    return dict(sorted(found.items()))


def table(results: dict[str, Any], saving: dict[str, Any] | None) -> str:
    """The promises, each with its tests and what they counted or what was measured, in Markdown."""
    rows = ["| Promise | Tests | Counted |", "|---|---|---|"]
    for promise, name in PROMISES:
        file = f"[test_{name}.py](../tests/reliability/test_{name}.py)"
        facts = results["files"].get(name)
        if facts is None:
            rows.append(f"| {promise} | {file} | not counted |")
            continue
        rows.append(f"| {promise} | {file}, {facts['passed']} passed | {told_counts(facts['counts']) or '-'} |")
    measured = {
        "What saving beside training costs; the goal is 1 % of step time": told_cost(saving),
        "How soon Ctrl-C, kill and a closed terminal end a run; the goal is 5 s": told_signals(saving),
    }
    rows += [f"| {what} | [saving.py](../benchmarks/saving.py) | {told} |" for what, told in measured.items()]
    passed = sum(facts["passed"] for facts in results["files"].values())
    taken = f" in {results['seconds'] / 60:.0f} minutes on {results['machine']}" if "seconds" in results else ""
    rows += ["", f"Counted on {results['date']}: {passed:,} tests passed{taken}."]
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
        f"{share['median']:.2%} of step time ({share['lowest']:.2%} to {share['highest']:.2%} in"
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


def newest() -> dict[str, Any]:
    """The newest results."""
    found = sorted((ROOT / "results").glob("reliability_*.json"))
    if not found:
        sys.exit("no results yet: run without --render")
    loaded: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))
    return loaded


def newest_saving() -> dict[str, Any] | None:
    """The newest record of benchmarks/saving.py, if there is one."""
    found = sorted((ROOT / "results").glob("saving_*.json"))
    loaded: dict[str, Any] | None = json.loads(found[-1].read_text(encoding="utf-8")) if found else None
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files of tests, such as kills; none means all")
    parser.add_argument("--nightly", action="store_true", help="and ten times as many cases of those drawn by chance")
    parser.add_argument("--workers", type=int, default=2, help="files at a time")
    parser.add_argument("--render", action="store_true", help="only the page, from the newest results")
    asked = parser.parse_args()
    if not asked.render:
        began = time.monotonic()
        done = run(asked.names or [name for _, name in PROMISES], asked.workers, asked.nightly)
        date = time.strftime("%Y-%m-%d")
        path = ROOT / "results" / f"reliability_{date}.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"files": {}}
        seconds = {"seconds": known["seconds"]} if "seconds" in known else {}  # of the last run of them all
        if not asked.names and not asked.nightly:
            seconds = {"seconds": time.monotonic() - began}
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        results = {
            "date": date,
            "machine": machine,
            **seconds,
            "files": dict(sorted({**known["files"], **done}.items())),
        }
        path.write_text(json.dumps(results, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        print(path)
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), newest(), newest_saving()), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
