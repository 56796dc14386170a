"""What stands before every route: the key, the Host header, the kind and size of the body. Plain ASGI."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penjing.serve.errors import ApiError
from penjing.serve.limits import MAX_BODY_BYTES

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Guard:
    """Refuses requests before any route sees them.

    key: asked for everywhere but on `open_paths`; empty: no key. loopback_only: whether the server listens for this
    machine alone; then a Host header of another name comes from a page that made its name point here (DNS rebinding).
    A POST must say that it is JSON: a form of another site cannot, and its script may not without our leave (CORS).
    answered: told of each answer's status.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str,
        loopback_only: bool,
        open_paths: Collection[str],
        answered: Callable[[Scope, int], None],
    ) -> None:
        self.app, self.key, self.answered = app, key.encode(), answered
        self.loopback_only, self.open_paths = loopback_only, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answered(scope, message["status"])
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                body = await read_json_body(headers, receive)
                receive = _replay(body, receive)
        except ApiError as error:
            await error.response(scope, receive, counted)
        except ConnectionError:
            return  # nobody is there to answer
        else:
            await self.app(scope, receive, counted)

    def _check_host(self, headers: Headers) -> None:
        if not self.loopback_only:
            return
        hosts = headers.getlist("host")
        if len(hosts) != 1 or host_name(hosts[0]) not in LOOPBACK:
            raise ApiError(403, "this server answers to localhost only: wrong Host header", code="wrong_host")

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self.key or path in self.open_paths:
            return
        given = headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1"), self.key):
            raise ApiError(401, "wrong or missing API key; send Authorization: Bearer KEY", code="invalid_api_key")


def host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


async def read_json_body(headers: Headers, receive: Receive) -> bytes:
    """The whole body. Raises ApiError while it is read, and ConnectionError if the client leaves.

    How long it may take is watched by the connection (serve/connection.py).
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "send Content-Type: application/json", code="wrong_content_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(400, "send the body uncompressed", code="wrong_content_encoding")
    too_large = ApiError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes", code="body_too_large")
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or len(length) > 18 or int(length) > MAX_BODY_BYTES:
        raise too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` for an app that has yet to read the body; after it comes what the connection says."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
