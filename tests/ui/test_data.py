"""The tab data: the files of the folder, what the programs say of them, and nothing outside the folder."""

import json
import shutil

import pytest
from fastapi.testclient import TestClient

from penjing.ui.app import make_app
from penjing.ui.site import Site

CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]}


@pytest.fixture
def client(tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(CHAT) + "\n" for _ in range(3)) + "{broken\n")
    client = TestClient(make_app(Site(tmp_path), "token"), base_url="http://127.0.0.1:7861")
    client.headers["Authorization"] = "Bearer token"
    return client


def test_data_files_are_listed_and_those_of_runs_are_not(client, tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("deep/text.txt", "README.md", "README.txt", "run.sh", ".hidden.txt", "model.safetensors"):
        (tmp_path / name).write_text("text\n")
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "run.toml").write_text("")
    (run / "metrics.jsonl").write_text("{}\n")
    quickstart = tmp_path / "runs" / "quickstart"
    (quickstart / "data").mkdir(parents=True)
    for name in ("quickstart.json", "evaluation.json", "data/own.txt"):
        (quickstart / name).write_text("{}\n")
    (tmp_path / "link.txt").symlink_to("/etc/hostname")
    found = client.get("/api/data/files").json()
    assert [file["path"] for file in found["files"]] == ["chats.jsonl", "deep/text.txt", "runs/quickstart/data/own.txt"]
    assert found["files"][1]["bytes"] == 5 and found["cleaned"] == [] and not found["is_cut"]
    assert "exact_duplicates" in found["rules"]


def test_a_file_that_vanishes_meanwhile_is_left_out(client, tmp_path, monkeypatch):
    (tmp_path / "gone.txt").write_text("text\n")

    def vanishes(path):
        if path.name == "gone.txt":
            path.unlink()
        return path.name in ("chats.jsonl", "gone.txt")

    monkeypatch.setattr("penjing.ui.data._is_data", vanishes)
    assert [file["path"] for file in client.get("/api/data/files").json()["files"]] == ["chats.jsonl"]


def test_a_look_shows_which_tokens_the_loss_covers(client):
    (group,) = client.post("/api/data/look", json={"path": "chats.jsonl"}).json()["groups"]
    assert group["kind"] == "chats" and group["records"]["good"] == 3 and group["problems"][0]["line"] == 4
    spans = group["examples"][0]["rows"][0]["spans"]
    learned = "".join(span["text"] for span in spans if span["learned"])
    assert "good day" in learned and "hello" not in learned
    assert any(span["special"] for span in spans)


def test_a_dry_run_counts_and_writes_nothing(client, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    body = {"path": "chats.jsonl", "rule": "exact_duplicates"}
    (counts,) = client.post("/api/data/clean", json=body).json()["cleaned"]
    assert (counts["kept"], counts["dropped"], counts["broken"]) == (1, 2, 1)
    assert any(example["rule"] == "exact_duplicates" for example in counts["examples"])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_cleaning_is_opened(client, tmp_path):
    folder = tmp_path / "clean" / "_cleaning"
    folder.mkdir(parents=True)
    (folder / "counts.json").write_text('{"kept": 5}')
    assert client.get("/api/data/files").json()["cleaned"] == ["clean"]
    found = client.get("/api/data/cleaning", params={"folder": "clean"}).json()
    assert found == {"cleaned": [{"kept": 5}], "report": "clean/_cleaning/report.html"}
    assert client.post("/api/data/report", json={"path": found["report"]}).status_code == 404
    (folder / "report.html").write_text("<h1>A report</h1>")
    for path, status in (("chats.jsonl", 404), ("../report.html", 403)):
        assert client.post("/api/data/report", json={"path": path}).status_code == status
    address = client.post("/api/data/report", json={"path": found["report"]}).json()["address"]
    window = TestClient(client.app, base_url="http://127.0.0.1:7861")  # has no token
    assert window.get(f"{address}x").status_code == 401
    shown = window.get(address)
    policy = shown.headers["Content-Security-Policy"]
    assert shown.text == "<h1>A report</h1>" and policy.startswith("sandbox allow-scripts; default-src 'none'; ")
    assert "script-src 'sha256-" in policy and "same-origin" not in policy
    assert window.get(address).status_code == 401
    shutil.rmtree(folder)
    assert client.get("/api/data/cleaning", params={"folder": "clean"}).status_code == 404


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret.txt", "link.txt"])
def test_nothing_outside_the_folder_is_read(client, tmp_path, path):
    (tmp_path / "link.txt").symlink_to("/etc/hostname")
    for name in ("look", "clean"):
        assert client.post(f"/api/data/{name}", json={"path": path}).status_code == 403
    assert client.post("/api/data/look", json={"path": "chats.jsonl", "tokenizer": path}).status_code == 403
    assert client.get("/api/data/cleaning", params={"folder": path}).status_code == 403


def test_unknown_rules_and_unreadable_files_are_refused_in_a_line(client, tmp_path):
    refused = client.post("/api/data/clean", json={"path": "chats.jsonl", "rule": "rules.toml"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "rule"
    (tmp_path / "none.jsonl").write_text("{broken\n")
    refused = client.post("/api/data/look", json={"path": "none.jsonl"})
    assert refused.status_code == 400 and "none.jsonl" in refused.json()["error"]["message"]
