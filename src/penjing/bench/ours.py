"""A trial of our own: `python -m penjing.bench.ours SPEC.json`. The parts and the loop of `penjing train`.

Left out of the steps, and in the time of the whole process: the probe before step 1. Left out altogether, here as of
the peers: validation and checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from penjing.base import config
from penjing.bench.meter import Laps, Spec, read_spec
from penjing.parallel.base import make_strategy
from penjing.train.build import prepare_run
from penjing.train.build_context import RunHooks
from penjing.train.config import Run
from penjing.train.loop import train
from penjing.train.run_dir import set_threads

# What a trial shows of each step, by the name that all trainers' figures get.
FIGURES = {
    "dpo": {"loss": "preference_loss", "accuracy": "reward_accuracy", "margin": "reward_margin"},
    "grpo": {"reward": "reward", "answer_tokens": "answer_tokens", "sampling_seconds": "rollout_seconds"},
}


class LapTracker:
    """The loop logs after each step, and that is where a lap ends."""

    def __init__(self, laps: Laps, names: Mapping[str, str]) -> None:
        self.laps, self.names = laps, names

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.laps.lap({name: figures[theirs] for name, theirs in self.names.items()})

    def close(self) -> None:
        pass


def main() -> None:
    spec, laps = read_spec(Spec), Laps()
    laps.imported()
    set_threads(spec.threads, 1)
    run = replace(config.resolve(Run, config.read_toml(Path(spec.run))), out=spec.out)
    prepared = prepare_run(
        run,
        make_strategy("cpu"),
        RunHooks(trackers=lambda fitted, steps, start: [LapTracker(laps, FIGURES[spec.method])]),
    )
    laps.begin()
    train(replace(prepared.context, validate_every=0, save_every=0, sample_every=0, log_every=1), prepared.state)
    prepared.context.source.close()
    options = [f"batch.micro_rows={run.batch.micro_rows}", f"compute.dtype={run.compute.dtype}"]
    if run.objective.kind == "preference":
        options.append(f"objective.reference={run.objective.reference}")
    print(json.dumps(laps.result(options=options)))


if __name__ == "__main__":
    main()
