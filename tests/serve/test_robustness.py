"""Clients that leave, dawdle or flood, keys, signals, and faults of one request: nobody else notices."""

import contextlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from serving import free_port, process, request_bytes
from sse import events
from starlette.routing import Route

from penjing.infer.grammar import JsonMask
from penjing.serve import connection, hub, limits, streams
from penjing.serve.page_files import PAGE

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "so it is"}]}
KEY = "k9-Long-And-Secret"
FLOOD = Path(__file__).with_name("flood.py")


class SlowForward:
    """A model that takes its time for each step."""

    def __init__(self, forward, seconds):
        self.forward, self.seconds = forward, seconds

    def __getattr__(self, name):
        return getattr(self.forward, name)

    def __call__(self, *rows):
        time.sleep(self.seconds)
        return self.forward(*rows)


@pytest.fixture
def slow(start, make_served):
    """A server whose model writes 100 tokens a second, in two slots."""
    served = make_served("chat", slots=2)
    served.engine.forward = SlowForward(served.engine.forward, 0.01)
    with start(served, max_tokens=200) as running:
        yield running


def no_stop(tokenizer, **more):
    """A request that goes on to its last token: no id that would end it may come."""
    bias = {str(index): -100 for index in tokenizer.stop}
    return {**CHAT, "logit_bias": bias, **more}


# --- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the first token", "in the middle", "n>1", "not a stream", "pipelined"])
def test_a_client_that_leaves_frees_its_slot(slow, tokenizer, when):
    """F3: within a second, of 200 tokens that would take two."""
    body = no_stop(tokenizer, max_tokens=200, stream=when != "not a stream", n=2 if when == "n>1" else 1)
    lines = [socket.create_connection(("127.0.0.1", slow.port)) for _ in range(6)]
    for line in lines:
        line.sendall(request_bytes(slow.port, body) * (2 if when == "pipelined" else 1))
    if when in ("in the middle", "n>1"):
        assert lines[0].recv(50).startswith(b"HTTP/1.1 200")
    limit = time.monotonic() + 60
    while not any(each["active"] for each in slow.hub.statistics().values()):
        assert time.monotonic() < limit
        time.sleep(0.001)
    for line in lines:
        line.close()
    before = slow.hub.statistics()["chat"]["tokens_written_total"]
    slow.idle()
    assert slow.hub.statistics()["chat"]["tokens_written_total"] - before < 200  # six would be 1,200 and more
    assert not any(slow.hub._jobs.values()) and not slow.hub._open and not slow.hub._open_of_client
    assert slow.chat(max_tokens=2).status_code == 200


def test_headers_without_end_are_refused(serving):
    with socket.create_connection(("127.0.0.1", serving.port), timeout=60) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 70_000)
        assert line.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.nightly
def test_five_hundred_leave_at_once(start, make_served, tokenizer, count):
    """F3: all in the middle of their streams; every slot is free again within a second."""
    clients = 500
    served = make_served("chat", slots=clients)
    served.engine.forward = SlowForward(served.engine.forward, 0.01)
    with start(served, max_tokens=220) as running:
        lines = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(clients)]
        for number, line in enumerate(lines):
            body = no_stop(tokenizer, max_tokens=220, stream=True)
            line.sendall(request_bytes(running.port, body, f"program {number % 4}"))
        for line in lines:
            said = b""
            while said.count(b"data: ") < 2:  # the first says who speaks, the second what
                said += line.recv(4096)
                assert said.startswith(b"HTTP/1.1 200")
        assert running.hub.statistics()["chat"]["active"] == clients
        before = running.hub.statistics()["chat"]["tokens_written_total"]
        for line in lines:
            line.close()
        began = time.monotonic()
        running.idle()
        print(f"all slots free after {time.monotonic() - began:.2f} s")
        assert running.hub.statistics()["chat"]["tokens_written_total"] - before < 100 * clients
        assert not any(running.hub._jobs.values()) and not running.hub._open and not running.hub._open_of_client
        assert running.chat(max_tokens=2).status_code == 200
        count("streams left", clients)


def test_a_reader_that_never_reads_is_left_behind(slow, tokenizer, monkeypatch):
    """What waits for it is bounded, and its request ends."""
    monkeypatch.setattr(connection, "SEND_SECONDS", 0.3)
    monkeypatch.setattr(streams, "dumps", lambda value, dumps=streams.dumps: dumps(value) + b" " * 300_000)
    monkeypatch.setattr("penjing.serve.generation.dumps", streams.dumps)
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", slow.port))
        line.sendall(request_bytes(slow.port, no_stop(tokenizer, max_tokens=200, stream=True)))
        time.sleep(0.1)
        slow.idle()
    assert slow.hub.statistics()["chat"]["tokens_written_total"] < 200


@pytest.mark.parametrize("what", ["nothing", "headers", "body", "second request"])
def test_who_sends_byte_by_byte_is_cut_off(start, make_served, monkeypatch, what):
    """F2: slow-loris, with its ten seconds made half of one."""
    monkeypatch.setattr(connection, "READ_SECONDS", 0.5)
    whole = request_bytes(0, {**CHAT, "max_tokens": 2, "user": "long" * 60})
    place = {"nothing": 0, "headers": 30, "body": whole.index(b"\r\n\r\n") + 10, "second request": 30}[what]
    with start(make_served("chat")) as running:
        line = socket.create_connection(("127.0.0.1", running.port))
        line.settimeout(0.1)
        if what == "second request":
            line.sendall(whole)
            assert line.recv(20).startswith(b"HTTP/1.1 200")
            time.sleep(0.05)
        line.sendall(whole[:place])
        began, at = time.monotonic(), place
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 20:
                with contextlib.suppress(TimeoutError):
                    if not line.recv(4096):
                        break
                if what != "nothing":
                    line.sendall(whole[at : at + 1])
                    at += 1
        assert time.monotonic() - began < 20
        assert running.chat().status_code == 200  # others are answered meanwhile


@pytest.mark.nightly
def test_five_hundred_who_send_byte_by_byte(start, make_served, count):
    """F2: half of them headers, half bodies, a byte a second; others are answered all the while."""
    whole = request_bytes(0, {**CHAT, "max_tokens": 2, "user": "long" * 60})
    places = (30, whole.index(b"\r\n\r\n") + 10)
    with start(make_served("chat")) as running:
        idle = [timed(running) for _ in range(50)]
        lines, lived, beside = {}, [], []
        for number in range(500):
            line = socket.create_connection(("127.0.0.1", running.port))
            line.sendall(whole[: places[number % 2]])
            line.setblocking(False)
            lines[line] = (time.monotonic(), places[number % 2])
        limit, tick = time.monotonic() + 60, 0.0
        while lines:
            assert time.monotonic() < limit
            beside.append(timed(running))
            is_second = time.monotonic() - tick >= 1
            tick = time.monotonic() if is_second else tick
            for line, (began, at) in list(lines.items()):
                with contextlib.suppress(BlockingIOError):
                    try:
                        if is_second:
                            line.send(whole[at : at + 1])
                            lines[line] = (began, at + 1)
                        is_open = bool(line.recv(4096))
                    except ConnectionError:
                        is_open = False
                    if not is_open:
                        lived.append(time.monotonic() - began)
                        del lines[line]
                        line.close()
            time.sleep(0.02)
        print(f"closed after {min(lived):.1f} to {max(lived):.1f} s; an answer beside them, p95:", end=" ")
        print(*(f"{1000 * sorted(each)[len(each) * 95 // 100]:.0f} ms" for each in (idle, beside)))
        assert len(lived) == 500
        count("slow clients", len(lived))


def timed(running):
    """Seconds of a short answer."""
    began = time.perf_counter()
    assert running.chat(max_tokens=2).status_code == 200
    return time.perf_counter() - began


# --- queues ----------------------------------------------------------------------------------------------------------


def test_who_comes_when_the_queue_is_full_is_told_at_once(start, make_served, tokenizer, monkeypatch):
    """F1: 429 with Retry-After; one client cannot take every place."""
    monkeypatch.setattr(hub, "MAX_WAITING", 6)
    served = make_served("chat", slots=2)
    served.engine.forward = SlowForward(served.engine.forward, 0.02)
    with start(served, max_tokens=100) as running:
        body = no_stop(tokenizer, max_tokens=100, stream=True)
        lines = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(4)]
        for line in lines:
            line.sendall(request_bytes(running.port, body))
            line.recv(20)
        full = httpx.post(f"{running.url}/v1/chat/completions", json=CHAT, headers={"User-Agent": ""})
        assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
        assert int(full.headers["Retry-After"]) >= 1
        with socket.create_connection(("127.0.0.1", running.port)) as line:  # before the body is there
            line.sendall(request_bytes(running.port, body).partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            assert line.recv(20).startswith(b"HTTP/1.1 429")
        assert running.chat(max_tokens=1).status_code == 200  # another client
        for line in lines:
            line.close()
        running.idle()
        assert httpx.post(f"{running.url}/v1/chat/completions", json=CHAT | {"max_tokens": 1}).status_code == 200


def test_one_client_does_not_starve_another(slow, tokenizer):
    """Who asks once does not wait for all that another has asked before."""
    many = threading.Thread(target=slow.chat, kwargs=no_stop(tokenizer, n=16, max_tokens=20))
    many.start()
    while not slow.hub.statistics()["chat"]["waiting"] + slow.hub.statistics()["chat"]["active"]:
        time.sleep(0.001)
    one = httpx.post(f"{slow.url}/v1/chat/completions", json={**CHAT, "max_tokens": 1}, headers={"User-Agent": "b"})
    assert one.status_code == 200
    assert any(slow.hub.statistics()["chat"][name] for name in ("waiting", "active"))  # the many are not through
    many.join()


def p99(seconds):
    return sorted(seconds)[len(seconds) * 99 // 100] if seconds else 0.0


def flood(running, clients, seconds, body):
    """What flood.py tells of so many streams, begun within so many seconds."""
    words = [sys.executable, str(FLOOD), str(running.port), str(clients), str(seconds)]
    done = subprocess.run(words, input=json.dumps(body), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("clients", "seconds"),
    [
        pytest.param(60, 0, marks=pytest.mark.usual),
        pytest.param(1000, 0, marks=pytest.mark.nightly),
        pytest.param(1000, 1, marks=pytest.mark.nightly),
    ],
)
def test_many_streams_at_once(start, make_served, tokenizer, clients, seconds, count):
    """F1: nobody is mixed up with anybody, who is turned away is told so, and health is answered all the time."""
    with start(make_served("chat", slots=8)) as running:
        body = no_stop(tokenizer, max_tokens=16 if clients < 100 else 64, stream=True)
        told = flood(running, clients, seconds, body)
        running.idle()
        assert all(status in (429, 503) and wait >= 1 for status, wait, _ in told["refused"])
        assert told["health"] and all(len(set(said)) == 1 for said in told["texts"].values())
        on_response = sum(map(len, told["texts"].values()))
        assert on_response + len(told["refused"]) == clients and on_response >= min(clients, 264)
        count("streams", on_response)
        count("refused", len(told["refused"]))
        for name, took in (("refused", [each[2] for each in told["refused"]]), ("health", told["health"])):
            slowest, tail = 1000 * max(took, default=0), 1000 * p99(took)
            print(f"{name}: {len(took)}, slowest {slowest:.0f} ms, p99 {tail:.0f} ms")
        print(f"the client was away for {1000 * told['away']:.0f} ms at the most")


# --- the key ---------------------------------------------------------------------------------------------------------

BAD_KEYS = {
    "none": {},
    "wrong": {"Authorization": "Bearer wrong"},
    "prefix": {"Authorization": f"Bearer {KEY[:-1]}"},
    "longer": {"Authorization": f"Bearer {KEY}x"},
    "empty": {"Authorization": "Bearer"},
    "other case": {"Authorization": f"Bearer {KEY.swapcase()}"},
    "no scheme": {"Authorization": KEY},
    "basic": {"Authorization": f"Basic {KEY}"},
    "bearer twice": {"Authorization": f"Bearer Bearer {KEY}"},
    "not ASCII": {"Authorization": b"Bearer \xff\xfe"},
    "long": {"Authorization": "Bearer " + "x" * 60_000},
    "elsewhere": {"X-Api-Key": KEY},
}


def test_every_route_asks_for_the_key(start, make_served, caplog):
    """F7: every route of the app, with every way of not having the key; only those meant to be open are."""
    caplog.set_level(logging.DEBUG, logger="uvicorn")
    with start(make_served("chat"), key=KEY, loopback_only=False) as running:
        routes = [route for route in running.app.routes if isinstance(route, Route)]
        paths = {each.path for each in routes}
        assert {"/v1/chat/completions", "/metrics", "/openapi.json", "/api/tools/call"} <= paths
        open_paths = {"/", "/health", *(f"/{file.name}" for file in PAGE.iterdir())}
        seen = ""
        for path in [*(re.sub(r"\{.*\}", "chat", each.path) for each in routes), "/nothing", "/docs"]:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
                for name, headers in BAD_KEYS.items() if path not in open_paths else ():
                    answer = running.http.request(method, path, headers=headers)
                    assert answer.status_code == 401, (path, method, name)
                    seen += answer.text
        with httpx.Client(base_url=running.url) as http:
            assert http.get(f"/v1/models?api_key={KEY}").status_code == 401
            twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")]
            assert http.get("/v1/models", headers=twice).status_code == 401
            for scheme in ("Bearer", "bearer"):
                headers = {"Authorization": f"{scheme} {KEY}", "Host": "x.org"}
                assert http.get("/v1/models", headers=headers).status_code == 200
            assert http.get("/health").status_code == 200
            too_long = http.get("/v1/models", headers={"Authorization": "Bearer " + "x" * 1_000_000})
            assert too_long.status_code in (400, 401, 431)
        assert KEY not in seen and KEY not in caplog.text


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_fault_in_one_request_is_its_own(serving, monkeypatch):
    """F13: the batch goes on, and nothing is told of the inside."""
    monkeypatch.setattr(JsonMask, "accept", lambda self, index: 1 / 0)
    texts = {}

    def well():
        texts["well"] = serving.chat(seed=3, max_tokens=30).json()["choices"][0]["message"]

    alone = serving.chat(seed=3, max_tokens=30).json()["choices"][0]["message"]
    thread = threading.Thread(target=well)
    thread.start()
    broken = serving.chat(response_format={"type": "json_object"})
    streamed = serving.chat(response_format={"type": "json_object"}, stream=True)
    thread.join()
    assert texts["well"] == alone
    assert broken.status_code == 500 and broken.json()["error"]["type"] == "server_error"
    (last,) = [chunk for chunk in events(streamed.text) if "error" in chunk]
    for text in (broken.text, streamed.text):
        assert "division" not in text and "Traceback" not in text
    assert last["error"]["code"] == "internal_error"


def test_a_pass_without_memory_ends_one_request(start, make_served, monkeypatch):
    """F13: the answers that do not fit wait; one that never fits is told so."""
    served = make_served("chat")
    forward = served.engine.forward

    class Full(SlowForward):
        def __call__(self, slots, *rows):
            if len(slots) > 40:
                raise MemoryError
            return forward(slots, *rows)

    served.engine.forward = Full(forward, 0)
    with start(served) as running:
        assert running.chat(messages=[{"role": "user", "content": "12" * 60}]).status_code == 500
        assert running.chat().status_code == 200


def test_a_request_does_not_wait_for_ever(slow, tokenizer, monkeypatch):
    monkeypatch.setattr(hub, "REQUEST_SECONDS", 0.2)
    late = slow.chat(**no_stop(tokenizer, max_tokens=200))
    assert late.status_code == 503 and late.json()["error"]["code"] == "timeout"
    slow.idle()


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_killed_it_starts_again_and_told_to_stop_it_finishes_what_runs(folder):
    """F12: killed in the middle of a stream, it starts again at the same port; on SIGTERM nothing new is accepted,
    streams end as they should, and the exit code is 0. The key is nowhere to be seen."""
    port = free_port()
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {KEY}"}
    ask = {"model": "kite", "messages": CHAT["messages"], "stream": True, "max_tokens": 400, "n": 8}

    def streaming():
        return httpx.stream("POST", f"{url}/v1/chat/completions", json=ask, headers=headers, timeout=60)

    with process(folder, "--port", str(port), PENJING_API_KEY=KEY) as (child, said):
        assert url in said and "kite" in said and KEY not in said
        with open(f"/proc/{child.pid}/cmdline", "rb") as words:
            assert KEY.encode() not in words.read()
        with streaming() as response:
            next(response.iter_text())
            child.kill()
    with process(folder, "--port", str(port), PENJING_API_KEY=KEY) as (child, said):
        with streaming() as response:
            parts = response.iter_text()
            first = next(parts)
            child.send_signal(signal.SIGTERM)
            limit = time.monotonic() + limits.DRAIN_SECONDS - 5
            with contextlib.suppress(httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                while time.monotonic() < limit:
                    httpx.get(f"{url}/health", timeout=30)
                    time.sleep(0.01)
            assert time.monotonic() < limit
            chunks = events(first + "".join(parts))
        ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert len(ends) == 8
        assert child.wait(40) == 0
        rest = child.stdout.read()
        assert KEY not in rest and "Traceback" not in rest


def test_what_cannot_be_served_is_told_in_a_line(folder, penjing, tmp_path):
    """F8 and names: another address without a key, a port in use, a model that is not there, two of one name."""
    for words, about in (
        ((folder, "--host", "0.0.0.0"), "key"),
        ((folder, "--host", "192.168.7.7"), "key"),
        ((tmp_path / "nothing",), "nothing"),
        ((folder, folder, "--port", 0), "kite"),
        ((f"{folder}@12", "--port", 0), "kite"),
        ((folder, "--tools", "nonsense", "--port", 0), "nonsense"),
    ):
        done = penjing("serve", *words, check=False, PENJING_API_KEY="")
        assert done.returncode == 2 and about in done.stderr and len(done.stderr.splitlines()) < 5, done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = penjing("serve", folder, "--port", taken.getsockname()[1], check=False)
        assert done.returncode == 2 and "port" in done.stderr


def test_limits_say_what_they_are():
    assert limits.READ_SECONDS <= 10 and limits.DRAIN_SECONDS <= 30
