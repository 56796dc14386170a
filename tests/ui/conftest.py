"""Runs as training writes them, without training; and the app over a folder of them."""

import json
import threading
import time
from contextlib import contextmanager

import pytest
from fastapi.testclient import TestClient

from penjing.serve.connection import make_server
from penjing.ui import blind
from penjing.ui.app import make_app
from penjing.ui.processes import Chats
from penjing.ui.site import Site
from penjing.workflows.serve import listen

TOKEN = "right-token"


@pytest.fixture
def write_run():
    """Writes a run's folder: `points` lines of metrics, a validation every tenth; done: it has an outcome."""

    def write(folder, points=20, *, done=True, level=3.0):
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text(f'stage = "tiny"\nout = "runs/{folder.name}"\nseed = 7\n')
        plan = {
            "steps": 10 * points,
            "parameters": 1_067_136,
            "predicted_seconds": 2.0 * points,
            "tokens_per_second": 64,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        lines = []
        for step in range(10, 10 * points + 1, 10):
            line = {
                "step": step,
                "loss": level + 1 / step,
                "learning_rate": 1e-3,
                "tokens": 64 * step,
                "seconds": step / 4,
            }
            lines.append(json.dumps({**line, "grad_norm": 1.0, "tokens_per_second": 256.0, "seconds_left": 9.0}))
            if step % 100 == 0:
                lines.append(json.dumps({"step": step, "tokens": 64 * step, "val_loss": level + 2 / step}))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "samples.jsonl").write_text(
            json.dumps({"step": 100, "prompt": "Tom", "text": "Tom <b>sat</b>", "language": "en"}) + "\n"
        )
        (folder / "incidents.jsonl").write_text('{"step": 30, "kind": "not finite", "loss": NaN}\n')
        if done:
            (folder / "outcome.json").write_text(json.dumps({"seconds": 2.5 * points, "tokens_per_second": 60}))
        return folder

    return write


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the app, which is its working directory too."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def client(folder):
    with TestClient(make_app(Site(folder), TOKEN), base_url="http://127.0.0.1:7861") as opened:
        opened.headers["Authorization"] = f"Bearer {TOKEN}"
        yield opened


@contextmanager
def serving(folder):
    """The app on a port of this machine; gives the address that a person would open."""
    site = Site(folder, lambda: server.should_exit)
    server = make_server(make_app(site, TOKEN))
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/#token={TOKEN}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
def address(folder):
    with serving(folder) as found:
        yield found


@pytest.fixture
def models(monkeypatch):
    """Two loaded checkpoints, and a third that is not; each answers with its address."""
    rows = [("runs/a", 10, "http://a/"), ("runs/b", 20, "http://b/"), ("runs/c", 30, "")]
    chats = [
        {"run": run, "step": step, "address": at, "state": "ready" if at else "starting", "said": ""}
        for run, step, at in rows
    ]
    monkeypatch.setattr(Chats, "list", lambda _: chats)
    monkeypatch.setattr(blind, "_answer", lambda address, question: f"{question} {address}")
