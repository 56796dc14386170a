"""What is on the disk when a save says that it is done, and before the only other checkpoint goes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from penjing.checkpoint import save as save_module
from penjing.checkpoint.manifest import folder_name, steps
from penjing.checkpoint.save import save


def record(patch):
    """What is asked of the system, in order: ("sync", path), ("rename", old, new), ("remove", path)."""
    log = []
    fsync, rename, rmtree = os.fsync, os.rename, save_module.shutil.rmtree

    def synced(handle):
        log.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(old, new):
        log.append(("rename", str(old), str(new)))
        rename(old, new)

    def removed(path, ignore_errors=False):
        log.append(("remove", str(path)))
        rmtree(path, ignore_errors=ignore_errors)

    patch.setattr(os, "fsync", synced)
    patch.setattr(os, "rename", renamed)
    patch.setattr(save_module.shutil, "rmtree", removed)
    return log


def write(folder, step, **more):
    how = {"optimizers": [], "state": {}, "texts": {"run.toml": "seed = 1\n"}, "keep": 1, **more}
    save(folder, step, weights={"w": torch.ones(3)}, **how)


def test_everything_is_synced_before_it_counts_and_nothing_goes_before_that(tmp_path, monkeypatch):
    """With keep=1 the one before is the only one there is, and a power cut may forget whatever was not synced: the
    files, the names in the new folder, and the new folder's own name."""
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        log = record(patch)
        write(tmp_path, 2)
    final = tmp_path / folder_name(2)
    partial = tmp_path / f".{final.name}.partial"
    at = log.index(("rename", str(partial), str(final)))
    synced_before = {entry[1] for entry in log[:at] if entry[0] == "sync"}
    files = {path.name for path in final.iterdir()}
    assert files >= {"model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json", "run.toml"}
    assert synced_before >= {str(partial), *(str(partial / name) for name in files)}
    last_file = max(log.index(("sync", str(partial / name))) for name in files)
    assert last_file < log.index(("sync", str(partial)))
    gone = log.index(("remove", str(tmp_path / folder_name(1))))
    assert at < log.index(("sync", str(tmp_path))) < gone
    assert steps(Path(tmp_path)) == [2]


def test_milestones_stay_and_what_is_older_than_the_newest_goes(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step, stays=lambda step: step % 2 == 0)
    assert steps(tmp_path) == [5, 4, 2]
    write(tmp_path, 6, stays=lambda step: step % 2 == 0, keep=2)
    assert steps(tmp_path) == [6, 5, 4, 2]
    write(tmp_path, 3, stays=lambda step: step % 2 == 0)  # taken up from it: later ones were damaged
    assert steps(tmp_path) == [3, 2]
