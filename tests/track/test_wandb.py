"""Weights & Biases, with its own library in offline mode: what a run logs is read back from its files."""

import struct
import sys
import types

import pytest
import wandb
from user_errors import raises_user_error
from wandb.proto.wandb_internal_pb2 import Record

from penjing.base.registry import look_up
from penjing.track import TRACKERS
from penjing.track.background import BackgroundTrackers
from penjing.track.wandb import Wandb

BLOCK_BYTES = 32768  # of LevelDB's log format, in which a .wandb file holds its records
API_KEY = "0123456789abcdef" * 2 + "01234567"  # has the right form; never sent


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """No login, settings or cache of the user's; the library's process ends with the test."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(home))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()


def records(path):
    """The records of a .wandb file: blocks of (checksum, length, first/middle/last/whole, data), after a header."""
    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""


def parts(folder):
    """Of each offline run in `folder`, in order of time: its id, its config, and what was logged by step."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        run_id, config, history = None, {}, {}
        for record in records(path):
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
                config |= {item.key: item.value_json for item in record.run.config.update}
            elif record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                history[record.history.step.num] = {k: float(v) for k, v in items.items() if not k.startswith("_")}
        yield run_id, config, history


def make(folder, **config):
    folder.mkdir(exist_ok=True)
    tracker = look_up(TRACKERS, "wandb", what="tracker")()
    tracker.start(folder, project="p", name="", config=config)
    return tracker


def test_a_resumed_run_goes_on_under_its_id_and_both_parts_are_in_its_files(tmp_path):
    folder = tmp_path / "run"
    for steps in ((5, 10), (15, 20)):
        tracker = BackgroundTrackers({"wandb": lambda: make(folder, seed=7)})  # in a thread, as in a run
        for step in steps:
            tracker.log(step, {"loss": 1 / step, "learning_rate": 1e-3})
        tracker.end()
        wandb.teardown()  # as at the end of the process
    (first_id, config, first), (second_id, _, second) = parts(folder)
    assert first_id == second_id
    assert config["seed"] == "7"
    assert first == {step: {"loss": 1 / step, "learning_rate": 1e-3} for step in (5, 10)}
    assert second == {step: {"loss": 1 / step, "learning_rate": 1e-3} for step in (15, 20)}


def test_a_roll_back_continues_the_run_from_that_step(tmp_path):
    tracker = make(tmp_path / "run")
    for step in (1, 2, 3, 4):
        tracker.log(step, {"loss": 1.0})
    tracker.rewind(2)
    for step in (3, 4, 5):
        tracker.log(step, {"loss": 2.0})
    tracker.end()
    wandb.teardown()
    (first_id, _, _), (second_id, _, second) = parts(tmp_path / "run")
    assert first_id == second_id
    assert second == {step: {"loss": 2.0} for step in (3, 4, 5)}
    last = max((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    (branch,) = [record.run.branch_point for record in records(last) if record.run.HasField("branch_point")]
    assert (branch.run, branch.value) == (first_id, 2)


def begun_with(monkeypatch, folder):
    """What wandb.init is called with; the login before it is the library's own."""
    begun = []
    monkeypatch.setattr(wandb, "init", lambda **options: begun.append(options) or types.SimpleNamespace())
    make(folder)
    return begun[0]


def test_another_run_has_another_id(tmp_path, monkeypatch):
    one, other = (begun_with(monkeypatch, tmp_path / name) for name in ("one", "other"))
    assert one["id"] != other["id"]
    assert (one["resume"], one["project"], one["name"]) == ("allow", "p", "one")


@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    [
        ({}, None, "offline"),
        ({"WANDB_API_KEY": API_KEY}, None, "online"),
        ({}, f"machine api.wandb.ai login user password {API_KEY}", "online"),
        ({"WANDB_API_KEY": API_KEY, "WANDB_MODE": "disabled"}, None, "disabled"),
        ({"WANDB_MODE": "online"}, None, "online"),
    ],
)
def test_a_login_or_the_user_s_own_mode_decides(tmp_path, monkeypatch, environment, netrc, mode):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc:
        (tmp_path / "home" / "netrc").write_text(netrc)
    assert begun_with(monkeypatch, tmp_path / "run")["mode"] == mode


def test_without_the_library_the_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with raises_user_error(where="log.trackers", next_step="penjing[wandb]"):
        Wandb().start(tmp_path, project="p", name="", config={})
