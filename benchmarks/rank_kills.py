"""Kill ranks with `kill -9` at random moments, under each strategy, and count how the runs come back.

    python benchmarks/rank_kills.py --seconds 1800 --out results/rank_kills_DATE.json [ddp fsdp2 ...]

A run of the smallest model has `--max-restarts 9` and a checkpoint each step. A random rank is killed ten times: during
training, inside a save, or while the ranks start. Nine times the run has to come back by itself, and the tenth has to
end it within a minute. The same command then finishes it, with the weights of a run that nobody killed. The strategies
take turns until each has `--kills` or the seconds are over. The record is written after each run, and a later call with
the same file goes on with it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from two_machines import SHAPE, steps_done, write_text

from penjing.base.files import read_json, write_json

STRATEGIES = ("ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3")
KILLS_OF_A_RUN, STEPS = 10, 250
STARTING = 0.2  # fraction of the kills while the ranks start
LIMIT = 300.0  # seconds until a run that does not come back is given up


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == launcher:
                found.append(int(status.parent.name))
        except (OSError, ValueError):
            continue
    return sorted(found)


class Clock:
    """Waits, and does not count seconds in which this process itself was stopped: then the ranks were stopped, too."""

    def __init__(self) -> None:
        self.began, self.stopped = time.monotonic(), 0.0

    def sleep(self, seconds: float) -> None:
        before = time.monotonic()
        time.sleep(seconds)
        late = time.monotonic() - before - seconds
        self.stopped += late if late > 1 else 0

    def seconds(self) -> float:
        return time.monotonic() - self.began - self.stopped


def words_of(strategy: str, text: Path) -> tuple[list[str], int]:
    """The command of a run without its folder, and its number of ranks."""
    shape = {**SHAPE, "max_steps": STEPS, "checkpoint.every": 1, "parallel.strategy": strategy}
    if strategy.startswith("zero"):
        shape["optimizer.name"] = "adamw"
    ranks = 4 if strategy == "hsdp" else 2  # two groups of two
    words = ["pretrain", *(f"{name}={value}" for name, value in shape.items()), f"data.train={text}"]
    return [*words, "--nproc-per-node", str(ranks)], ranks


def start(words: list[str], out: Path, log: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "penjing", "train", *words, f"out={out}", *options]
    with open(log, "ab") as stream:
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=stream, stderr=subprocess.STDOUT
        )


def kill_one(launcher: subprocess.Popen[bytes], ranks: int, clock: Clock, dice: random.Random) -> bool:
    """Kill a random rank, once all have been started; returns whether the launcher lived to see it."""
    while len(found := ranks_of(launcher.pid)) < ranks:
        if launcher.poll() is not None:
            return False
        clock.sleep(0.02)
    os.kill(dice.choice(found), signal.SIGKILL)
    return True


def killed_run(words: list[str], ranks: int, folder: Path, kills: int, dice: random.Random) -> dict[str, Any]:
    """One run, killed so often: the seconds of each kill until the next step was logged; of the last, until the end."""
    out, log = folder / "run", folder / "log"
    launcher = start(words, out, log, "--max-restarts", str(kills - 1))
    back: list[dict[str, Any]] = []
    for number in range(kills):
        last, at, clock = number == kills - 1, steps_done(out), Clock()
        starting = dice.random() < STARTING and number > 0 and not last
        while not starting and steps_done(out) <= at and launcher.poll() is None and clock.seconds() < LIMIT:
            clock.sleep(0.02)
        clock.sleep(dice.random() * (4 if starting else 0.5))
        if not kill_one(launcher, ranks, clock, dice):
            return {"kills": back, "ended_early": launcher.returncode}
        at, clock = steps_done(out), Clock()
        while launcher.poll() is None and (last or steps_done(out) <= at) and clock.seconds() < LIMIT:
            clock.sleep(0.05)
        came_back = launcher.poll() is not None if last else steps_done(out) > at
        kind = "ended" if last else "starting" if starting else "training"
        back.append({"kind": kind, "after_step": at, "seconds": round(clock.seconds(), 2), "as_promised": came_back})
        back[-1] |= {"stopped_seconds": round(clock.stopped, 1), "load": round(os.getloadavg()[0], 1)}
        if not came_back:
            launcher.terminate()
            return {"kills": back, "ended_early": launcher.wait()}
    return {"kills": back, "ended_early": None}


def one_run(strategy: str, folder: Path, kills: int, seed: str) -> dict[str, Any]:
    """A killed run, finished by the same command, beside the run that nobody killed."""
    text = folder / "text.txt"
    write_text(text)
    words, ranks = words_of(strategy, text)
    whole = folder / f"{strategy}_whole"
    if not (whole / "outcome.json").is_file():
        code = start(words, whole, folder / "whole_log").wait()
        if code:
            raise SystemExit((folder / "whole_log").read_text())
    own = folder / f"{strategy}_{seed}"
    own.mkdir()
    found = killed_run(words, ranks, own, kills, random.Random(f"{strategy} {seed}"))
    code = start(words, own / "run", own / "log", "--max-restarts", "1").wait()
    paths = (whole / "outcome.json", own / "run" / "outcome.json")
    hashes = [json.loads(path.read_text())["weights_sha256"] if path.is_file() else path for path in paths]
    same = hashes[0] == hashes[1]
    found |= {"strategy": strategy, "seed": seed, "finished": code == 0, "same_bits": same}
    if not same or code or not all(kill["as_promised"] for kill in found["kills"]):
        found["log"] = (own / "log").read_text(errors="replace")[-6000:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", help="none means all")
    parser.add_argument("--kills", type=int, default=40, help="of each strategy")
    parser.add_argument("--of-a-run", type=int, default=KILLS_OF_A_RUN, help="kills of one run")
    parser.add_argument("--seconds", type=float, default=7200, help="no run is begun after these")
    parser.add_argument("--out", type=Path, required=True, help="the record, in JSON")
    parser.add_argument("--folder", type=Path, help="where the runs are; none means a temporary folder")
    asked = parser.parse_args()
    record = read_json(asked.out) if asked.out.is_file() else {"runs": []}
    began = time.monotonic()
    strategies = asked.strategies or list(STRATEGIES)
    if importlib.util.find_spec("deepspeed") is None:
        print("zero1 to zero3 are left out: DeepSpeed is not installed")
        strategies = [name for name in strategies if not name.startswith("zero")]

    def counted(strategy: str) -> int:
        return sum(len(run["kills"]) for run in record["runs"] if run["strategy"] == strategy)

    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        while left := [name for name in strategies if counted(name) < asked.kills]:
            strategy = min(left, key=counted)
            if time.monotonic() - began > asked.seconds:
                break
            kills = min(asked.of_a_run, asked.kills - counted(strategy))
            run = one_run(strategy, folder, max(2, kills), time.strftime("%H%M%S"))
            record["runs"].append(run)
            write_json(asked.out, record)
            seconds = [kill["seconds"] for kill in run["kills"]]
            print(f"{strategy}: {len(seconds)} kills, {seconds}, same bits {run['same_bits']}", flush=True)


if __name__ == "__main__":
    main()
