"""A stopped comparison goes on: which of its trials count, and what the record says after each trial."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import atomic_write
from penjing.bench.record import Trial, rounds, summary

Trials = dict[str, dict[str, list[Trial]]]  # by setting and contestant
# Measured anew each time that trials are added: the highest counts, as the machine may have been slowed for a moment.
MEASURED = ("matmul_flops_per_second", "limit_tokens_per_second")
# What may be another then: when, how many trials of whom, who is left out, and what is measured.
MAY_DIFFER = ("date", "options.trials", "options.baselines", "left_out", *(f"machine.{name}" for name in MEASURED))


def read_earlier(file: Path) -> dict[str, Any] | None:
    """The record in `file`, and None if there is no file. Raises UserError for anything else."""
    if not file.exists():
        return None
    wanted = "what `penjing bench train --out` wrote"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("cannot be read", where=file, got=str(error), wanted=wanted) from None
    if not isinstance(found, dict) or not {"method", "options", "spec"} <= found.keys():
        raise UserError("holds no trials", where=file, wanted=wanted)
    return found


def has_trials(record: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) and "trials" in value for key, value in record.items() if key != "options")


def touch(out: Path) -> None:
    """Show that `out` can be written to, and leave what is in it. Raises DiskError."""
    before = out.read_bytes()
    with atomic_write(out) as file:
        file.write(before)


def take_over(trials: Trials, record: Mapping[str, Any], earlier: Mapping[str, Any], ours: Sequence[str]) -> None:
    """Put the trials of `earlier` into `trials`. Raises UserError that names what is different in `record`.

    Baselines may be added; one that has trials is not dropped, since the file would lose them.
    """
    for where, before, now in _differences(json.loads(json.dumps(record)), earlier):
        message = f"the trials in the file are of another comparison: {where}"
        raise UserError(message, where="--resume", got=now, wanted=before, next_step="Name another --out.")
    for name in MEASURED:
        if name in record.get("machine", {}):
            record["machine"][name] = max(record["machine"][name], earlier["machine"].get(name, 0.0))
    for setting, each in trials.items():
        there = earlier.get(setting, {}).get("trials", {})
        if gone := [name for name, done in there.items() if done and name not in each]:
            named = ",".join(sorted({*gone, *each} - set(ours)))
            raise UserError(
                f"would lose the trials of {', '.join(gone)}", where="--resume", wanted=f"--baseline {named}"
            )
        for name, done in each.items():
            done += there.get(name, [])


def _differences(record: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, before, now) of each value that must not be another one and is."""
    for key, value in record.items():
        then = earlier.get(key)
        pairs = [(key, then, value)]
        if isinstance(value, dict) and isinstance(then, dict):
            pairs = [(f"{key}.{name}", then.get(name), value.get(name)) for name in {**value, **then}]
        for where, before, now in pairs:
            is_new = before is None and key == "versions"  # a package that was installed since, for a new baseline
            if before != now and not is_new and where not in MAY_DIFFER and key not in MAY_DIFFER:
                yield where, before, now


def summed(record: Mapping[str, Any], trials: Trials) -> dict[str, Any]:
    """The record with the trials so far, and medians over as many as everyone has."""
    found = dict(record)
    for setting, each in trials.items():
        if any(each.values()):
            found[setting] = {"trials": each}
            if min(map(len, each.values())):
                found[setting]["medians"] = summary(rounds(found, setting), record["options"]["warmup"])
    return found
