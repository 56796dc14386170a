"""What stands before every route: the Host header, the key, and whether there is a place. Plain ASGI."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penjing.serve.errors import ApiError
from penjing.serve.hub import full

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FULL = full().response


class Guard:
    """Refuses requests before any route sees them.

    key: asked for everywhere but on `open_paths`; empty: no key. loopback_only: whether the server listens for this
    machine alone; then a Host header of another name comes from a page that made its name point here (DNS rebinding).
    Who asks for an answer that nobody can give is told so from counts alone.
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
        except ApiError as error:
            await error.response(scope, receive, counted)
            return
        asks = scope["path"] in (CHAT, COMPLETIONS)
        is_full = asks and scope["app"].state.service.hub.is_full(client_of(scope, headers))
        await (FULL if is_full else self.app)(scope, receive, counted)

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


def client_of(scope: Scope, headers: Headers) -> str:
    """Who asks: an address; on this machine, where all have one, the program too."""
    host: str = scope["client"][0] if scope.get("client") else ""
    return f"{host} {headers.get('user-agent', '')[:100]}" if host in LOOPBACK else host


def host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
