"""Measuring a machine, keeping it, and knowing when it is another one."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from penjing import devices
from penjing.base import config
from penjing.plan import microbenchmarks as measure
from penjing.plan.profile import Profile, ProfileKey, find_profile, profile_of_gpu, save_profile
from penjing.planner.profile import matmul_shapes, print_profile
from penjing.workflows.train import resolve_run

CPU = torch.device("cpu")
KEY = ProfileKey(
    device="NVIDIA GeForce RTX 3090",
    kind="cuda",
    driver="550.1",
    torch="2.13.0",
    power_limit_watts=350.0,
    threads=0,
)
PROFILE = Profile(
    key=KEY,
    created="2026-01-01T00:00:00Z",
    seconds=60.0,
    squares=[
        {"size": 1024, "dtype": "bfloat16", "flops_per_second": 50e12, "spread": 0.01, "seconds": 1.0},
        {"size": 4096, "dtype": "bfloat16", "flops_per_second": 68e12, "spread": 0.01, "seconds": 1.0},
    ],
    shapes=[{"rows": 8, "inner": 16, "outputs": 32, "dtype": "bfloat16", "flops_per_second": 1e12, "spread": 0.0}],
    attention_flops_per_second={"bfloat16": 34e12},
    copy_bytes_per_second=800e9,
    launch_seconds=5e-6,
    context_bytes=500 << 20,
    memory_bytes=24 << 30,
)


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PENJING_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "TRY_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 20)


def test_a_file_with_a_field_of_an_earlier_version_is_read():
    data = asdict(PROFILE)
    assert Profile.from_dict({**data, "key": {**data["key"], "cuda": "12.6"}}) == PROFILE


def test_a_profile_is_saved_and_found_again():
    assert find_profile(KEY) is None
    save_profile(PROFILE)
    assert find_profile(KEY) == (PROFILE, [])
    assert profile_of_gpu("RTX 3090") == PROFILE
    assert profile_of_gpu("RTX 4090") is None


@pytest.mark.parametrize(
    ("device", "gib", "card"),
    [("NVIDIA A100-SXM4-80GB", 79, "A100"), ("NVIDIA A100-SXM4-40GB", 39, "A100 40GB"), ("NVIDIA GB200", 184, "GB200")],
)
def test_a_profile_serves_the_card_that_it_is_of(device, gib, card):
    save_profile(replace(PROFILE, key=replace(PROFILE.key, device=device), memory_bytes=gib << 30))
    assert profile_of_gpu(card).key.device == device
    assert profile_of_gpu("A100 PCIe") is None and profile_of_gpu("B200") is None


def test_a_home_that_cannot_be_searched_has_no_profiles(monkeypatch):
    """Until Python 3.14 `is_file` and `is_dir`, which `glob` asks first, raise there."""
    save_profile(PROFILE)

    def refuse(path, **how):
        raise PermissionError(13, "Permission denied", str(path))

    for ask in ("is_file", "is_dir", "glob"):
        monkeypatch.setattr(Path, ask, lambda path, *words, **how: refuse(path))
    assert find_profile(KEY) is None
    assert profile_of_gpu("RTX 3090") is None


def test_a_stale_key_says_what_changed():
    save_profile(PROFILE)
    found = find_profile(replace(KEY, torch="2.14.0", power_limit_watts=280.0))
    assert found is not None
    assert found[1] == ["torch 2.13.0 -> 2.14.0", "power_limit_watts 350.0 -> 280.0"]


def test_the_machine_of_a_profile():
    machine = PROFILE.machine()
    assert machine.level == "L1"
    assert machine.matmul_flops == {"bfloat16": 68e12}
    assert machine.attention_share == pytest.approx(0.5)
    assert machine.matmul_seconds(8, 16, 32, "bfloat16") == 2 * 8 * 16 * 32 / 1e12
    assert machine.launch_seconds >= 5e-6


def test_a_profile_made_before_attention_was_measured_by_length_is_read():
    known = asdict(PROFILE)
    del known["attentions"]
    assert Profile.from_dict(known) == PROFILE
    assert PROFILE.machine().attention_rate("bfloat16", 100.0) == pytest.approx(34e12)


def test_attention_is_measured_in_each_dtype_and_two_lengths(monkeypatch):
    monkeypatch.setattr(measure, "CPU_LENGTHS", (8, 16))
    found = measure.attentions(CPU, 60.0)
    assert [(one["dtype"], one["keys"]) for one in found] == [
        (dtype, keys) for dtype in ("float32", "bfloat16") for keys in (4.5, 8.5)
    ]
    assert all(1e5 < one["flops_per_second"] < 1e13 for one in found)
    assert [one["keys"] for one in measure.attentions(CPU, 0.0)] == [4.5, 4.5]


def test_what_is_measured_on_a_cpu_is_of_the_right_size():
    one = measure.matmul(64, 64, 64, "float32", CPU, tries=3)
    assert one["flops_per_second"] == pytest.approx(2 * 64**3 / one["seconds"])
    assert 1e7 < one["flops_per_second"] < 1e13
    assert 1e8 < measure.copy_rate(CPU) < 1e13
    assert 1e-6 < measure.launch_seconds(CPU) < 1e-2
    assert devices.of(CPU).context_bytes(CPU) > 50 << 20
    assert measure.all_reduce_rate(CPU) == 0.0
    found = measure.squares(CPU, sizes=(16, 32), dtypes=("float32",), budget_seconds=20)
    assert [(each["size"], each["dtype"]) for each in found] == [(16, "float32"), (32, "float32")]


def test_a_busy_moment_does_not_hide_the_time_of_an_operation(monkeypatch):
    """Passes of one and of five layers in turns; in the second round the machine stalls in the first of them."""
    seconds = iter([1e-3, 5e-3, 50e-3, 5e-3, 1e-3, 5e-3])
    monkeypatch.setattr(measure, "time_call", lambda function, device, tries: (next(seconds), 0.0))
    assert 1e-6 < measure.launch_seconds(CPU) < 4e-3


def test_a_size_that_would_outlast_the_budget_is_left_out():
    found = measure.squares(CPU, sizes=(16, 1 << 20), dtypes=("float32",), budget_seconds=5)
    assert [each["size"] for each in found] == [16]


def test_memory_that_does_not_suffice_ends_a_dtype(monkeypatch):
    def refuse(*given, **named):
        raise RuntimeError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(measure, "matmul", refuse)
    assert measure.squares(CPU, sizes=(16,), dtypes=("float32",)) == []


def test_a_whole_profile_of_this_cpu(capsys):
    run = resolve_run("pretrain", config.parse_overrides(["model=tiny", "data.seq_len=8", "batch.size=2"]))
    shapes = matmul_shapes(run, torch.device("cpu"))
    assert (8, 128, 256) in shapes and (8, 256, 128) in shapes and (8, 128, 2048) in shapes
    assert len(shapes) == len(set(shapes))
    found = measure.measure(CPU, shapes[:2], budget_seconds=2.0)
    assert found.key == measure.profile_key(CPU)
    assert found.key.threads == torch.get_num_threads()
    save_profile(found)
    assert find_profile(measure.profile_key(CPU)) == (found, [])
    assert {one.dtype for one in found.machine().attentions} == {"float32", "bfloat16"}
    print_profile(found, Console(width=120))
    assert "copies" in capsys.readouterr().out
