"""How many steps the quickstart's stages take on the toy world: fewer where the machine is slow or busy.

Questions right, of 640, in % (one seed; docs/log.md), after pretraining and SFT of so many steps: 85 after 1,300 and
4,000, 80 after 900 and 4,000, 77 after 1,300 and 1,600, 76 after 900 and 1,600, 62 after 1,300 and 1,000.
"""

from pathlib import Path

from penjing.recipes.quickstart_configs import SFT_STEPS
from penjing.track.run_record import RunRecord
from penjing.train.config import Run
from penjing.train.shape_timing import StepTimer
from penjing.workflows.stage_log import StageLog
from penjing.workflows.train import resolve_run

PRETRAIN_SECONDS = 220.0  # for the steps of pretraining
MIN_PRETRAIN_STEPS, MIN_SFT_STEPS = 900, 1600


def pretrain_steps(run: Run, log: StageLog) -> int:
    """As many of the run's steps as fit PRETRAIN_SECONDS at the pace of a few steps timed here, in hundreds, within
    limits. A quickstart that continues keeps its number."""
    if "pretrain_steps" not in log.facts:
        row_seconds, update_seconds = StepTimer().time_step(run)
        fitting = PRETRAIN_SECONDS / (row_seconds * run.batch.size + update_seconds)
        log.record(pretrain_steps=_limited(fitting, MIN_PRETRAIN_STEPS, run.max_steps))
    return int(log.facts["pretrain_steps"])


def sft_steps(pretrained: Path, seconds: float, least: int) -> int:
    """As many as fit what is left of `seconds` at the pace of the finished pretraining, in hundreds, within limits. A
    killed quickstart that continues gets the same number, as it follows from outcome.json."""
    outcome, run = RunRecord(pretrained).outcome.raw, resolve_run("tiny_sft")
    step_seconds = outcome["training_seconds"] / outcome["tokens"] * run.batch.size * run.data.seq_len
    return _limited((seconds - outcome["seconds"]) / step_seconds, least, SFT_STEPS)


def _limited(fitting: float, least: int, most: int) -> int:
    return min(most, max(least, int(fitting) // 100 * 100))
