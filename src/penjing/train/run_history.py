"""Records the predicted and actual cost of a run, for `penjing plan verify` and `penjing plan history`."""

from __future__ import annotations

import time
import warnings
from typing import Any

from penjing import devices
from penjing.base.errors import UserError
from penjing.base.files import write_json
from penjing.kernels.memory_errors import is_out_of_memory
from penjing.plan import prediction_history as history
from penjing.track.run_record import RunRecord
from penjing.train.build import PreparedRun
from penjing.train.signals import Stopped

SPENT = ("training_seconds", "validation_seconds", "checkpoint_seconds", "sample_seconds")


def append_history(prepared: PreparedRun, seconds: float, error: BaseException | None = None) -> None:
    """Add the run's prediction and outcome to the history; for a run that stopped, write ended.json. Never raises."""
    strategy = prepared.context.strategy
    if strategy.rank != 0 or prepared.state.step == prepared.resumed_from:
        return
    record = RunRecord(prepared.folder.path)
    folder = record.folder
    try:
        if error is None:
            folder.ended.unlink(missing_ok=True)
            outcome = record.outcome.raw
        else:
            outcome = _stopped(prepared, seconds, error)
            write_json(folder.ended, outcome)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        history.append(history.entry(str(folder.path.resolve()), now, record.plan.raw, outcome))
    except (OSError, UserError) as failure:  # a full disk or a read-only home must not fail the run
        warnings.warn(f"not in the prediction history: {failure}", stacklevel=2)


def _stopped(prepared: PreparedRun, seconds: float, error: BaseException) -> dict[str, Any]:
    totals, device = prepared.context.meter.totals(), prepared.context.strategy.device
    kind = "out of memory" if is_out_of_memory(error) else "stopped" if isinstance(error, Stopped) else "failed"
    return {
        "ended": "interrupted" if isinstance(error, KeyboardInterrupt) else kind,
        "why": f"{type(error).__name__}: {error}"[:500],
        "steps_done": prepared.state.step,
        "seconds": sum(value or 0.0 for name, value in totals.items() if name in SPENT),
        "this_process_seconds": seconds,
        **totals,
        "peak_memory_bytes": devices.of(device).peak_memory_bytes(device),
        "resumed": prepared.resumed,
    }
