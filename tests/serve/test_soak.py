"""D7: a server that has answered thousands, some of whom left, is no larger than one that has answered hundreds.

The deep test soaks `penjing serve`, a process of its own, for PENJING_SOAK_SECONDS: two minutes, or 3600 for the hour.
"""

import os
import random
import socket
import time
from pathlib import Path

import httpx
import pytest
from serving import free_port, process, request_bytes

SECONDS = float(os.environ.get("PENJING_SOAK_SECONDS", "120"))
PACE = 0.05  # seconds from one request to the next, so that an hour of it leaves the machine to others


def resident(pid="self"):
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def things(pid="self"):
    """Open files, and threads."""
    return len(os.listdir(f"/proc/{pid}/fd")) + len(os.listdir(f"/proc/{pid}/task"))


class Mixture:
    """Requests of every kind: whole, streamed, held to JSON, wrong, and of somebody who leaves without reading."""

    def __init__(self, url, model):
        patient = httpx.HTTPTransport(retries=5)  # a server tells its address a moment before it listens
        self.http = httpx.Client(base_url=url, timeout=60, transport=patient)
        self.model, self.draw, self.sent = model, random.Random(1), 0

    def send(self):
        kind, self.sent = self.sent % 4, self.sent + 1
        body = {"model": self.model, "messages": [{"role": "user", "content": f"so it is {self.sent}"}]}
        body |= {"seed": self.sent, "max_tokens": self.draw.randint(1, 24), "n": self.draw.choice([1, 1, 3])}
        if kind == 0:
            body |= {"response_format": {"type": "json_object"}}
        if kind == 1:
            body |= {"temperature": -1}
        if kind == 3:
            with socket.create_connection(("127.0.0.1", self.http.base_url.port)) as line:
                line.sendall(request_bytes(self.http.base_url.port, body | {"stream": True}))
            return
        answer = self.http.post("/v1/chat/completions", json=body | {"stream": kind == 2})
        assert answer.status_code == (400 if kind == 1 else 200)


@pytest.mark.parametrize(
    "requests", [pytest.param(120, marks=pytest.mark.usual), pytest.param(20_000, marks=pytest.mark.nightly)]
)
def test_memory_stays_as_it_is(start, make_served, requests, count):
    with start(make_served("chat"), max_tokens=32) as running:
        clients = Mixture(running.url, "chat")
        for number in range(requests):
            if number == requests // 4:
                running.idle()
                before, open_before = resident(), things()
            clients.send()
        running.idle()
        assert resident() - before < max(0.05 * before, 20 << 20)
        assert things() - open_before <= 8
        hub, limit = running.hub, time.monotonic() + 60  # a slow server reads the last request, of one who left, later
        while any(hub._jobs.values()) or hub._open or hub._open_of_client:
            assert time.monotonic() < limit, (hub._jobs, hub._open, hub._open_of_client)
            time.sleep(0.01)
        count("requests", clients.sent)


@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.nightly
def test_memory_over_a_long_time(folder, count):
    """What a process has after a quarter of the time, it has at the end."""
    port, seen = free_port(), []  # bytes and things, sixty times
    with process(folder, "--port", str(port)) as (child, _):
        clients = Mixture(f"http://127.0.0.1:{port}", folder.name)
        began = time.monotonic()
        while (now := time.monotonic() - began) < SECONDS:
            if now >= SECONDS * len(seen) / 60:
                seen.append((resident(child.pid), things(child.pid)))
                print(f"{now:.0f} s, {clients.sent} requests: {seen[-1][0] / 2**20:.1f} MiB", flush=True)
            clients.send()
            time.sleep(PACE)
        settled, open_before = map(max, zip(*seen[:15], strict=True))
        assert resident(child.pid) - settled < 0.05 * settled
        assert things(child.pid) - open_before <= 8
        count("seconds of soak", int(SECONDS))
        count("requests", clients.sent)
