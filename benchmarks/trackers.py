"""What trackers cost a training: one run in which they are on and off in turn, five seconds each.

Run: python benchmarks/trackers.py --out results/trackers.json train tiny data.train=FILE max_steps=5000 log.every=10 \
    log.trackers=wandb,swanlab,tensorboard,trackio,mlflow eval.every=0 sample.every=0 checkpoint.every=100000

While they are off, the trackers' process is stopped and gets no rows. Blocks come as on, off, off, on; each such four
gives one quotient of the times of a step. Start, end and the first steps are not measured.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from penjing.base.files import write_json
from penjing.cli import main as penjing
from penjing.devices import HOST
from penjing.plan.hardware import environment
from penjing.track.process import TrackerProcess
from penjing.train import loop

SKIPPED_STEPS, BLOCK_SECONDS = 150, 5.0


class Switch:
    """Turns the trackers off and on between steps, and times what is in between."""

    def __init__(self) -> None:
        self.on, self.steps, self.since = True, 0, 0.0
        self.blocks: list[tuple[bool, int, float]] = []  # on, steps, seconds
        self.processes: list[TrackerProcess] = []
        self.dtype = torch.float32  # of the model's matmuls
        self.make, self.call, self.step = TrackerProcess.__init__, TrackerProcess._call_all, loop.step

    def install(self) -> None:
        def make(process: Any, *arguments: Any) -> None:
            self.make(process, *arguments)
            self.processes.append(process)

        def call(process: Any, method: str, *arguments: Any) -> None:
            if method == "end":
                self.turn(on=True)
            if self.on or method != "log":
                self.call(process, method, *arguments)

        def step(context: loop.TrainingContext, index: int) -> loop.Step:
            self.dtype = getattr(context.model, "compute_dtype", None) or torch.float32
            if index >= SKIPPED_STEPS:
                self.tick()
            return self.step(context, index)

        watched: Any = TrackerProcess
        watched.__init__, watched._call_all, loop.step = make, call, step

    def tick(self) -> None:
        now = time.perf_counter()
        if self.since and now - self.since < BLOCK_SECONDS:
            self.steps += 1
            return
        if self.since:
            self.blocks.append((self.on, self.steps + 1, now - self.since))
            self.turn(on=len(self.blocks) % 4 in (0, 3))
        self.steps, self.since = 0, time.perf_counter()

    def turn(self, *, on: bool) -> None:
        if on != self.on:
            for process in self.processes:
                os.killpg(process._process.pid, signal.SIGCONT if on else signal.SIGSTOP)
        self.on = on


def step_seconds(blocks: list[tuple[bool, int, float]], *, on: bool) -> float:
    chosen = [(steps, seconds) for was_on, steps, seconds in blocks if was_on == on]
    return sum(seconds for _, seconds in chosen) / sum(steps for steps, _ in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the record")
    asked, command = parser.parse_known_args()
    switch = Switch()
    switch.install()
    sys.argv = ["penjing", *command]
    try:
        penjing()
    except SystemExit as end:
        if end.code:
            raise
    fours = [switch.blocks[first : first + 4] for first in range(0, len(switch.blocks) - 3, 4)]
    if len(fours) < 2:
        parser.error(f"the training was too short: it takes {8 * BLOCK_SECONDS:g} s after step {SKIPPED_STEPS}")
    extra = [step_seconds(four, on=True) / step_seconds(four, on=False) - 1 for four in fours]
    mean, error = statistics.mean(extra), statistics.stdev(extra) / math.sqrt(len(extra))
    print(f"with trackers {mean:+.2%} a step, standard error {error:.2%}")
    if asked.out:
        record = {
            "command": " ".join(command),
            **environment(HOST, switch.dtype),
            "step_seconds": {name: step_seconds(switch.blocks, on=name == "on") for name in ("on", "off")},
            "extra": {"mean": mean, "standard error": error, "fours": len(fours)},
            "blocks": switch.blocks,
        }
        write_json(asked.out, record)


if __name__ == "__main__":
    main()
