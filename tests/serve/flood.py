"""So many streams at once, from a process of its own with one thread and plain sockets.

    python flood.py PORT CLIENTS SECONDS < BODY.json

The clients come one after another within so many seconds; 0: in one instant. Client k asks with the seed k % 50 and
says that it is program k % 50. GET /health is asked every 20 ms meanwhile, each time on a new connection. Prints JSON:
refusals as [status, Retry-After, seconds to the first byte], seconds of each /health, texts by seed, and `away`, the
longest time this process did not look at its sockets: what of any latency may be its own.
"""

import json
import re
import resource
import select
import socket
import sys
import time

KINDS, HEALTH_SECONDS, PATIENCE = 50, 0.02, 300


class Line:
    """A connection with one request. number: of the client; -1 asks for /health."""

    def __init__(self, port, request, number):
        self.number, self.data, self.first = number, b"", 0.0
        self.socket = socket.socket()
        self.began = time.perf_counter()
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(request)
        self.socket.setblocking(False)

    def read(self):
        """Whether there is more to come."""
        more = self.socket.recv(1 << 16)
        self.first = self.first or time.perf_counter()
        self.data += more
        return bool(more)

    @property
    def seconds(self):
        return self.first - self.began

    @property
    def status(self):
        return int(self.data.split(b" ", 2)[1])


def request(number, body):
    text = json.dumps({**body, "seed": number % KINDS}).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nUser-Agent: program {number % KINDS}\r\n"
        f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    ).encode() + text


def said(data):
    """The text of a stream, which has one id and an end."""
    rest, body = data.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    *chunks, done = re.findall(r"data: (.*)\n\n", body.decode())
    chunks = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def flood(port, clients, seconds, body):
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    requests = [request(number, body) for number in range(clients)]
    poll, lines, ended = select.epoll(), {}, []
    asked, away, looked = 0.0, 0.0, time.perf_counter()
    began, limit = looked, looked + PATIENCE

    def connect(text, number):
        line = Line(port, text, number)
        lines[line.socket.fileno()] = line
        poll.register(line.socket, select.EPOLLIN)

    while (requests or any(line.number >= 0 for line in lines.values())) and looked < limit:
        if time.perf_counter() - asked > HEALTH_SECONDS:
            asked = time.perf_counter()
            connect(health, -1)
        if requests and time.perf_counter() - began >= seconds * (1 - len(requests) / clients):
            connect(requests.pop(), len(requests))
        away = max(away, time.perf_counter() - looked)
        found = poll.poll(min(HEALTH_SECONDS, seconds / clients) if requests else HEALTH_SECONDS)
        looked = time.perf_counter()
        for number, _ in found:
            if not lines[number].read():
                poll.unregister(number)
                ended.append(lines.pop(number))
                ended[-1].socket.close()
    return ended, away


def main():
    port, clients, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ended, away = flood(port, clients, seconds, json.load(sys.stdin))
    told = {"refused": [], "health": [], "texts": {}, "away": away}
    for line in ended:
        if line.number < 0:
            assert line.status == 200
            told["health"].append(line.seconds)
        elif line.status == 200:
            told["texts"].setdefault(line.number % KINDS, []).append(said(line.data))
        else:
            wait = re.search(rb"(?i)retry-after: (\d+)", line.data)
            told["refused"].append([line.status, int(wait[1]) if wait else 0, line.seconds])
    print(json.dumps(told))


if __name__ == "__main__":
    main()
