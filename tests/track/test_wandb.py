"""Weights & Biases, with its own library in offline mode: what a run logs is read back from its files."""

import contextlib
import types
from functools import partial

import pytest
import wandb
from read_trackers import wandb_records

from penjing.track.background import BackgroundTrackers, Delays
from penjing.track.jsonl import JsonLines
from penjing.track.resumable import ResumableTracker
from penjing.track.wandb import Wandb

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


def parts(folder):
    """Of each offline run in `folder`, in order of time: its id, its config, and what was logged by step."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        run_id, config, history = None, {}, {}
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
                config |= {item.key: item.value_json for item in record.run.config.update}
            elif record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                history[record.history.step.num] = {k: float(v) for k, v in items.items() if not k.startswith("_")}
        yield run_id, config, history


def make(folder, step=0, **config):
    folder.mkdir(exist_ok=True)
    tracker = ResumableTracker("wandb", Wandb(), folder, step)
    tracker.start(folder, project="p", name="", config=config)
    return tracker


def log(tracker, lines, steps, loss):
    """As training does: first to the run's own file."""
    for step in steps:
        lines.log(step, {"loss": loss / step})
        tracker.log(step, {"loss": loss / step})


def test_the_part_of_a_resumed_run_has_the_whole_run_under_its_id(tmp_path):
    folder = tmp_path / "run"
    for resumed, steps in ((0, (5, 10)), (10, (15, 20))):
        lines = JsonLines(folder / "metrics.jsonl", resume_step=resumed)
        make_wandb = partial(make, folder, resumed, seed=7)
        tracker = BackgroundTrackers({"wandb": make_wandb}, Delays(end=300))
        log(tracker, lines, steps, 1.0)
        tracker.end()
        wandb.teardown()  # as at the end of the process
    (first_id, config, first), (second_id, _, second) = parts(folder)
    assert first_id == second_id
    assert config["seed"] == "7"
    assert first == {step: {"loss": 1 / step} for step in (5, 10)}
    assert second == {step: {"loss": 1 / step} for step in (5, 10, 15, 20)}


def test_the_part_after_a_roll_back_has_the_whole_run_without_what_was_undone(tmp_path):
    folder = tmp_path / "run"
    tracker, lines = make(folder), JsonLines(folder / "metrics.jsonl", resume_step=0)
    log(tracker, lines, (1, 2, 3, 4), 1.0)
    lines.rewind(2)
    tracker.rewind(2)
    log(tracker, lines, (3, 4, 5), 2.0)
    tracker.end()
    wandb.teardown()
    (first_id, _, _), (second_id, _, second) = parts(folder)
    assert first_id == second_id
    assert second == {step: {"loss": (1.0 if step < 3 else 2.0) / step} for step in (1, 2, 3, 4, 5)}


@pytest.mark.parametrize("refuses", [False, True])
def test_online_it_asks_the_server_to_go_back(tmp_path, monkeypatch, refuses):
    begun = []

    def init(**options):
        begun.append(options)
        if refuses and "resume_from" in options:
            raise wandb.errors.CommError("not on this server")
        return types.SimpleNamespace(id=options["id"], finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_MODE", "online")
    tracker = Wandb()
    tracker.start(tmp_path, project="p", name="", config={}, run_id="0a")
    with pytest.warns(UserWarning, match="keeps the steps after 7") if refuses else contextlib.nullcontext():
        tracker.rewind(7)
    assert [options.get("resume_from") for options in begun[:2]] == [None, "0a?_step=7"]
    assert [options.get("resume") for options in begun] == ["allow", None, *["allow"] * refuses]
    assert tracker.held(7) == 7


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
