"""Answers on their way to a client: as they are written (server-sent events), or whole. Whoever leaves is noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penjing.serve.errors import ApiError, log

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


def line(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + dumps(value) + b"\n\n"


def dumps(value: Any) -> bytes:
    """JSON without spaces, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_left(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled if the client leaves first; then ConnectionError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ConnectionError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. The source, which ends with DONE, is closed as soon as the client has left.

    What goes wrong once it has begun is an error object in the stream, which then ends with DONE as well.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        self.status_code, self.background = 200, None
        self.source, self.on_end = source, on_end  # which is called whatever comes of it
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self.on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for body in self._whole():
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.source.aclose()  # type: ignore[attr-defined]  # a generator

    async def _whole(self) -> AsyncIterator[bytes]:
        try:
            async for body in self.source:
                yield body
        except ApiError as error:
            yield line(error.body) + DONE
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield line(ApiError(500, "the server failed on this request", code="internal_error").body) + DONE
