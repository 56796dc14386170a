"""Blind votes between two loaded checkpoints: the page sees two answers in a random order, and names after the vote."""

import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from fastapi import FastAPI

from penjing.base.files import disk_errors
from penjing.serve.errors import ApiError
from penjing.ui.bradley_terry import Vote, strengths
from penjing.ui.processes import Chats
from penjing.ui.site import Body, Site, text_field

VOTES = "votes.jsonl"  # in the app's folder: a line for each vote, never rewritten
SCORES = {"a": 1.0, "b": 0.0, "tie": 0.5, "bad": 0.5}  # of a; bad: both are
SAMPLING = {"temperature": 0.5, "top_p": 0.95, "max_tokens": 256}  # as the chat page has it at first
MOST_OPEN = 100  # questions without a vote; older ones are forgotten
SECONDS = 300.0  # for an answer
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # the servers are on this machine


def add_routes(app: FastAPI, site: Site, chats: Chats) -> None:
    """Routes below /api/blind."""
    votes = BlindVotes(site, chats)

    app.get("/api/blind")(votes.standing)
    app.post("/api/blind/ask")(votes.ask)
    app.post("/api/blind/vote")(votes.vote)


class BlindVotes:
    """Questions that wait for a vote, and the file of votes."""

    def __init__(self, site: Site, chats: Chats) -> None:
        self.path, self.chats = site.folder / VOTES, chats
        self._asked: dict[str, dict[str, str]] = {}

    def ask(self, body: Body) -> dict[str, str]:
        """Answers a and b of the pair `first` and `second`, each RUN@STEP, and the id to vote with. Raises ApiError."""
        loaded = {f"{chat['run']}@{chat['step']}": chat["address"] for chat in self.chats.list()}
        pair, question = [text_field(body, "first"), text_field(body, "second")], text_field(body, "question")
        missing = [name for name in pair if not loaded.get(name)]
        if missing or pair[0] == pair[1]:
            raise ApiError(409, f"two loaded checkpoints are required: {', '.join(missing or pair)[:200]}")
        secrets.SystemRandom().shuffle(pair)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda name: _answer(loaded[name], question), pair))
        asked = dict(zip(("a", "b", "answer_a", "answer_b"), (*pair, *answers), strict=True))
        name = secrets.token_urlsafe(12)
        self._asked[name] = {"question": question, **asked}
        for old in list(self._asked)[:-MOST_OPEN]:
            self._asked.pop(old, None)
        return {"id": name, "a": asked["answer_a"], "b": asked["answer_b"]}

    def vote(self, body: Body) -> dict[str, Any]:
        """Keep a vote; tells who a and b were, and the new standing. Raises ApiError."""
        choice = text_field(body, "vote")
        if choice not in SCORES:
            raise ApiError(400, f"vote: {', '.join(SCORES)} are possible", param="vote")
        name = text_field(body, "id")
        asked = self._asked.get(name)
        if asked is None:
            raise ApiError(404, "this question has its vote, or was asked too long ago", param="id")
        line = {"at": datetime.now().astimezone().isoformat(timespec="seconds"), **asked, "vote": choice}
        with disk_errors(self.path):
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            with os.fdopen(handle, "r+b", buffering=0) as file:
                is_cut = file.seek(0, os.SEEK_END) and os.pread(handle, 1, file.tell() - 1) != b"\n"
                file.write(b"\n" * bool(is_cut) + json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._asked.pop(name, None)  # a vote that could not be written may be given again
        return {"a": asked["a"], "b": asked["b"], **self.standing()}

    def standing(self) -> dict[str, Any]:
        """{"groups": [[strength]]}, of the checkpoints that votes connect."""
        return {"groups": [[row._asdict() for row in group] for group in strengths(self.read())]}

    def read(self) -> list[Vote]:
        """The file's votes; other lines are left out."""
        votes: list[Vote] = []
        if not self.path.is_file() or self.path.is_symlink():
            return votes
        for line in self.path.read_bytes().splitlines():
            try:
                vote = json.loads(line)
                first, second, score = vote["a"], vote["b"], SCORES[vote["vote"]]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(first, str) and isinstance(second, str) and first != second:
                votes.append((first, second, score))
        return votes


def _answer(address: str, question: str) -> str:
    """What the one model of a chat server says. Raises ApiError."""
    try:
        model = _json(f"{address}v1/models")["data"][0]
        body = {"model": model["id"], **SAMPLING}
        if not model["penjing"]["answers"]:
            return str(_json(f"{address}v1/completions", {**body, "prompt": question})["choices"][0]["text"]).strip()
        messages = [{"role": "user", "content": question}]
        reply = _json(f"{address}v1/chat/completions", {**body, "messages": messages})
        return str(reply["choices"][0]["message"]["content"] or "").strip()
    except urllib.error.HTTPError as error:
        raise ApiError(502, json.load(error)["error"]["message"]) from None
    except (OSError, ValueError, LookupError) as error:
        raise ApiError(502, f"a model's server did not answer: {error}") from None


def _json(address: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with _open(urllib.request.Request(address, data, {"Content-Type": "application/json"}), timeout=SECONDS) as reply:
        return json.load(reply)
