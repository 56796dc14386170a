"""Any damage to a checkpoint is found and named, and the one before it is taken, bit for bit."""

import json
import os
import random
import shutil

import pytest
from reliability_harness import by_chance, state_of

from penjing.base.errors import UserError
from penjing.checkpoint.load import newest
from penjing.checkpoint.manifest import MANIFEST, folder_name, steps
from penjing.train.load_model import load_trained

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "run.toml", MANIFEST)


@pytest.fixture(scope="module")
def run(tmp_path_factory, server, stages):
    folder = tmp_path_factory.mktemp("corrupted") / "run"
    recipe, words = stages["pretrain"]
    words = [*words, "checkpoint.keep_last=3", f"out={folder}"]
    status, _, said = server.run(recipe, words)
    assert status == 0, said
    return folder, recipe, words


def damages(path, other, name, flips):
    """(what, call that does it) for every damage to one file, and so many flipped bits.

    other: the same file of another step.
    """
    whole = path.read_bytes()
    rng = random.Random(name)

    def put(content):
        return lambda: path.write_bytes(content)

    for place in rng.sample(range(8 * len(whole)), min(flips, 8 * len(whole))):
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        yield f"bit {place}", put(bytes(broken))
    for size in (0, 1, 7, len(whole) // 2, len(whole) - 1):
        yield f"cut to {size}", put(whole[:size])
    yield "grown", put(whole + b"\0")
    yield "zeros", put(bytes(len(whole)))
    yield "halves swapped", put(whole[len(whole) // 2 :] + whole[: len(whole) // 2])
    yield "of another step", put(other.read_bytes())
    yield "deleted", path.unlink

    def folder():
        path.unlink()
        path.mkdir()

    def link():
        path.unlink()
        path.symlink_to(other)

    yield "a folder", folder
    yield "a link", link


@pytest.mark.timeout(900)
@pytest.mark.parametrize("flips", by_chance(120))
def test_every_damage_is_found_and_the_file_named(run, tmp_path, count, flips):
    folder, _, _ = run
    copied = tmp_path / "checkpoints"
    shutil.copytree(folder / "checkpoints", copied)
    good, last = steps(copied)[1], steps(copied)[0]
    cases = 0
    for name in FILES:
        path, other = copied / folder_name(last) / name, copied / folder_name(good) / name
        whole = path.read_bytes()
        if other.read_bytes() == whole:  # run.toml is the same in all: a copy of it is no damage
            other = copied / folder_name(good) / "state.json"
        for what, damage in damages(path, other, name, flips):
            damage()
            found = newest(copied)
            assert found.step == good, (name, what)
            assert name in found.skipped[0], (what, found.skipped)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(whole)
            cases += 1
        assert newest(copied).step == last
    assert cases >= 600
    count("corruptions found", cases)


@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_from_the_one_before_bit_for_bit(run, tmp_path, server, name):
    folder, recipe, words = run
    wanted = state_of(folder)
    copied = tmp_path / "run"
    shutil.copytree(folder, copied)
    path = copied / "checkpoints" / folder_name(steps(copied / "checkpoints")[0]) / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    status, _, said = server.run(recipe, [*words, f"out={copied}"])
    assert status == 0, said
    assert f"damaged checkpoint skipped: {path.parent.name}" in said
    assert name in said
    assert state_of(copied) == wanted


def test_all_damaged_is_refused_and_never_begun_anew(run, tmp_path, server):
    folder, recipe, words = run
    copied = tmp_path / "run"
    shutil.copytree(folder, copied)
    for path in (copied / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    before = sorted(path.name for path in (copied / "checkpoints").iterdir())
    status, _, said = server.run(recipe, [*words, f"out={copied}"])
    assert status == 2
    assert "every checkpoint is damaged" in said
    for name in before:
        assert name in said
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == before


def test_the_largest_step_counts_whatever_the_clock_says(run, tmp_path):
    copied = tmp_path / "checkpoints"
    shutil.copytree(run[0] / "checkpoints", copied)
    last = steps(copied)[0]
    for index, path in enumerate(sorted(copied.iterdir())):
        os.utime(path, (1e9 - 1e7 * index, 1e9 - 1e7 * index))
    assert newest(copied).step == last
    for path in copied.glob("step-*/state.json"):
        path.unlink()
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        newest(copied)


BACKWARDS = "import time, itertools\nhour, real = itertools.count(), time.time\n"
BACKWARDS += "time.time = lambda: real() - 3600 * next(hour)\n"


def test_a_clock_that_is_set_back_shortens_no_time(tmp_path, server, stages):
    recipe, words = stages["pretrain"]
    folder = tmp_path / "run"
    status, _, said = server.run(recipe, [*words, "max_steps=2", f"out={folder}"], before=BACKWARDS)
    assert status == 0, said
    assert json.loads((folder / "outcome.json").read_text())["this_process_seconds"] > 0
    assert json.loads((folder / "plan.json").read_text())["startup_seconds"] > 0


def test_who_reads_a_model_is_told_of_the_one_that_was_skipped(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run[0], copied)
    last, before = steps(copied / "checkpoints")[:2]
    (copied / "checkpoints" / folder_name(last) / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=f"step {before} is used: {folder_name(last)}: model.safetensors"):
        assert load_trained(copied).checkpoint.step == before


def test_a_damaged_tokenizer_is_named_where_a_model_is_read(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run[0], copied)
    path = copied / "tokenizer/tokenizer.json"
    definition = json.loads(path.read_text())
    words = definition["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(definition))
    with pytest.warns(UserWarning, match="not the tokenizer that the model was trained with"):
        load_trained(copied)


def test_damaged_settings_and_results_are_one_line(run, tmp_path, server, penjing):
    folder, recipe, words = run
    copied = tmp_path / "run"
    shutil.copytree(folder, copied)
    outcome = json.loads((copied / "outcome.json").read_text())
    (copied / "outcome.json").write_text(json.dumps({**outcome, "delivered": 7}))
    status, _, said = server.run(recipe, [*words, f"out={copied}"])
    assert status == 0, said
    (copied / "run.toml").write_bytes(b"\xff")
    shown = penjing("show", copied, check=False)
    assert shown.returncode == 2 and "run.toml: not valid" in shown.stderr
