"""Data sets of the Hugging Face hub, streamed from a server in the tests that answers as the hub does."""

import gzip
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from user_errors import raises_user_error

from penjing.data.formats import list_files

pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def parquet(texts):
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), stream)
    return stream.getvalue()


def lines(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


FILES = {
    "README.md": b"# A card",
    "data/train-00000.parquet": parquet(["one", "two"]),
    "data/train-00001.jsonl.gz": gzip.compress(lines("three", "four")),
    "data/test-00000.jsonl": lines("held out"),
    "other/page.html": b"<p>A page of words.</p>",
}


REVISIONS = ("main", "refs/convert/parquet", COMMIT)


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def facts(self, name):
        data = FILES[name]
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def answer(self, body, status=200, **headers):
        self.send_response(status)
        for key, value in {"Content-Length": len(body), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        tree, resolve = f"/api/datasets/o/n/tree/{COMMIT}", f"/datasets/o/n/resolve/{COMMIT}/"
        if path in ("/api/datasets/o/n", *(f"/api/datasets/o/n/revision/{name}" for name in REVISIONS)):
            self.answer(json.dumps({"id": "o/n", "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith(tree):
            inside = path.removeprefix(tree).strip("/")
            found = [name for name in FILES if name.startswith(f"{inside}/" if inside else "")]
            if not found:
                self.answer(b"{}", 404, **{"X-Error-Code": "EntryNotFound"})
                return
            folders = {name.rpartition("/")[0] for name in found} - {inside, ""}
            entries = [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders]
            self.answer(json.dumps(entries + [self.facts(name) for name in found]).encode())
        elif path.startswith(resolve) and (name := path.removeprefix(resolve)) in FILES:
            data, asked = FILES[name], self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
            part = data[int(asked[0]) : int(asked[1]) + 1 if asked[1] else None]
            self.answer(part, 206 if "Range" in self.headers else 200, ETag=f'"{hashlib.sha1(data).hexdigest()}"')
        else:
            self.answer(b'{"error": "Repository not found"}', 404, **{"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        asked = parse_qs(body).get("paths") or json.loads(body)["paths"]
        self.answer(json.dumps([self.facts(name) for name in asked if name in FILES]).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def address():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


READ = """
import sys, warnings
from penjing.base.errors import UserError
from penjing.data.corpus import Corpus, DataSettings
try:
    rules = tuple(word for word in sys.argv[1:] if word.endswith(".toml"))
    corpus = Corpus(DataSettings(train=tuple(word for word in sys.argv[1:] if word not in rules), clean=rules))
    assert corpus.fingerprint
    print([text for _ in range(2) for text in corpus.texts()], [size for size, _ in corpus.contents.values()])
except UserError as error:
    print(error.line())
"""


def read(address, home, *names):
    """What a process prints that reads these names: huggingface_hub takes the address from its environment."""
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", READ, *names], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_data_set_is_streamed(address, tmp_path):
    texts = read(address, tmp_path, "hf://o/n/data")
    sizes = [len(FILES[f"data/train-0000{name}"]) for name in ("0.parquet", "1.jsonl.gz")]
    assert texts.strip() == f"{['one', 'two', 'three', 'four'] * 2} {sizes}"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".parquet", ".gz")]
    assert "'A page of words.'" in read(address, tmp_path, "hf://o/n")
    assert read(address, tmp_path, "hf://datasets/o/n@main/data/test-00000.jsonl").startswith(
        "['held out', 'held out']"
    )
    assert "'held out'" in read(address, tmp_path, "hf://o/n@refs/convert/parquet/data/test-00000.jsonl")
    assert read(address, tmp_path, "hf://o/n/other/*.html").startswith("['A page of words.', ")


def test_an_evaluation_set_may_be_on_the_hub(address, tmp_path):
    rules, data = tmp_path / "rules.toml", tmp_path / "data.jsonl"
    rules.write_text('[rules.decontamination]\nagainst = ["hf://o/n/data/test-00000.jsonl"]\nwords = 2\n')
    data.write_bytes(lines("what is held out is asked later", "the others are learned"))
    assert read(address, tmp_path, data, rules).startswith("['the others are learned', 'the others are learned']")


@pytest.mark.parametrize("name", ["hf://o/other", "hf://o/n/gone.jsonl", "hf://o/n/nothing"])
def test_a_name_that_the_hub_does_not_have(address, tmp_path, name):
    said = read(address, tmp_path, name)
    assert said.count("\n") == 1
    assert name.removeprefix("hf:").strip("/") in said


def test_without_network_or_package(monkeypatch):
    with raises_user_error(where="hf://owner/name", next_step="network"):
        list_files(["hf://owner/name"])
    with raises_user_error(where="hf://owner", wanted="hf://OWNER/NAME"):
        list_files(["hf://owner"])
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with raises_user_error(where="hf://owner/name", next_step='pip install "penjing[hub]"'):
        list_files(["hf://owner/name"])
