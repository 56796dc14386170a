"""benchmarks/scale.py: speed-ups of the same round, and the trainings that it times."""

from __future__ import annotations

import json

import pytest
import scale as script
from rich.console import Console
from scale import ScaleOptions, measure_scaling
from user_errors import raises_user_error


def test_the_median_speed_up_of_the_rounds_is_recorded(tmp_path, monkeypatch):
    """A machine that is slower in the second round slows all of it."""
    rates = {"single": [100.0, 50.0, 100.0], "ddp": [190.0, 90.0, 150.0]}
    sizes = []

    def rate(words, strategy, ranks, folder):
        sizes.append(next(word for word in words if word.startswith("batch.size=")))
        return rates[strategy].pop(0)

    monkeypatch.setattr(script, "_tokens_per_second", rate)
    options = ScaleOptions(ranks=(1, 2), weak=True, batch_size=4)
    measure_scaling("pretrain", ["data.train=x"], options, tmp_path / "record.json", Console(quiet=True))
    record = json.loads((tmp_path / "record.json").read_text())
    one, two = record["rows"]
    assert (one["ranks"], one["speedup"], two["ranks"]) == (1, 1.0, 2)
    assert two["speedup"] == pytest.approx(1.8) and two["efficiency"] == pytest.approx(0.9)
    assert sizes.count("batch.size=8") == sizes.count("batch.size=4") == 3 and record["machine"] and record["weak"]


def test_a_strategy_that_is_not_there_is_one_line():
    with raises_user_error(where="--strategies", got="fsdp9"):
        ScaleOptions(strategies=("fsdp9",))


def test_ranks_stay_anywhere_where_the_system_pins_nothing(monkeypatch):
    monkeypatch.delattr("os.sched_setaffinity")  # as on macOS
    monkeypatch.delattr("os.sched_getaffinity")
    exec(script.PIN, {})  # noqa: S102  # a script's own lines


@pytest.mark.nightly
def test_two_ranks_are_timed(tmp_path):
    words = ["model=tiny", "batch.size=4", "batch.micro_size=1", "data.seq_len=64"]
    options = ScaleOptions(steps=5, rounds=1, batch_size=4)
    measure_scaling("pretrain", words, options, tmp_path / "record.json", Console(quiet=True))
    assert all(row["speedup"] > 0.2 for row in json.loads((tmp_path / "record.json").read_text())["rows"])
