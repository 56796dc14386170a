"""A server that speaks the chat page's API, with answers from a script: what no small model says when it is asked to.

The files of the page come from the package, with the headers that `penjing serve` sends, except that a browser may keep
them: a test loads the page in half the time.
"""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import penjing

PAGE = Path(penjing.__file__).parent / "serve" / "page"
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MODELS = {
    "chat": {
        "answers": True,
        "thinking": True,
        "context": 640,
        "step": 30,
        "adapters": [],
        "parameters": 1_067_136,
        "examples": ["Own question?", "自己的问题？"],
    },
    "base": {"answers": False, "thinking": False, "context": 640, "step": 10, "adapters": [], "parameters": 1_067_136},
}
TOOL = {"type": "function", "function": {"name": "calculator", "description": "Work out.", "parameters": {}}}
END = "<|im_end|>"
CONTROL = ("<think>", "</think>", "<tool_call>", "</tool_call>", END)
ATTACK = (
    '<script>window.hit = 1</script> <img src=x onerror="window.hit = 1"> <svg onload="window.hit = 1"></svg>\n\n'
    "[click](javascript:window.hit=1) [data](data:text/html,<script>window.hit=1</script>) "
    "![p](javascript:window.hit=1)\n\n"
    '<a href="javascript:window.hit=1">a</a> [good](https://example.org/) '
    '[quote](https://example.org/"onmouseover=window.hit=1)\n\n'
    "| <b onclick=window.hit=1>h</b> | b |\n|---|---|\n| <iframe src=javascript:window.hit=1></iframe> | `<i>` |\n\n"
    "```html\n<script>window.hit = 1</script>\n```\n"
)
CODE = "Look:\n\n```python\nx = " + "'a very long line of code' + " * 60 + "''\n```\n"
MATH = (
    "By $a^2 + b^2$ and \\(x_1\\):\n\n\\[\n\\frac{1}{2}\n- \\sqrt{3}\n\\]\n\nIt costs $5 and $6. "
    "$\\text{<img src=x onerror=window.hit=1>}$ $\\href{javascript:window.hit=1}{x}$\n\n"
    "1. one\n2. two\n- other\n\n[a](https://example.org/a_(b)) <https://example.org/c>\n\n"
    "| a | b |\n|---|---|\n| `x|y` | 2 |\n\n```html\n<b onclick=window.hit=1>'\"</b>\n```\n"
)
MARKDOWN = (
    "# Big\n\nSome **bold**, *soft*, `code` and [a link](https://example.org).\n\n- one\n- two\n  1. deep\n\n> said\n\n"
    "| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint(1 < 2)\n```\n"
)


def pieces_of(text: str) -> list[bytes]:
    """A text as tokens: words with the blank before them."""
    return [part.encode() for part in (text[:1] + text[1:].replace(" ", "\0 ")).split("\0")]


def answer_to(messages: list[dict], tools: list) -> list:
    """The tokens of an answer: bytes, or the name of a control token."""
    asked = next(message["content"] for message in reversed(messages) if message["role"] == "user")
    if messages[-1]["role"] == "tool":
        return [*pieces_of(f"It is {messages[-1]['content']}."), END]
    said = {
        "think": ["<think>", *pieces_of("Let me see."), "</think>", *pieces_of("Yes."), END],
        "attack": [*pieces_of(ATTACK), END],
        "markdown": [*pieces_of(MARKDOWN), END],
        "bytes": [b"\xe7", b"\x9b\x86", "景".encode(), b" ok", END],
        "only": ["<think>", *pieces_of("Let me see."), "</think>", END],
        "code": [*pieces_of(CODE), END],
        "math": [*pieces_of(MATH), END],
        "cut": [*pieces_of("It is cut"), "cut"],
        "slow": [f" w{number}".encode() for number in range(2000)],
        "long": [*pieces_of(" ".join(f"word{number}" for number in range(60))), END],
        "deep": [b"> - " * 5000, b"\n" + b"**a [b](" * 5000, END],
        "two lines": [*pieces_of("One. Two three"), END],
    }
    if asked == "calculate" and tools:
        call = json.dumps({"name": tools[0]["function"]["name"], "arguments": {"expression": "6*7"}})
        return ["<tool_call>", *pieces_of(call), "</tool_call>", END]
    return said.get(asked, [*pieces_of(f"You said {asked}"), END])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        name = self.path.removeprefix("/") or "index.html"
        if "/" not in name and (PAGE / name).is_file():
            kind = KINDS[Path(name).suffix]
            headers = {"Content-Type": kind, "Content-Security-Policy": POLICY, "Cache-Control": "max-age=3600"}
            return self.reply(200, (PAGE / name).read_bytes(), headers)
        if self.refused():
            return None
        if self.path == "/v1/models":
            return self.reply(200, {"data": [{"id": name, "penjing": facts} for name, facts in MODELS.items()]})
        if self.path == "/api/tools":
            return self.reply(200, {"tools": self.server.tools})
        return self.reply(404, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        if self.path != "/tokenize":
            self.server.requests.append((self.path, body))
        if self.path == "/tokenize":
            texts = [body["prompt"]] if "prompt" in body else [one["content"] for one in body["messages"]]
            self.reply(200, {"count": sum(map(len, texts)), "max_model_len": 640})
        elif self.path == "/api/tools/call":
            result = str(eval(body["arguments"]["expression"], {}))  # noqa: S307  # of this file
            self.reply(200, {"text": result, "is_answer": body["name"] == "calc"})
        elif self.server.busy:
            self.server.busy -= 1
            self.reply(429, {"error": {"message": "busy"}}, {"Retry-After": "1"})
        elif len(body.get("messages", ())) > 5:
            self.reply(400, {"error": {"message": "messages: too long", "code": "context_length_exceeded"}})
        elif "wrong" in json.dumps(body.get("messages")):
            self.reply(400, {"error": {"message": "messages: 99 tokens, too long"}})
        else:
            try:
                self.stream(body, chat="messages" in body)
            except (BrokenPipeError, ConnectionResetError):
                self.server.left.set()

    def refused(self) -> bool:
        right = not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}"
        if not right:
            self.reply(401, {"error": {"message": "wrong key"}})
        return not right

    def reply(self, status, content, headers=()):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **dict(headers), "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    # --- a stream ----------------------------------------------------------------------------------------------------

    def entry(self, piece, logp):
        number = self.server.ids.setdefault(piece, len(self.server.ids))
        if isinstance(piece, str):
            return {"token": piece, "id": number, "logprob": logp, "bytes": None}
        return {"token": piece.decode(errors="replace"), "id": number, "logprob": logp, "bytes": list(piece)}

    def chunk(self, value):
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def stream(self, body, *, chat):
        if chat:
            tokens = answer_to(body["messages"], body.get("tools") or [])
        else:
            tokens = [*pieces_of(" and then it rained"), END]
        given = body.get("continue_ids") or []
        if given:
            tokens = [*pieces_of(" went on"), END]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        deltas, kind = Deltas(), "content"
        for number, piece in enumerate(tokens):
            logp = -0.05 if number % 3 else -2.5
            if piece == "cut":
                break
            entry = self.entry(piece, logp)
            others = [b" cat", END, b"\xe7\xa3\xa8", b"\n", b" a", b" b"]
            ranked = [(piece, -0.05), *((other, -3.0 - place) for place, other in enumerate(others))]
            if not number % 3:
                ranked = [(b" cat", -0.3), (piece, -2.5), *ranked[2:]]
            entry["top_logprobs"] = [self.entry(*pair) for pair in ranked]
            kind, delta = deltas.add(piece, kind)
            said = {"delta": delta} if chat else {"text": delta.get("content", "")}
            scores = {"end": entry} if piece == END else {"content": [entry]}
            self.chunk({"choices": [{"index": 0, **said, "logprobs": scores, "finish_reason": None}]})
            if len(tokens) > 1000:
                time.sleep(0.01)
            if piece == b" breaks" and not given:  # as where the server is killed
                time.sleep(0.3)  # what a browser has not read when a connection breaks, it drops
                return self.connection.shutdown(socket.SHUT_RDWR)
        finish = "length" if tokens[-1] == "cut" else "tool_calls" if deltas.calls else "stop"
        self.chunk({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": finish}]})
        used = {"time_to_first_token_s": 0.021, "tokens_per_second": 1234.5, "context_used": 32, "context": 640}
        self.chunk({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 24}, "penjing": used})
        self.chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


class Deltas:
    """What a stream says of tokens: whole characters, by kind; a call once it is closed."""

    def __init__(self):
        self.rest, self.call, self.calls = b"", b"", 0

    def add(self, piece, kind):
        if isinstance(piece, str):
            if piece == "</tool_call>":
                said = json.loads(self.call)
                function = {"name": said["name"], "arguments": json.dumps(said["arguments"])}
                self.calls += 1
                return "content", {
                    "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]
                }
            return {"<think>": "reasoning", "</think>": "content", "<tool_call>": "call"}.get(piece, kind), {}
        if kind == "call":
            self.call += piece
            return kind, {}
        self.rest += piece
        try:
            text, self.rest = self.rest.decode(), b""
        except UnicodeDecodeError:
            return kind, {}
        return kind, {"reasoning_content" if kind == "reasoning" else "content": text}


class PageServer(ThreadingHTTPServer):
    """requests: what was posted. busy: how many requests are refused first. left: set when a client closed a stream."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.ids = {}
        self.reset()
        self.url = f"http://127.0.0.1:{self.server_port}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self):
        self.requests, self.busy, self.key, self.tools, self.left = [], 0, "", [], threading.Event()

    def asked(self, kind="chat"):
        """The bodies of the chats or completions that were asked for."""
        return [body for path, body in self.requests if path == f"/v1/{'chat/' * (kind == 'chat')}completions"]
