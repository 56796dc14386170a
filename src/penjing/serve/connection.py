"""Connections that do not wait for ever, and a server that ends well. uvicorn has neither by itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penjing.serve.limits import (
    CONNECTIONS_AT_ONCE,
    DRAIN_SECONDS,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    READ_SECONDS,
    SEND_SECONDS,
)


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection on which a request takes longer than READ_SECONDS to arrive (its headers, then its body), has
    headers without end, or on which nothing is taken of what was sent for SEND_SECONDS.

    Between requests uvicorn's own timer runs; it is stopped by the first byte, and there ours begins. Who has left is
    told to every request of the connection: uvicorn tells the newest.
    """

    _timer: asyncio.TimerHandle | None = None
    _owed = ""  # what the timer waits for
    _sending: asyncio.TimerHandle | None = None
    _header_bytes = 0  # of headers that have not ended

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unanswered: list[RequestResponseCycle] = []
        # asyncio does so itself only for sockets that were made with a protocol number: 40 ms for each answer without
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self.send_400_response("The headers are too large.")
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if self._unanswered:
            self.transport.abort()  # not into the middle of an answer
        else:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._header_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._header_bytes = 0

    def on_response_complete(self) -> None:
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        super().on_response_complete()
        if self.cycle.response_complete:
            self._stop()  # uvicorn's timer runs
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self._stop()
        self.resume_writing()

    def pause_writing(self) -> None:
        """The buffer is full (64 KiB), so that whoever writes has to wait."""
        super().pause_writing()
        self._sending = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closed gently it would wait for the reader
        else:
            super().timeout_keep_alive_handler()

    def _watch(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            owed = "headers"  # or the rest of a body that was refused
        else:
            owed = "body" if self.cycle.more_body and not self.pipeline else ""
        if owed == self._owed:
            return
        self._stop()
        self._owed = owed
        if owed:
            self._timer = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def _stop(self) -> None:
        self._owed = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """Ends with code 0: on SIGTERM or SIGINT it accepts nothing more at once, and what runs has DRAIN_SECONDS.

    A second signal ends what runs.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # a full collection goes over all that libraries made: it stood still for 60 to 250 ms
        for listener in sockets or ():
            listener.listen(MAX_CONNECTIONS)  # may wait; asyncio takes `backlog` at once, and answers nobody meanwhile

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled: list[signal.Signals] = []
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: whoever started us stops us
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
                handled.append(number)
        yield
        while handled:
            loop.remove_signal_handler(handled.pop())

    def stop(self) -> None:
        """Accept nothing more, and end when all is answered."""
        self.force_exit = self.should_exit
        self.should_exit = True
        for server in getattr(self, "servers", ()):
            server.close()


def make_server(app: ASGIApp) -> Server:
    """The app behind connections with limits. Access is not logged: a path may hold what its sender took for a place
    to put a key."""
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(DRAIN_SECONDS),
        backlog=CONNECTIONS_AT_ONCE,
    )
    return Server(config)
