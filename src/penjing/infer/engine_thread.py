"""One thread that steps several engines in turn, so that a server's own thread only listens and talks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from penjing.base.errors import UserError
from penjing.infer.engine import Engine
from penjing.infer.requests import Event, Request

Deliver = Callable[[str, list[Event]], None]


class EngineThread:
    """Runs engines by name until it is closed.

    deliver: called in the engines' thread, after each step that something happened in, with the engine's name and all
    events of the step. All methods may be called from any thread.
    """

    def __init__(self, engines: Mapping[str, Engine], deliver: Deliver) -> None:
        self._engines, self._deliver = dict(engines), deliver
        self._wake = threading.Condition()
        self._is_closing = False
        self._busy_seconds = dict.fromkeys(self._engines, 0.0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, model: str, request: Request) -> int:
        """Queue a request; returns its ticket. Raises UserError where it cannot be answered, or the thread closes."""
        with self._wake:
            if self._is_closing:
                raise UserError("is shutting down", where="engine")
            ticket = self._engines[model].submit(request)
            self._wake.notify()
        return ticket

    def cancel(self, model: str, ticket: int) -> None:
        """End a request; see `Engine.cancel`."""
        with self._wake:
            self._engines[model].cancel(ticket)
            self._wake.notify()

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Counters of each engine since it was made."""
        return {
            name: {
                "active": engine.num_active,
                "waiting": engine.num_waiting,
                "slots": engine.capacity,
                "steps": engine.steps,
                "tokens_read": engine.tokens_read,
                "tokens_shared": engine.tokens_shared,
                "tokens_written": engine.tokens_written,
                "busy_seconds": self._busy_seconds[name],
            }
            for name, engine in self._engines.items()
        }

    def close(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, wait so long for those there are to end, end the rest, and stop."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(drain_seconds)
        while self._thread.is_alive():  # again and again: a request may just be on its way into the engine
            for engine in self._engines.values():
                engine.cancel_all()
            self._thread.join(0.1)

    def _run(self) -> None:
        while True:
            with self._wake:
                while all(engine.idle for engine in self._engines.values()):
                    if self._is_closing:
                        return
                    self._wake.wait()
            for name, engine in self._engines.items():
                if engine.idle:
                    continue
                began = time.perf_counter()
                try:
                    events = engine.step()
                except Exception as error:  # a fault of ours: its requests end, and the thread lives on
                    events = engine.fail(error)
                self._busy_seconds[name] += time.perf_counter() - began
                if events:
                    self._deliver(name, events)
