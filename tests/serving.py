"""`penjing serve` as a process of its own, and requests as bytes."""

import contextlib
import json
import os
import socket
import subprocess
import sys

from forks import ENVIRONMENT


@contextlib.contextmanager
def process(folder, *options, **environment):
    """A server that has told its address, and what it said until then."""
    child = subprocess.Popen(
        [sys.executable, "-m", "penjing", "serve", str(folder), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **ENVIRONMENT, **environment},
    )  # fmt: skip
    try:
        lines = []
        for line in child.stdout:
            lines.append(line)
            if line.startswith("curl"):
                break
        yield child, "".join(lines)
    finally:
        child.kill()
        child.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as line:
        return line.getsockname()[1]


def request_bytes(port, body, program=""):
    """A POST to /v1/chat/completions, as this program would send it."""
    text = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    head += f"User-Agent: {program}\r\n" if program else ""
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text
