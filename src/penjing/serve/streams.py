"""Responses that end when the client disconnects: streams (server-sent events) and complete answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penjing.serve.errors import ApiError, log

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def sse_event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def dumps(value: Any) -> bytes:
    """JSON without spaces, in UTF-8."""
    return _ENCODER.encode(value).encode()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_unless_disconnected(request: Request, awaitable: Awaitable[Result]) -> Result:
    """The result of `awaitable`. If the client disconnects first, cancels it and raises ConnectionError."""
    task = asyncio.ensure_future(awaitable)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionError
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, the last one DONE. `events` is closed when the client disconnects. An error after the start
    becomes an error object in the stream, followed by DONE."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.status_code, self.background, self.events = 200, None, events
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(OSError):  # the client has disconnected
            await run_unless_disconnected(Request(scope, receive), self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for body in self._events_or_error():
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.events.aclose()  # type: ignore[attr-defined]  # a generator

    async def _events_or_error(self) -> AsyncIterator[bytes]:
        try:
            async for body in self.events:
                yield body
        except ApiError as error:
            yield sse_event(error.body) + DONE
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield sse_event(ApiError(500, "the server failed on this request", code="internal_error").body) + DONE
