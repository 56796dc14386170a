"""What saving beside training costs, and how soon a signal ends a run. docs/reliability.md quotes the record.

Run: python benchmarks/saving.py --out results/saving_DATE.json    (on an otherwise idle machine)

Cost: the same training with a checkpoint every so many steps and with none before the last step, in turn. A step's
time is the difference of `seconds` between two lines of the run's own metrics.jsonl: what saving holds training up
counts, and so does what its thread takes from the steps after it; the waited save at the end does not. Of each run the
mean step counts, as only one in so many saves; of the rounds the median and the range. Two runs differ by more than
saving costs unless the machine is quiet; the time in which a run with saves stood still does not depend on that.

Signals: one training, sent a signal at a random instant of a step, timed until its process is gone, and begun again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from compare.table import spread
from compare.trial_process import alternate

from penjing.base.files import write_json
from penjing.base.untrusted import read_lines
from penjing.plan.hardware import environment

WARM_STEPS = 5  # not counted: allocations, caches
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="preset (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=205, help="of each run that is timed (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps from one save to the next (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs with saves, and without (default: %(default)s)")
    parser.add_argument("--signals", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="only to see that it works: the figures mean nothing")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    asked = parser.parse_args(words)
    if asked.quick:
        asked.rows, asked.steps, asked.every, asked.rounds, asked.signals = 4, 25, 5, 2, 1
    if asked.steps < WARM_STEPS + 2 * asked.every:
        parser.error(f"--steps must be at least {WARM_STEPS} + 2 x --every")
    return asked


def command(asked: argparse.Namespace, data: Path, out: Path, steps: int, every: int) -> list[str]:
    settings = [
        f"model={asked.model}", f"data.train={data}", "data.seq_len=256", f"batch.size={asked.rows}",
        f"max_steps={steps}", f"checkpoint.every={every}", "log.every=1", "eval.every=0", "sample.every=0",
        f"out={out}",
    ]  # fmt: skip
    return [sys.executable, "-m", "penjing", "train", "pretrain", *settings]


# --- what saving costs -----------------------------------------------------------------------------------------------


def step_seconds(logged: list[dict[str, Any]]) -> tuple[float, float]:
    """After the first few steps: the mean step, saves in between included; and its share of standing still."""
    counted = [line for line in logged if line["step"] >= WARM_STEPS and "tokens_per_second" in line]
    whole = counted[-1]["seconds"] - counted[0]["seconds"]
    stepping = sum(
        (line["tokens"] - before["tokens"]) / line["tokens_per_second"] for before, line in pairwise(counted)
    )
    return whole / (len(counted) - 1), 1 - stepping / whole


def cost(asked: argparse.Namespace, data: Path, work: Path) -> dict[str, Any]:
    """Mean seconds of a step without and with saves, of each round; and the share that saving adds."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    still = []
    for number in range(asked.rounds):
        for name in alternate(("without", "with"), number):
            out = work / f"{name}-{number}"
            every = asked.every if name == "with" else asked.steps
            run(command(asked, data, out, asked.steps, every))
            seconds, stood = step_seconds(read_lines(out / "metrics.jsonl"))
            found[name].append(seconds)
            still += [stood] if name == "with" else []
            print(f"round {number + 1}: {name} saves {1000 * found[name][-1]:.1f} ms a step", flush=True)
    shares = [more / less - 1 for more, less in zip(found["with"], found["without"], strict=True)]
    return {
        "every": asked.every,
        "seconds_without": found["without"],
        "seconds_with": found["with"],
        "still_share": still,
        "share": spread(shares),
    }


def run(words: list[str]) -> None:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-3000:]}")


# --- how soon a signal ends a run ------------------------------------------------------------------------------------


def signals(asked: argparse.Namespace, data: Path, work: Path) -> dict[str, list[float]]:
    """Seconds from each signal to the end of the process. Exits if one ends otherwise than it should."""
    dice, out = random.Random(1), work / "signals"
    found: dict[str, list[float]] = {name: [] for name in CODES}
    for _ in range(asked.signals):
        for name, code in CODES.items():
            found[name].append(time_signal(asked, data, out, name, code, dice))
            print(f"{name}: {found[name][-1]:.2f} s", flush=True)
    return found


def time_signal(
    asked: argparse.Namespace, data: Path, out: Path, name: str, code: int, dice: random.Random
) -> float:  # fmt: skip
    metrics = out / "metrics.jsonl"
    before = max((line["step"] for line in read_lines(metrics)), default=0)
    process = subprocess.Popen(
        command(asked, data, out, 1_000_000, 1_000_000), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        while len(taken := [line for line in read_lines(metrics) if line["step"] > before]) < 4:
            if process.poll() is not None:
                sys.exit(f"the training ended by itself with {process.returncode}")
            time.sleep(0.01)
        time.sleep(dice.random() * float(taken[-1]["seconds"] - taken[-2]["seconds"]))
        began = time.perf_counter()
        process.send_signal(getattr(signal, name))
        status = process.wait(120)
        seconds = time.perf_counter() - began
    finally:
        process.kill()
        process.wait()
    if status != code:
        sys.exit(f"{name} ended the training with {status}, not {code}")
    return seconds


def main() -> None:
    asked = parse()
    for name in CODES:  # background jobs of a shell ignore some of them, and so do children
        signal.signal(getattr(signal, name), signal.default_int_handler)
    import torch

    from penjing import devices
    from penjing.data import synthetic as toyworld

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        toyworld.write(
            work / "data", seed=1, documents=4000, conversations=1, preferences=1, prompts=1, questions_per_kind=1
        )
        data = work / "data" / "pretrain.jsonl"
        record = {
            **environment(device, devices.of(device).compute_dtype("auto", device)),
            "quick": asked.quick,
            "model": asked.model,
            "tokens_per_step": asked.rows * 256,
            "saving": cost(asked, data, work),
            "signal_seconds": signals(asked, data, work),
        }
    print(json.dumps(record, indent=2))
    if asked.out is not None:
        write_json(asked.out, record)


if __name__ == "__main__":
    main()
