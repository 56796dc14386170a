"""Middleware before every route: checks the Host header, the API key, and the queue. Plain ASGI."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penjing.serve.errors import ApiError
from penjing.serve.hub import queue_full

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUEUE_FULL = queue_full().response


class Guard:
    """Rejects requests before any route handles them.

    key: required on all paths but `open_paths`; empty: no key. loopback_only: the server listens on this machine only.
    Then another name in the Host header is a DNS rebinding attack. If the queue is full, a request is rejected before
    its body is read. on_response: called with each response's status.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str,
        loopback_only: bool,
        open_paths: Collection[str],
        on_response: Callable[[Scope, int], None],
    ) -> None:
        self.app, self.key, self.on_response = app, key.encode(), on_response
        self.loopback_only, self.open_paths = loopback_only, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.on_response(scope, message["status"])
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
        except ApiError as error:
            await error.response(scope, receive, send_counted)
            return
        is_generation = scope["path"] in (CHAT, COMPLETIONS)
        is_full = is_generation and scope["app"].state.service.hub.is_full(client_of(scope, headers))
        await (QUEUE_FULL if is_full else self.app)(scope, receive, send_counted)

    def _check_host(self, headers: Headers) -> None:
        if not self.loopback_only:
            return
        hosts = headers.getlist("host")
        if len(hosts) != 1 or host_name(hosts[0]) not in LOOPBACK:
            raise ApiError(403, "this server answers to localhost only: wrong Host header", code="wrong_host")

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self.key or path in self.open_paths:
            return
        values = headers.getlist("authorization")
        scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1"), self.key):
            raise ApiError(401, "wrong or missing API key; send Authorization: Bearer KEY", code="invalid_api_key")


def client_of(scope: Scope, headers: Headers) -> str:
    """The client's address; on loopback, where all clients share it, the user agent too."""
    host: str = scope["client"][0] if scope.get("client") else ""
    return f"{host} {headers.get('user-agent', '')[:100]}" if host in LOOPBACK else host


def host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
