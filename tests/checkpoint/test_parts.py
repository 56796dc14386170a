"""A checkpoint that several ranks write, each its rows."""

import errno
import shutil
import threading

import pytest
import torch

from penjing.base.errors import UserError
from penjing.base.files import DiskError
from penjing.checkpoint import parts
from penjing.checkpoint.load import newest, weights_sha256
from penjing.checkpoint.manifest import OPTIMIZERS, WEIGHTS, damage
from penjing.checkpoint.parts import SharedFolder
from penjing.checkpoint.save import save

MATRIX_53 = torch.arange(15.0).view(5, 3)
MOMENT_53 = -MATRIX_53
GROUPS = [{"params": [0], "lr": 0.5}]


def write(folder, step, mark="a", ranks=3):
    """Ranks with 2, 2 and 1 rows of a matrix; the first also has a whole vector."""
    shared = [SharedFolder(folder, number, ranks, mark) for number in range(ranks)]
    for rank in shared[1:]:
        rows = slice(2 * rank.number, 2 * rank.number + 2)
        first = rows.start
        files = {f"w@{first}": MATRIX_53[rows]}, {f"0.0.exp_avg@{first}": MOMENT_53[rows]}
        rank.write_aside(step, dict(zip((WEIGHTS, OPTIMIZERS), files, strict=True)))
    state = {0: {"exp_avg@0": MOMENT_53[:2], "step": 3}}
    weights = {"w@0": MATRIX_53[:2], "v": torch.ones(4)}
    optimizers = [{"state": state, "param_groups": GROUPS}]
    return save(shared[0], step, weights=weights, optimizers=optimizers, state={}, texts={}, keep=2)


def test_the_rows_of_all_ranks_are_the_whole(tmp_path):
    folder = write(tmp_path, 4)
    checkpoint = newest(tmp_path)
    assert {path.name for path in folder.glob("model-*")} == {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    weights = checkpoint.weights()
    assert weights.keys() == {"w", "v"}
    assert torch.equal(weights["w"], MATRIX_53)
    assert torch.equal(weights["v"], torch.ones(4))
    seen = []
    (state,), random_state = checkpoint.optimizers(lambda *place: seen.append(place[:2]) or place[2])
    assert seen == [(0, 0)]
    assert torch.equal(state["state"][0]["exp_avg"], MOMENT_53)
    assert state["state"][0]["step"] == 3
    assert random_state.dtype == torch.uint8
    first = weights_sha256(folder)
    assert weights_sha256(write(tmp_path, 5, "b")) == first
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_without_a_ranks_file_is_damaged(tmp_path):
    folder = write(tmp_path, 4)
    manifest = (folder / "MANIFEST.json").read_text()
    (folder / "model-00003-of-00003.safetensors").unlink()
    assert damage(folder) == "model-00003-of-00003.safetensors is missing"
    assert "00003-of-00003" in manifest


def test_missing_rows_are_named(tmp_path):
    folder = write(tmp_path, 4)
    with pytest.raises(UserError, match="rows are missing"):
        parts.JoinedTensors([path for path in sorted(folder.glob("model-*")) if "00002-of" not in path.name])


def test_the_first_rank_does_not_wait_for_one_that_cannot_write(tmp_path, monkeypatch):
    """Nothing incomplete gets the checkpoint's name, and the next checkpoint removes what was left."""
    real = parts.write_file

    def full(path, tensors):
        if "00002-of" in path.name:
            raise OSError(errno.ENOSPC, "full")
        return real(path, tensors)

    monkeypatch.setattr(parts, "write_file", full)
    shared = [SharedFolder(tmp_path, number, 2, "a") for number in range(2)]
    found = []

    def first():
        try:
            save(shared[0], 4, weights={"v": torch.ones(1)}, optimizers=[], state={}, texts={}, keep=1)
        except DiskError as error:
            found.append(error.line())

    thread = threading.Thread(target=first)
    thread.start()
    with pytest.raises(DiskError, match="cannot write"):
        shared[1].write_aside(4, {WEIGHTS: {"w": torch.ones(1)}})
    thread.join(20)
    assert "another rank could not write its part" in found[0]
    assert newest(tmp_path) is None
    monkeypatch.setattr(parts, "write_file", real)
    write(tmp_path, 5, "b", ranks=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_what_a_killed_attempt_left_is_not_taken_for_this_one(tmp_path):
    SharedFolder(tmp_path, 1, 3, "old").write_aside(4, {WEIGHTS: {"w@2": torch.zeros(2, 3)}})
    write(tmp_path, 4)
    assert torch.equal(newest(tmp_path).weights()["w"], MATRIX_53)
    shutil.rmtree(tmp_path / "step-00000004")
    assert not list(tmp_path.iterdir())
