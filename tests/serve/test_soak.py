"""D7: a server that has answered thousands, some of whom left, is no larger than one that has answered hundreds."""

import json
import os
import random
import socket
from pathlib import Path

import pytest


def resident():
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def things():
    """Open files, and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(
    "requests", [pytest.param(120, marks=pytest.mark.usual), pytest.param(20_000, marks=pytest.mark.nightly)]
)
def test_memory_stays_as_it_is(start, make_served, requests, count):
    draw = random.Random(1)
    with start(make_served("chat"), max_tokens=32) as running:

        def one(number):
            body = {"seed": number, "max_tokens": draw.randint(1, 24), "n": draw.choice([1, 1, 3])}
            kind = number % 4
            if kind == 0:
                body |= {"response_format": {"type": "json_object"}}
            if kind == 1:
                body |= {"temperature": -1}
            if kind < 3:
                assert running.chat(**body, stream=bool(number % 2)).status_code in (200, 400)
                return
            text = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "so"}], "stream": True} | body)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n"
            with socket.create_connection(("127.0.0.1", running.port)) as line:  # leaves without reading
                line.sendall(f"{head}Content-Type: application/json\r\n\r\n{text}".encode())

        warm = requests // 4
        for number in range(warm):
            one(number)
        running.idle()
        before, open_before = resident(), things()
        for number in range(warm, requests):
            one(number)
        running.idle()
        assert resident() - before < max(0.05 * before, 20 << 20)
        assert sum(things()) - sum(open_before) <= 8
        assert not running.hub._jobs and not +running.hub._open and not running.hub._open_of_client
        count("requests", requests)
