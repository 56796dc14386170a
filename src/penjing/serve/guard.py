"""Middleware before every route: checks the Host header and the API key, and admits generation requests to the queue.
Plain ASGI."""

import asyncio
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penjing.base.malloc_tuning import malloc_trim
from penjing.serve.access import LOOPBACK, check_host, check_key
from penjing.serve.errors import ApiError
from penjing.serve.generation import Service
from penjing.serve.hub import Job, queue_full
from penjing.serve.limits import TRIM_BYTES, TRIM_SECONDS
from penjing.serve.request_body import read_body

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
QUEUE_FULL = queue_full().response
ADMITTED = "penjing.admitted"  # key in the scope, of a request's job and its body as bytes


class Guard:
    """Rejects requests before any route handles them.

    key: required on all paths but `open_paths`; empty: no key. loopback_only: the server listens on this machine only.
    on_response: called with each response's status.
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
        self._will_trim = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        size = 0

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.on_response(scope, message["status"])
            await send(message)

        try:
            if self.loopback_only:
                check_host(headers)
            if self.key and scope["path"] not in self.open_paths:
                check_key(headers, self.key)
        except ApiError as error:
            await error.response(scope, receive, send_counted)
            return
        service: Service = scope["app"].state.service
        service.hub.count_arrival()
        try:
            if scope["method"] == "POST" and scope["path"] in (CHAT, COMPLETIONS, TOKENIZE):
                await self._generate(service, scope, receive_counted, send_counted)
            else:
                await self.app(scope, receive_counted, send_counted)
        finally:
            if size > TRIM_BYTES:
                self._trim_later()

    async def _generate(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a generation request, which has a place in the queue until its response ends."""
        headers = Headers(scope=scope)
        client = client_of(scope, headers)
        if service.hub.is_full(client):
            await QUEUE_FULL(scope, receive, send)
            return
        try:
            body = await read_body(headers, receive, service.models.max_body_bytes)
            job = Job(client)
            service.hub.reserve(job, 1)
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        except ConnectionError:  # the client has disconnected
            return
        try:
            await service.hub.wait_to_begin()
            scope[ADMITTED] = job, body
            await self.app(scope, receive, send)
        finally:
            service.hub.cancel(job)
            if job.is_heavy:
                self._trim_later()

    def _trim_later(self) -> None:
        if not self._will_trim:
            self._will_trim = True
            asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        """Return the memory of large bodies and grammars to the system: `tune_malloc` keeps it."""
        self._will_trim = False
        asyncio.get_running_loop().run_in_executor(None, malloc_trim)


def client_of(scope: Scope, headers: Headers) -> str:
    """The client's address; on loopback, where all clients share it, the user agent too."""
    host: str = scope["client"][0] if scope.get("client") else ""
    return f"{host} {headers.get('user-agent', '')[:100]}" if host in LOOPBACK else host
