"""Training from the page: the form, what is refused, and processes that start, stop, go on, and outlive the server."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from penjing.base import config
from penjing.base.lock import is_locked, locked
from penjing.cli import main
from penjing.track.run_record import flatten
from penjing.train.config import Run
from penjing.ui import processes, train
from penjing.ui.app import make_app
from penjing.ui.settings_form import chinese, chinese_texts
from penjing.ui.site import Site

# In place of penjing: trains nothing, holds the run's lock until it is asked to end, and leaves what it was told.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from penjing.cli import main
from penjing.base.lock import locked
words = sys.argv[1:]
recipe = words[1]
out = next((word[4:] for word in words if word.startswith("out=")), str(Path(recipe).parent))
if words[0] == "quickstart":
    out = words[2]
if "fail=1" in words:
    print("penjing: it fails", file=sys.stderr)
    sys.exit(2)
with locked(Path(out)):
    signal.signal(signal.SIGTERM, lambda *_: (Path(out, "saved").write_text("yes"), sys.exit(143)))
    Path(out, "run.toml").write_text(f'stage = "tiny"\\nout = "{out}"\\n')
    Path(out, "told").write_text(json.dumps([words, os.getcwd(), os.getsid(0) == os.getpid()]))
    time.sleep(60)
"""


@pytest.fixture
def program(tmp_path_factory, monkeypatch):
    file = tmp_path_factory.mktemp("program") / "program.py"
    file.write_text(PROGRAM)
    monkeypatch.setattr(processes, "PROGRAM", (sys.executable, str(file)))
    return file


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def told(run):
    """What the program was told; waits for it."""
    file = run / "told"
    wait_for(lambda: file.exists() and file.read_text().endswith("]"))
    return json.loads(file.read_text())


def state(client, run):
    return next((row["state"] for row in client.get("/api/runs").json()["runs"] if row["id"] == run), None)


def code(response):
    return response.status_code, response.json()["error"]["code"]


def test_start_stop_and_continue(client, folder, program):
    run, settings = folder / "runs" / "x", {"out": "runs/x", "data.train": "my data.txt", "max_steps": "5"}
    assert client.post("/api/start", json={"recipe": "tiny", "settings": settings}).json() == {"run": "runs/x"}
    assert state(client, "runs/x") in ("starting", "running")
    words = ["train", "tiny", "out=runs/x", "data.train=my data.txt", "max_steps=5"]
    assert told(run) == [words, str(folder), True], "its own session"
    assert state(client, "runs/x") == "running"
    assert code(client.post("/api/start", json={"recipe": "tiny", "settings": settings})) == (409, "running")
    assert code(client.post("/api/resume", json={"run": "runs/x"})) == (409, "running")
    assert client.post("/api/stop", json={"run": "runs/x"}).json() == {"run": "runs/x"}
    wait_for(lambda: (run / "saved").exists() and state(client, "runs/x") == "killed")  # this one writes no ended.json
    assert code(client.post("/api/stop", json={"run": "runs/x"})) == (409, "not_running")
    (run / "told").unlink()
    assert client.post("/api/resume", json={"run": "runs/x"}).status_code == 200
    assert told(run)[:2] == [["train", "runs/x/run.toml"], str(folder)]
    client.post("/api/stop", json={"run": "runs/x"})
    wait_for(lambda: not is_locked(run))
    log = client.get("/api/run", params={"run": "runs/x"}).json()["log"]
    assert log.startswith("$ penjing train tiny out=runs/x 'data.train=my data.txt' max_steps=5\n")


def test_the_first_model_of_an_empty_folder(client, folder, program):
    assert client.post("/api/quickstart", json={}).json() == {"run": "runs/quickstart"}
    assert told(folder / "runs/quickstart")[:2] == [["quickstart", "--out", "runs/quickstart"], str(folder)]
    assert code(client.post("/api/quickstart", json={})) == (409, "running")
    client.post("/api/stop", json={"run": "runs/quickstart"})
    wait_for(lambda: not is_locked(folder / "runs/quickstart"))


def test_a_start_that_fails_is_shown_with_what_it_said(client, folder, program, monkeypatch):
    monkeypatch.setattr(
        train.settings_form, "resolved", lambda *asked: Run(out="runs/bad")
    )  # else the form would refuse it
    client.post("/api/start", json={"recipe": "tiny", "settings": {"fail": "1"}})
    wait_for(lambda: state(client, "runs/bad") == "failed")
    token = client.headers["Authorization"].split()[1]
    with TestClient(make_app(Site(folder), token), base_url=client.base_url, headers=client.headers) as later:
        for server in (client, later):  # one that was started after the failure knows it too
            assert "penjing: it fails" in server.get("/api/run", params={"run": "runs/bad"}).json()["log"]
            rows = server.get("/api/runs").json()["runs"]
            assert [(row["id"], row["state"]) for row in rows] == [("runs/bad", "failed")]


def test_a_run_outlives_the_server_that_started_it(folder, program):
    """kill -9 of the server, so that nothing of it could have said good-bye."""
    server = (
        "import os, signal, sys; from pathlib import Path; from penjing.ui import processes; "
        "from penjing.ui.site import Site; "
        f"processes.PROGRAM = (sys.executable, {str(program)!r}); site = Site(Path()); "
        "processes.Trainings(site).start(['train', 'tiny', 'out=runs/x'], site.path('runs/x')); "
        "sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", server], stdin=subprocess.PIPE, text=True)
    run = folder / "runs" / "x"
    told(run)
    process.communicate("\n")
    assert process.returncode == -signal.SIGKILL
    time.sleep(0.3)
    assert is_locked(run) and not (run / "saved").exists()
    os.kill(json.loads((run / ".lock").read_text())["pid"], signal.SIGTERM)
    wait_for(lambda: not is_locked(run))


def test_chat_servers_end_with_the_server_even_if_it_is_killed(folder):
    said = "print('chat page: http://127.0.0.1:123/    ', flush=True)\nimport time\ntime.sleep(60)"
    server = (
        "import os, signal, sys, time; from pathlib import Path; from penjing.ui import processes\n"
        f"processes.SERVER = (sys.executable, '-c', processes.ENDS_WITH_US + {said!r})\n"
        "chats = processes.Chats()\nchats.start(Path('x'), 'x', 5)\nchats.start(Path('x'), 'x', 5)\n"
        "while chats.list()[0]['state'] != 'ready': time.sleep(0.02)\n"
        "print(len(chats.list()), chats.list()[0]['address'], chats._chats['x', 5].process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", server], capture_output=True, text=True)
    count, address, pid = done.stdout.split()
    assert (count, address) == ("1", "http://127.0.0.1:123/")
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z")


def test_a_chat_server_is_stopped_and_one_that_fails_says_why(monkeypatch):
    chats = processes.Chats()
    monkeypatch.setattr(processes, "SERVER", (sys.executable, "-c", "import sys; sys.exit('no such checkpoint')"))
    chats.start(Path("x"), "x", 5)
    wait_for(lambda: chats.list()[0]["state"] == "ended")
    log = chats._chats["x", 5].log.fileno()
    os.lseek(log, 3, os.SEEK_SET)  # where the program writes on: whoever reads leaves it there
    assert chats.list()[0]["said"] == "no such checkpoint\n" and os.lseek(log, 0, os.SEEK_CUR) == 3
    monkeypatch.setattr(processes, "SERVER", (sys.executable, "-c", "input()"))
    chats.start(Path("x"), "x", 5)
    process = chats._chats["x", 5].process
    assert chats.list()[0]["state"] == "starting"
    chats.stop("x", 5)
    assert process.poll() is not None and chats.list() == []


@pytest.mark.parametrize("owner", [{"pid": "other"}, {"host": "elsewhere"}, {"pid": 1}, {"pid": "x"}])
def test_only_the_process_that_holds_the_lock_is_stopped(client, folder, write_run, owner):
    """A folder may come from anywhere: what its lock says is not believed."""
    run = write_run(folder / "a", done=False)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with locked(run):
        lock = json.loads((run / ".lock").read_text()) | owner
        (run / ".lock").write_text(json.dumps({**lock, "pid": other.pid if lock["pid"] == "other" else lock["pid"]}))
        assert code(client.post("/api/stop", json={"run": "a"})) == (409, "not_ours")
    assert other.poll() is None
    other.communicate(b"\n")


@pytest.mark.parametrize(
    ("recipe", "settings", "wanted"),
    [
        ("tiny", {"out": "../x"}, (403, "outside_folder")),
        ("tiny", {"out": "/tmp/x"}, (403, "outside_folder")),
        ("tiny", {"out": "link/x"}, (403, "outside_folder")),
        ("tiny", {"data.train": "a.txt,/etc/passwd"}, (403, "outside_folder")),
        ("tiny", {"init_from": "~/model"}, (403, "outside_folder")),
        ("../run.toml", {}, (403, "outside_folder")),
        ("../run.toml", {"recipe": "tiny"}, (403, "outside_folder")),
        ("far.toml", {}, (403, "outside_folder")),
        ("--help", {}, (400, None)),
        ("tiny", {"--gpus": "8"}, (400, None)),
        ("tiny", {"out": "a\0b"}, (403, "outside_folder")),
        ("tiny", {"batch.size": "0"}, (400, None)),
        ("tiny", {"batch.sise": "1"}, (400, None)),
        ("nothing", {}, (400, None)),
    ],
)
def test_what_is_refused_starts_nothing(client, folder, program, tmp_path_factory, recipe, settings, wanted):
    (folder / "link").symlink_to(tmp_path_factory.mktemp("outside"))
    (folder / "far.toml").write_text('stage = "tiny"\n[data]\ntrain = ["/etc/passwd"]\n')
    assert code(client.post("/api/start", json={"recipe": recipe, "settings": settings})) == wanted
    assert {path.name for path in folder.iterdir()} == {"link", "far.toml"}


@pytest.mark.parametrize("path", ["/api/stop", "/api/resume", "/api/chats"])
def test_runs_outside_are_neither_stopped_nor_used(client, folder, path):
    for run in ("..", "/tmp", "../x"):
        assert code(client.post(path, json={"run": run, "step": 1})) == (403, "outside_folder")
    if path != "/api/stop":
        assert code(client.post(path, json={"run": "nothing", "step": 1})) == (404, "no_run")


def test_a_run_that_was_moved_is_continued_where_it_lies(client, folder, write_run, program):
    write_run(folder / "moved" / "b", done=False)
    client.post("/api/resume", json={"run": "moved/b"})
    words, where, _ = told(folder / "moved" / "b")
    assert words == ["train", "moved/b/run.toml", "out=moved/b"] and where == str(folder)
    client.post("/api/stop", json={"run": "moved/b"})
    wait_for(lambda: not is_locked(folder / "moved" / "b"))


def test_the_form_has_every_setting_of_the_code_once(client):
    form = client.get("/api/settings").json()
    fields = [field for group in form["groups"] for field in group["fields"]]
    paths = {field["path"] for field in fields}
    assert paths >= flatten(config.to_dict(Run())).keys()
    assert len({(field["path"], field["needs"]) for field in fields}) == len(fields)
    by_path = {field["path"]: field for field in fields}
    assert by_path["batch.size"] == {
        "path": "batch.size",
        "kind": "whole",
        "options": [],
        "range": [">= 1", "<= 4294967296"],
        "help": "Rows (pairs, prompts) of one optimizer step, over all devices and accumulation.",
        "zh": chinese("settings", "batch.size"),
        "needs": "",
    }
    assert by_path["checkpoint.async"]["kind"] == "yes" and by_path["optimizer.name"]["options"] == ["adamw", "muon"]
    assert by_path["optimizer.momentum"]["needs"] == "optimizer.name=muon"
    assert by_path["compute.dtype"]["help"].startswith("Of matmuls; weights and optimizer state stay float32.")
    without_help = [field["path"] for field in fields if not field["help"]]
    assert len(without_help) < len(fields) / 10, without_help
    assert {"pretrain", "tiny", "grpo"} <= {recipe["name"] for recipe in form["recipes"]}


def test_chinese_help_is_there_for_all_that_the_form_shows_and_for_nothing_else(client):
    form, texts = client.get("/api/settings").json(), chinese_texts()
    fields = [field for group in form["groups"] for field in group["fields"]]
    shown = [*fields, *form["groups"], *form["recipes"]]
    assert [one.get("path") or one["name"] for one in shown if not re.search("[\u4e00-\u9fff]", one["zh"])] == []
    used = {name for field in fields for name in (field["path"], f"{field['path']}@{field['needs'].partition('=')[2]}")}
    assert texts["settings"].keys() <= used
    assert texts["groups"].keys() == {group["name"] or "run" for group in form["groups"]}
    assert texts["recipes"].keys() == {recipe["name"].partition(":")[0] for recipe in form["recipes"]}
    either = {name.partition("@")[0] for name in texts["settings"] if "@" in name}
    assert not either & texts["settings"].keys(), "a name has a text of its own, or one for each choice"
    assert all(recipe["help"] for recipe in form["recipes"])


def test_a_setting_is_marked_with_the_command_lines_own_error(client, folder, monkeypatch, capsys):
    asked = {"recipe": "pretrain", "settings": {"batch.size": "0"}}
    error = client.post("/api/check", json=asked).json()["error"]
    monkeypatch.setattr(sys, "argv", ["penjing", "train", "pretrain", "batch.size=0"])
    with pytest.raises(SystemExit):
        main()
    assert error == {"where": "batch.size", "message": capsys.readouterr().err.strip()}
    settings = {"optimizer": "adamw", "out": "runs/é x"}
    bare = client.post("/api/check", json={"recipe": "pretrain", "settings": settings}).json()
    assert bare["error"]["where"] == "data.train" and bare["values"]["optimizer.name"] == "adamw"
    asked = {"recipe": "pretrain", "settings": {**settings, "data.train": "a"}}
    assert client.post("/api/check", json=asked).json()["error"]["where"] == "a", "no such file"
    (folder / "a").touch()
    good = client.post("/api/check", json=asked).json()
    assert good["command"] == "penjing train pretrain optimizer=adamw 'out=runs/é x' data.train=a"
    assert good["values"]["optimizer.name"] == "adamw" and good["error"] is None
