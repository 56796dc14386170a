"""Every call of the system that a save, a rotation or a load makes: ended there, refused there, and forgotten by a
power cut. A whole checkpoint is found after each, and the next save needs no cleaning up."""

import errno
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from reliability_harness import by_chance

from penjing.base.files import DiskError
from penjing.checkpoint import save as save_module
from penjing.checkpoint.background import Background
from penjing.checkpoint.load import newest
from penjing.checkpoint.manifest import folder_name, steps
from penjing.checkpoint.save import save

CHANGES = ("open", "write", "fsync", "rename", "unlink", "rmdir", "mkdir")
READS = ("open", "stat", "scandir", "read")


def write(folder, step, keep=2):
    """A small checkpoint whose every tensor tells its step."""
    return save(
        folder,
        step,
        weights={"w": torch.full((40,), float(step)), "b": torch.full((3,), float(step))},
        optimizers=[{"state": {0: {"momentum": torch.full((40,), step / 2)}}, "param_groups": [{"lr": 0.1}]}],
        state={"source": {"next_row": step}},
        texts={"run.toml": f"seed = {step}\n"},
        keep=keep,
    )


def loaded(folder):
    """The step of the newest checkpoint, after looking at all of it."""
    checkpoint = newest(folder)
    step = checkpoint.step
    assert set(checkpoint.weights()["w"].tolist()) == {float(step)}
    assert set(checkpoint.optimizers()[0][0]["state"][0]["momentum"].tolist()) == {step / 2}
    assert checkpoint.state()["source"] == {"next_row": step}
    return step


class Ended(BaseException):
    """Stands for kill -9: after it no call has any effect."""


def shim(patch, names, before=lambda number, name: None, after=lambda number, name: None):
    """Wrap calls of `os`, of those that change something; returns the list of their names as they are made."""
    made = []

    def wrap(name):
        original = getattr(os, name)

        def call(*given, **named):
            reading = name == "open" and not (len(given) > 1 and given[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if reading and names is CHANGES:
                return original(*given, **named)
            made.append(name)
            number = len(made)
            before(number, name)
            result = original(*given, **named)
            after(number, name)
            return result

        patch.setattr(os, name, call)

    for name in names:
        wrap(name)
    return made


def saver(background):
    if not background:
        return write

    def run(folder, step):
        worker = Background()
        worker.start(lambda: write(folder, step))
        worker.wait()

    return run


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Checkpoints of steps 8, 9 and 10; the next save removes two of them."""
    folder = tmp_path_factory.mktemp("template") / "checkpoints"
    for step in (8, 9, 10):
        write(folder, step, keep=3)
    return folder


@pytest.mark.parametrize("case", ["new", "over a damaged one"])
@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_ended_before_or_after_any_call(template, tmp_path, monkeypatch, count, background, case):
    run = saver(background)

    def begin(name):
        folder = tmp_path / name
        shutil.copytree(template, folder)
        if case != "new":
            shutil.copytree(folder / folder_name(10), folder / folder_name(11))
        return folder

    folder = begin("count")
    with monkeypatch.context() as patch:
        calls = shim(patch, CHANGES)
        run(folder, 11)
    total = len(calls)
    assert total > 25
    assert {"open", "write", "fsync", "rename", "unlink", "rmdir", "mkdir"} <= set(calls)
    found = []
    for deadly, side in itertools.product(range(1, total + 1), ("before", "after")):
        folder = begin(f"{deadly}{side}")

        def die(number, name, last=deadly - (side == "before")):
            if number > last:  # nothing that comes later happens either
                raise Ended

        def die_after(number, name, last=deadly if side == "after" else -1):
            if number == last:
                raise Ended

        with monkeypatch.context() as patch:
            shim(patch, CHANGES, before=die, after=die_after)
            with pytest.raises(Ended):
                run(folder, 11)
        found.append(loaded(folder))
        run(folder, 12)
        assert loaded(folder) == 12
        assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
    assert set(found) == {10, 11}
    assert found == sorted(found)
    count("points of a save and rotation where it was ended", len(found))


def test_ended_at_any_call_of_a_load(template, tmp_path, monkeypatch, count):
    """Reading changes nothing: the same checkpoint is there afterwards, to the last byte."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(template, folder)

    def content():
        return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    before = content()
    with monkeypatch.context() as patch:
        made = shim(patch, READS)
        loaded(folder)
    total = len(made)
    for deadly in range(1, total + 1):

        def die(number, name, deadly=deadly):
            if number >= deadly:
                raise Ended

        with monkeypatch.context() as patch:
            shim(patch, READS, before=die)
            with pytest.raises(Ended):
                loaded(folder)
    assert total > 3
    assert content() == before
    assert loaded(folder) == 10
    count("points of a load where it was ended", total)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_refused_at_any_call(template, tmp_path, monkeypatch, count, code):
    """A disk that refuses from some call on, or only once: an error of one line, nothing lost, nothing left behind."""
    shutil.copytree(template, tmp_path / "count")
    with monkeypatch.context() as patch:
        calls = shim(patch, CHANGES)
        write(tmp_path / "count", 11)
    writing = [index for index, name in enumerate(calls, 1) if name in ("open", "write", "fsync", "mkdir")]
    points = 0
    for failing in writing:
        for lasting in (False, True):
            folder = tmp_path / f"{failing}{lasting}"
            shutil.copytree(template, folder)

            def refuse(number, name, failing=failing, lasting=lasting):
                hit = number >= failing if lasting else number == failing
                if hit and name in ("open", "write", "fsync", "mkdir", "rename"):
                    raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patch:
                shim(patch, CHANGES, before=refuse)
                try:
                    write(folder, 11)
                except DiskError as error:
                    assert "\n" not in error.line()
            assert loaded(folder) in (10, 11)
            assert not list(folder.glob(".step*"))
            write(folder, 12)
            assert loaded(folder) == 12
            points += 1
    count("calls that a disk refused", points)


def test_room_is_looked_for_before_anything_is_written(template, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    shutil.copytree(template, folder)
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with monkeypatch.context() as patch:
        made = shim(patch, CHANGES)
        with pytest.raises(DiskError, match="disk is full"):
            write(folder, 11)
    assert not {"open", "write", "rename"} & set(made)
    assert steps(folder) == [10, 9, 8]


# --- power cuts ------------------------------------------------------------------------------------------------------


class Journal:
    """Writes down what a save asks of the system, and builds what a disk may hold after a power cut."""

    def __init__(self, root):
        self.root, self.log = root, []

    def record(self, patch):
        def path_of(path, dir_fd=None):
            folder = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
            return os.path.join(folder, os.fspath(path))

        real = {name: getattr(os, name) for name in CHANGES}

        def opened(path, flags, *more, **named):
            handle = real["open"](path, flags, *more, **named)
            if flags & os.O_CREAT:
                self.log.append(("create", path_of(path, named.get("dir_fd"))))
            return handle

        def written(handle, data):
            size = real["write"](handle, data)
            self.log.append(("write", os.readlink(f"/proc/self/fd/{handle}"), bytes(data[:size])))
            return size

        def synced(handle):
            self.log.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
            real["fsync"](handle)

        def renamed(old, new, **named):
            real["rename"](old, new, **named)
            self.log.append(("rename", os.fspath(old), os.fspath(new)))

        def simple(name):
            def call(path, *more, dir_fd=None, **named):
                where = path_of(path, dir_fd)
                real[name](path, *more, dir_fd=dir_fd, **named)
                self.log.append((name, where))

            return call

        patch.setattr(os, "open", opened)
        patch.setattr(os, "write", written)
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "rename", renamed)
        for name in ("unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, simple(name))

    def after_cut(self, before, length, keeps_name, keeps_data):
        """{path: bytes, or None for a folder} after a cut behind `length` operations.

        What was synced is there. Of names that were not, `keeps_name(index)` says whether they are; of bytes that were
        not, `keeps_data(path)` how many of them.
        """
        log = self.log[:length]
        synced_at = {}
        for index, entry in enumerate(log):
            if entry[0] == "sync":
                synced_at.setdefault(entry[1], []).append(index)
        disk = dict(before)
        bytes_of, durable, identity = {}, {}, {path: path for path in before}
        for index, (kind, path, *more) in enumerate(log):
            target = more[0] if kind == "rename" else path
            if kind in ("create", "rename", "unlink", "rmdir", "mkdir"):
                parent = os.path.dirname(target)
                kept = any(later > index for later in synced_at.get(parent, [])) or keeps_name(index)
                if not kept:
                    continue
            if kind == "create" and (os.path.dirname(path) in disk or os.path.dirname(path) == str(self.root)):
                disk[path], identity[path] = b"", (path, index)
                bytes_of[path, index], durable[path, index] = b"", 0
            elif kind == "mkdir":
                disk[path] = None
            elif kind == "write" and path in identity:
                bytes_of[identity[path]] = bytes_of.get(identity[path], b"") + more[0]
            elif kind == "sync" and identity.get(path) in bytes_of:
                durable[identity[path]] = len(bytes_of[identity[path]])
            elif kind == "rename":
                for name in [each for each in disk if each == path or each.startswith(path + "/")]:
                    new = target + name[len(path) :]
                    disk[new], identity[new] = disk.pop(name), identity.pop(name, None)
            elif kind in ("unlink", "rmdir"):
                disk.pop(path, None)
        for path in disk:
            which = identity.get(path)
            if which in bytes_of:
                whole = bytes_of[which]
                disk[path] = whole[: max(durable[which], keeps_data(path, len(whole)))]
        return disk


@pytest.mark.parametrize("draws", by_chance(1))
def test_power_cuts_that_forget_what_was_not_synced(template, tmp_path, monkeypatch, count, draws):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(template, folder)
    before = {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
    journal = Journal(folder)
    with monkeypatch.context() as patch:
        patch.setattr(save_module.shutil, "rmtree", slow_rmtree)
        journal.record(patch)
        write(folder, 11)
    total, found = len(journal.log), set()
    assert total > 25
    cases = 0
    for length in range(total + 1):
        rng = random.Random(length)
        for names, data in cuts(rng, draws):
            disk = journal.after_cut(before, length, names, data)
            place = tmp_path / f"{cases}"
            for path, content in sorted(disk.items()):
                copy = place / os.path.relpath(path, folder)
                if content is None:
                    copy.mkdir(parents=True, exist_ok=True)
                else:
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(content)
            found.add(loaded(place))
            shutil.rmtree(place)
            cases += 1
    assert found == {10, 11}
    count("power cuts replayed", cases)


def cuts(rng, draws):
    """Which names and how many bytes survive, of those that were not synced; so many times two are drawn by chance."""
    yield (lambda index: False), (lambda path, size: 0)
    yield (lambda index: True), (lambda path, size: 0)
    yield (lambda index: True), (lambda path, size: size)
    for _ in range(draws):
        yield (lambda index: rng.random() < 0.5), (lambda path, size: rng.randint(0, size))
        yield (lambda index: rng.random() < 0.8), (lambda path, size: rng.choice([0, size]))


def slow_rmtree(path, ignore_errors=False):
    """Removes by path, so that each removal is one operation with one name."""
    for inner in sorted(Path(path).rglob("*"), reverse=True):
        os.rmdir(str(inner)) if inner.is_dir() else os.unlink(str(inner))
    os.rmdir(str(path))
