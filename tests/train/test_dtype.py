"""`compute.dtype=auto` is a fact of the machine, and of a run: no load and no moment changes what is computed in."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from penjing import devices
from penjing.base.config import parse_overrides, read_toml
from penjing.base.errors import UserError
from penjing.devices import fast_bfloat16
from penjing.devices.cpu import Cpu
from penjing.train.config import ComputeSettings
from penjing.train.precision import Precision
from penjing.workflows.train import execute, resolve_run

QUIET = Console(quiet=True)
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make this processor one with other units, whose measured ratios are given; returns how many were taken."""

    def become(units, ratios=(), library=True):
        taken = iter(ratios)
        monkeypatch.setenv("PENJING_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.setattr(fast_bfloat16, "cpu_units", lambda: frozenset(units))
        monkeypatch.setattr(fast_bfloat16, "_onednn_supports_bfloat16", lambda: library)
        monkeypatch.setattr(fast_bfloat16, "speed_ratio", lambda: next(taken))
        fast_bfloat16._cached_ratio.cache_clear()

    yield become
    fast_bfloat16._cached_ratio.cache_clear()


@pytest.mark.parametrize(
    ("units", "fast"),
    [
        ({"avx2", "fma3"}, False),
        ({"avx2", "avx512_f", "avx512_vnni"}, False),
        ({"avx512_f", "avx512_bf16", "amx_tile", "amx_bf16"}, True),
        ({"neon", "fp16_arith"}, False),
        (set(), False),
    ],
)
def test_what_the_processor_has_decides_without_a_clock(units, fast, machine):
    machine(units)  # a measurement would raise StopIteration
    wanted = torch.bfloat16 if fast else torch.float32
    assert devices.of(CPU).compute_dtype("auto", CPU) == wanted


def test_units_that_the_library_does_not_use_count_for_nothing(machine, monkeypatch):
    machine({"avx512_bf16"}, library=False)
    assert devices.of(CPU).compute_dtype("auto", CPU) == torch.float32
    machine({"avx512_bf16"})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert devices.of(CPU).compute_dtype("auto", CPU) == torch.float32


@pytest.mark.parametrize("unit", ["bf16", "avx512_bf16"])
def test_where_it_is_measured_the_first_answer_stays(machine, tmp_path, unit):
    machine({unit}, [3.0])
    assert devices.of(CPU).compute_dtype("auto", CPU) == torch.bfloat16
    saved = json.loads((tmp_path / "home" / fast_bfloat16.RATIOS_FILE).read_text())
    assert list(saved.values()) == [3.0]
    machine({unit}, [0.3])  # a new process, in which a measurement would say otherwise
    assert devices.of(CPU).compute_dtype("auto", CPU) == torch.bfloat16
    machine({unit, "sve"}, [0.3])  # another processor
    assert devices.of(CPU).compute_dtype("auto", CPU) == torch.float32


def test_a_home_that_cannot_keep_it_is_no_error(machine, tmp_path):
    (tmp_path / "home").write_text("a file")
    machine({"bf16"}, [3.0])
    assert devices.of(CPU).compute_dtype("auto", CPU) == torch.bfloat16


def test_a_home_that_cannot_be_searched_is_no_error(machine, monkeypatch):
    """Until Python 3.14 `is_file` raises there. (An administrator, as which tests may run, can search any folder.)"""

    def refuse(path, **how):
        raise PermissionError(13, "Permission denied", str(path))

    machine({"bf16"}, [3.0])
    monkeypatch.setattr(Path, "is_file", refuse)
    assert devices.of(CPU).compute_dtype("auto", CPU) == torch.bfloat16


def test_the_measured_ratio_is_that_of_cpu_time(monkeypatch):
    """A pair in which the processor is ten times as slow counts for no more than any other."""
    slow = iter([10.0, 1.0, 1.0] * fast_bfloat16.NUM_PAIRS)
    clock = [0.0]

    def seconds(left, right):
        each = 4.0 if left.dtype == torch.float32 else 2.0
        clock[0] = each * next(slow)
        return clock[0]

    monkeypatch.setattr(fast_bfloat16, "_cpu_seconds", seconds)
    assert fast_bfloat16.speed_ratio() == 2.0


def _fast(monkeypatch, answer):
    monkeypatch.setattr(Cpu, "has_fast_bfloat16", lambda self, device, capability=None: answer)


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_goes_on_in_what_it_was_begun_in(tmp_path, monkeypatch, small_run, outcome, begun):
    """Stopped half way and continued where `auto` would come out differently, it ends in the same bits."""
    words = [word for word in small_run if not word.startswith(("compute.dtype", "max_steps"))]
    words += ["max_steps=4", "checkpoint.every=2", "eval.every=0", "eval.sequences=2", "batch.size=2"]
    folder = tmp_path / "run"
    run = resolve_run("pretrain", parse_overrides([*words, f"out={folder}"]))
    _fast(monkeypatch, begun)
    execute(run, QUIET)
    name = "bfloat16" if begun else "float32"
    whole = outcome(folder)["weights_sha256"]
    assert read_toml(folder / "run.toml")["compute"]["dtype"] == name
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    (folder / "outcome.json").unlink()
    _fast(monkeypatch, not begun)
    execute(run, QUIET)
    assert outcome(folder)["resumed"] == 1
    assert outcome(folder)["weights_sha256"] == whole
    assert read_toml(folder / "run.toml")["compute"]["dtype"] == name
    other = "float32" if begun else "bfloat16"
    asked = resolve_run("pretrain", parse_overrides([*words, f"out={folder}", f"compute.dtype={other}"]))
    with pytest.raises(UserError, match="precision"):
        execute(asked, QUIET)


def test_every_rank_takes_the_answer_of_the_first(monkeypatch):
    _fast(monkeypatch, True)
    for asked, taken in (("auto", "float32"), ("bfloat16", "bfloat16")):
        found = Precision.resolve(ComputeSettings(dtype=asked), CPU, agree=lambda own: "float32")
        assert found.matmul == taken
