"""Checkpoints: bit for bit there and back, whole or passed over, and never lost to a kill or a full disk."""

from __future__ import annotations

import copy
import errno
import os
import random
import resource
import shutil

import pytest
import torch

from penjing.base.errors import UserError
from penjing.base.files import DiskError, sha256_file
from penjing.checkpoint import save as save_module
from penjing.checkpoint.load import newest
from penjing.checkpoint.manifest import MANIFEST, damage, folder_name, manifest_text, steps
from penjing.checkpoint.save import save

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "run.toml", MANIFEST)


def write(folder, step, keep=3, size=8):
    """A small checkpoint whose every file depends on the step."""
    weights = {"w": torch.full((size,), float(step))}
    optimizers = [{"state": {0: {"momentum": torch.full((size,), step / 2)}}, "param_groups": [{"lr": 0.1 * step}]}]
    torch.manual_seed(step)
    return save(
        folder,
        step,
        weights=weights,
        optimizers=optimizers,
        state={"source": {"next_row": step}},
        texts={"run.toml": f"seed = {step}\n"},
        keep=keep,
    )


def loaded_step(checkpoint):
    """The step, after checking that every part that was loaded is of that step."""
    step = checkpoint.step
    assert checkpoint.weights()["w"].tolist() == [step] * len(checkpoint.weights()["w"])
    (optimizer,), random_state = checkpoint.optimizers()
    assert set(optimizer["state"][0]["momentum"].tolist()) == {step / 2}
    assert optimizer["param_groups"] == [{"lr": 0.1 * step}]
    assert torch.equal(random_state, torch.Generator().manual_seed(step).get_state())
    assert checkpoint.state()["source"] == {"next_row": step}
    assert (checkpoint.folder / "run.toml").read_text() == f"seed = {step}\n"
    return step


@pytest.fixture
def two(tmp_path):
    """A folder with the checkpoints of steps 9 and 10."""
    write(tmp_path, 9)
    write(tmp_path, 10)
    return tmp_path


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("step-"))


# --- there and back --------------------------------------------------------------------------------------------------


def test_plain_numbers_in_an_optimizer_state_come_back(tmp_path):
    state = {"state": {0: {"step": 7, "m": torch.ones(2)}, 3: {"step": 8}}, "param_groups": [{"betas": [0.9, 0.95]}]}
    save(tmp_path, 1, weights={}, optimizers=[state, copy.deepcopy(state)], state={}, texts={}, keep=1)
    found, _ = newest(tmp_path).optimizers()
    for one in found:
        assert one["param_groups"] == state["param_groups"]
        assert one["state"][0]["step"] == 7
        assert one["state"][3] == {"step": 8}
        assert torch.equal(one["state"][0]["m"], torch.ones(2))


def test_nothing_there_is_none(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100, 123_456_784):
        write(tmp_path, step, keep=9)
    (tmp_path / "step-00000200").write_text("a file, not a folder")
    (tmp_path / "step-abc").mkdir()
    assert steps(tmp_path) == [123_456_784, 100, 10, 9]
    assert loaded_step(newest(tmp_path)) == 123_456_784


def test_the_newest_few_are_kept(tmp_path):
    for step in (1, 2, 9, 10, 11):
        write(tmp_path, step, keep=2)
    assert steps(tmp_path) == [11, 10]
    assert leftovers(tmp_path) == []


def test_damaged_ones_of_later_steps_go_and_never_the_one_just_written(tmp_path):
    for step in (500, 900, 1000):
        write(tmp_path, step)
    for step in (900, 1000):
        (tmp_path / folder_name(step) / "model.safetensors").write_text("")
    assert loaded_step(newest(tmp_path)) == 500
    write(tmp_path, 700, keep=2)
    assert steps(tmp_path) == [700, 500]
    assert loaded_step(newest(tmp_path)) == 700


def test_a_step_may_be_written_again(two):
    write(two, 10)
    assert loaded_step(newest(two)) == 10
    assert steps(two) == [10, 9]


# --- damage ----------------------------------------------------------------------------------------------------------


def assert_falls_back(folder, name):
    checkpoint = newest(folder)
    assert loaded_step(checkpoint) == 9
    (line,) = checkpoint.skipped
    assert line.startswith("step-00000010: ")
    assert name in line


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_found(two, name):
    path = two / folder_name(10) / name
    whole = path.read_bytes()
    generator = random.Random(name)
    for place in generator.sample(range(8 * len(whole)), min(64, 8 * len(whole))):
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        # A hash that is wrong in the manifest is seen as a file that is wrong.
        assert_falls_back(two, "" if name == MANIFEST else name)
    path.write_bytes(whole)
    assert loaded_step(newest(two)) == 10


def test_a_whole_checkpoint_under_another_step_s_name_is_found(two):
    shutil.rmtree(two / folder_name(10))
    shutil.copytree(two / folder_name(9), two / folder_name(10))
    assert_falls_back(two, f"{MANIFEST} is of step 9")


def test_a_manifest_that_lists_too_little_is_found(two):
    (two / folder_name(10) / "model.safetensors").unlink()
    (two / folder_name(10) / MANIFEST).unlink()
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in (two / folder_name(10)).iterdir()
    }
    (two / folder_name(10) / MANIFEST).write_text(manifest_text({"step": 10}, files))
    assert_falls_back(two, "does not list model.safetensors")


@pytest.mark.parametrize("text", ["[]", "null", "3", '{"format": 1, "step": "10", "files": {}}', '{"format": 2}', "{}"])
def test_a_manifest_of_another_form_is_found(two, text):
    (two / folder_name(10) / MANIFEST).write_text(text)
    assert_falls_back(two, MANIFEST)


def test_a_file_that_cannot_be_read_is_found(two, monkeypatch):
    def bad_block(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("penjing.checkpoint.manifest.sha256_file", bad_block)
    assert "Input/output error" in damage(two / folder_name(10))


def test_all_damaged_is_an_error_and_never_a_fresh_start(two):
    (two / folder_name(9) / "state.json").write_text("{}")
    (two / folder_name(10) / "model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        newest(two)
    line = str(caught.value)
    assert "every checkpoint is damaged" in line
    assert "step-00000010: model.safetensors is missing" in line
    assert "step-00000009: state.json has" in line


# --- kills and full disks --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for kill -9: once raised, no later step of the writer has any effect."""


OPERATIONS = [
    (os, "open"),
    (os, "write"),
    (os, "fsync"),
    (os, "rename"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "mkdir"),
    (save_module.shutil, "rmtree"),
]


def break_operations(monkeypatch, operations, fails):
    """Count the calls of `operations`; `fails(number, name)` may raise instead of the call. Returns the counter."""
    counted = []

    def wrap(owner, name):
        original = getattr(owner, name)

        def call(*args, **options):
            counted.append(name)
            fails(len(counted), name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in operations:
        wrap(owner, name)
    return counted


def count_operations(monkeypatch, folder, operations, **options):
    with monkeypatch.context() as patch:
        counted = break_operations(patch, operations, lambda number, name: None)
        write(folder, 11, **options)
    return len(counted)


@pytest.mark.parametrize("case", ["new step", "over a damaged one"])
def test_a_kill_between_any_two_operations_leaves_a_whole_checkpoint(tmp_path, monkeypatch, case):
    template = tmp_path / "template"
    for step in (8, 9, 10):
        write(template, step)
    if case == "over a damaged one":
        write(template, 11)
        (template / folder_name(11) / "state.json").write_text("")

    def begin(name):
        return shutil.copytree(template, tmp_path / name)

    total = count_operations(monkeypatch, begin("count"), OPERATIONS)
    assert total > 15
    found = []
    for deadly in range(1, total + 1):
        folder = begin(str(deadly))

        def die(number, name, deadly=deadly):
            if number >= deadly:
                raise Killed

        with monkeypatch.context() as patch:
            break_operations(patch, OPERATIONS, die)
            with pytest.raises(Killed):
                write(folder, 11)
        found.append(loaded_step(newest(folder)))
        write(folder, 12)
        assert loaded_step(newest(folder)) == 12
        assert leftovers(folder) == [], "what the kill left is removed by the next save"
    assert set(found) == {10, 11}
    assert found == sorted(found)


def disk_full(path="somewhere"):
    return OSError(errno.ENOSPC, "No space left on device", path)


def test_a_full_disk_at_any_operation_is_one_line_and_costs_nothing(tmp_path, monkeypatch):
    writing = [operation for operation in OPERATIONS if operation[1] not in ("open", "unlink", "rmdir", "rmtree")]
    write(tmp_path / "count", 10)
    total = count_operations(monkeypatch, tmp_path / "count", writing)
    for failing in range(1, total):  # the last is the fsync after the rename: the new one is there by then
        folder = tmp_path / str(failing)
        write(folder, 10)

        def fill(number, name, failing=failing):
            if number >= failing:
                raise disk_full()

        with monkeypatch.context() as patch:
            counted = break_operations(patch, writing, fill)
            with pytest.raises(DiskError):
                write(folder, 11)
        assert loaded_step(newest(folder)) == 10, counted
        assert leftovers(folder) == [], counted
        assert steps(folder) == [10]


def test_a_real_limit_on_the_disk(two):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DiskError):
            write(two, 11, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert loaded_step(newest(two)) == 10
    assert leftovers(two) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(DiskError):
        write(tmp_path / "taken", 1)


def test_a_state_that_is_not_json_leaves_nothing_behind(two):
    with pytest.raises(ValueError, match="JSON"):
        save(two, 11, weights={}, optimizers=[], state={"loss": float("nan")}, texts={}, keep=3)
    assert leftovers(two) == []
    assert loaded_step(newest(two)) == 10
