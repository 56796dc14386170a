"""Laps against a hand-computed case, and a spec that survives its file."""

import json
from dataclasses import asdict

import pytest

from penjing.bench.meter import Laps, Spec, peak_resident_bytes, read_spec, units_per_second


def test_a_lap_lasts_from_the_end_of_the_one_before():
    times, cpu = iter([10.0, 11.0, 13.0, 13.5]), iter([1.0, 1.5, 3.0, 3.25])
    laps = Laps(clock=lambda: next(times), cpu_clock=lambda: next(cpu))
    laps.begin()
    for loss in (0.3, 0.2, 0.1):
        laps.lap({"loss": loss})
    result = laps.result(options=["plain"])
    assert result["step_seconds"] == [1.0, 2.0, 0.5]
    assert result["step_cpu_seconds"] == [0.5, 1.5, 0.25]
    assert [figures["loss"] for figures in result["figures"]] == [0.3, 0.2, 0.1]
    assert result["options"] == ["plain"]


def test_units_per_second_leaves_warm_up_out():
    assert units_per_second({"step_seconds": [9.0, 2.0, 0.5]}, batch=5, warmup=1) == pytest.approx(10 / 2.5)


def test_peak_is_that_of_this_process():
    before = peak_resident_bytes()
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_resident_bytes() >= before
    assert peak_resident_bytes() > len(block)


def test_a_spec_is_read_back_as_it_was(spec, tmp_path, monkeypatch):
    (tmp_path / "spec.json").write_text(json.dumps(asdict(spec)))
    monkeypatch.setattr("sys.argv", ["trial", str(tmp_path / "spec.json")])
    assert read_spec(Spec) == spec
