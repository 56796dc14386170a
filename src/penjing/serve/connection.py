"""Connections with timeouts, and a graceful shutdown. uvicorn has neither by itself."""

import asyncio
import contextlib
import gc
import secrets
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


def request_id() -> tuple[bytes, bytes]:
    """A header that names one response, as OpenAI's clients expect."""
    return b"x-request-id", b"req_" + secrets.token_hex(16).encode()


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection if headers or body take longer than READ_SECONDS to arrive, if the headers are too large, or
    if the client reads nothing for SEND_SECONDS.

    Between requests uvicorn's own timer runs; the first byte stops it and starts ours. A disconnect is reported to
    every unanswered request of the connection; uvicorn reports it to the newest only.
    """

    _read_timer: asyncio.TimerHandle | None = None
    _awaited = ""  # what the timer waits for: "headers" or "body"
    _send_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0  # of incomplete headers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unanswered: list[RequestResponseCycle] = []
        # asyncio sets it only for sockets created with a protocol number. Without it each answer takes 40 ms more.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self.send_400_response("The headers are too large.")
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        if self._unanswered:
            self.transport.abort()  # a response is being sent on this connection
        else:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.cycle.default_headers = [*self.cycle.default_headers, request_id()]
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
            self._stop_timer()  # uvicorn's timer runs
        else:
            self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self._stop_timer()
        self.resume_writing()

    def pause_writing(self) -> None:
        """The send buffer is full (64 KiB), so writers have to wait."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # close() would wait for the reader
        else:
            super().timeout_keep_alive_handler()

    def _update_timer(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            awaited = "headers"  # or the remaining bytes of a rejected body
        else:
            awaited = "body" if self.cycle.more_body and not self.pipeline else ""
        if awaited == self._awaited:
            return
        self._stop_timer()
        self._awaited = awaited
        if awaited:
            self._read_timer = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        self._awaited = ""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


class Server(uvicorn.Server):
    """Exits with code 0. On SIGTERM or SIGINT it stops accepting at once; running requests have DRAIN_SECONDS. A second
    signal ends running requests."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # a full collection over all objects of the libraries paused for 60 to 250 ms
        for listener in sockets or ():
            listener.listen(MAX_CONNECTIONS)  # asyncio accepts up to `backlog` at once and answers nobody meanwhile

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled: list[signal.Signals] = []
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller stops us
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
                handled.append(number)
        yield
        while handled:
            loop.remove_signal_handler(handled.pop())

    def stop(self) -> None:
        """Stop accepting, and end when all requests are answered."""
        self.force_exit = self.should_exit
        self.should_exit = True
        for server in getattr(self, "servers", ()):
            server.close()


def make_server(app: ASGIApp) -> Server:
    """The app behind connections with limits. There is no access log, because a client may put a key into the path."""
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        loop="auto",
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
