"""Continue a stopped comparison: check and merge its trials, and summarise after each trial."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compare.figures import Trial, complete_rounds, summary
from penjing.base.errors import UserError
from penjing.base.files import atomic_write

Trials = dict[str, dict[str, list[Trial]]]  # by setting and contestant
# Measured again whenever trials are added; the maximum counts, as the machine may have been slow for a moment.
MEASURED = ("matmul_flops_per_second", "limit_tokens_per_second")
# Fields that may differ: the date, the number of trials, the baselines, and measurements.
MAY_DIFFER = ("date", "options.trials", "options.baselines", "left_out", *(f"machine.{name}" for name in MEASURED))


def read_earlier(file: Path) -> dict[str, Any] | None:
    """The record in `file`, None if there is no file. Raises UserError for other content."""
    if not file.exists():
        return None
    expected = "what a comparison with --out wrote"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("cannot be read", where=file, got=str(error), wanted=expected) from None
    if not isinstance(record, dict) or not {"method", "options", "spec"} <= record.keys():
        raise UserError("holds no trials", where=file, wanted=expected)
    return record


def has_trials(record: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) and "trials" in value for key, value in record.items() if key != "options")


def check_writable(out: Path) -> None:
    """Check that `out` is writable without changing its content. Raises DiskError."""
    content = out.read_bytes()
    with atomic_write(out) as file:
        file.write(content)


def merge_trials(trials: Trials, record: Mapping[str, Any], earlier: Mapping[str, Any], ours: Sequence[str]) -> None:
    """Add the trials of `earlier` to `trials`. Raises UserError that names the difference if `record` does not match.

    Baselines may be added, but one with trials must not be dropped: the file would lose them.
    """
    for where, before, now in _differences(json.loads(json.dumps(record)), earlier):
        message = f"the trials in the file are of another comparison: {where}"
        raise UserError(message, where="--resume", got=now, wanted=before, next_step="Name another --out.")
    for name in MEASURED:
        if name in record.get("machine", {}):
            record["machine"][name] = max(record["machine"][name], earlier["machine"].get(name, 0.0))
    for setting, contestants in trials.items():
        earlier_trials = earlier.get(setting, {}).get("trials", {})
        if lost := [name for name, done in earlier_trials.items() if done and name not in contestants]:
            baselines = ",".join(sorted({*lost, *contestants} - set(ours)))
            raise UserError(
                f"would lose the trials of {', '.join(lost)}", where="--resume", wanted=f"--baseline {baselines}"
            )
        for name, done in contestants.items():
            done += earlier_trials.get(name, [])


def _differences(record: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, before, now) of each value that changed but must not."""
    for key, value in record.items():
        earlier_value = earlier.get(key)
        pairs = [(key, earlier_value, value)]
        if isinstance(value, dict) and isinstance(earlier_value, dict):
            pairs = [(f"{key}.{name}", earlier_value.get(name), value.get(name)) for name in {**value, **earlier_value}]
        for where, before, now in pairs:
            is_new = before is None and key == "versions"  # a package installed since, for a new baseline
            if before != now and not is_new and where not in MAY_DIFFER and key not in MAY_DIFFER:
                yield where, before, now


def with_medians(record: Mapping[str, Any], trials: Trials) -> dict[str, Any]:
    """The record with the trials so far, and medians over complete rounds."""
    result = dict(record)
    for setting, contestants in trials.items():
        if any(contestants.values()):
            result[setting] = {"trials": contestants}
            if min(map(len, contestants.values())):
                result[setting]["medians"] = summary(complete_rounds(result, setting), record["options"]["warmup"])
    return result
