"""One thread that steps several engines in turn, so that the server's event loop is never blocked."""

import threading
import time
from collections.abc import Callable, Mapping

from penjing.base.errors import UserError
from penjing.infer.engine import Engine
from penjing.infer.requests import Event, Request

OnEvents = Callable[[str, list[Event]], None]


class EngineThread:
    """Runs engines by name until it is closed.

    on_events: called in the engine thread after each step with events; gets the engine's name and the events.
    before_step: called in the engine thread before each step. All methods may be called from any thread.
    """

    def __init__(
        self, engines: Mapping[str, Engine], on_events: OnEvents, before_step: Callable[[], object] = lambda: None
    ) -> None:
        self._engines, self._on_events, self._before_step = dict(engines), on_events, before_step
        self._condition = threading.Condition()
        self._is_closing = False
        self._busy_seconds = dict.fromkeys(self._engines, 0.0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, model: str, request: Request) -> int:
        """Queue a request; returns its request_id. Raises UserError if it cannot be answered, or on shutdown."""
        with self._condition:
            if self._is_closing:
                raise UserError("is shutting down", where="engine")
            request_id = self._engines[model].submit(request)
            self._condition.notify()
        return request_id

    def cancel(self, model: str, request_id: int) -> None:
        """End a request; see `Engine.cancel`."""
        with self._condition:
            self._engines[model].cancel(request_id)
            self._condition.notify()

    def statistics(self) -> dict[str, dict[str, float]]:
        """Values of each engine, by their names in /metrics."""
        return {
            name: {
                "active": engine.num_active,
                "waiting": engine.num_waiting,
                "slots": engine.capacity,
                "steps_total": engine.steps,
                "tokens_read_total": engine.tokens_read,
                "tokens_shared_total": engine.tokens_shared,
                "tokens_written_total": engine.tokens_written,
                "busy_seconds_total": self._busy_seconds[name],
            }
            for name, engine in self._engines.items()
        }

    def close(self) -> None:
        """Accept no more requests, cancel the running ones, and stop."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        while self._thread.is_alive():  # repeated: a request may be on its way into the engine
            for engine in self._engines.values():
                engine.cancel_all()
            self._thread.join(0.1)

    def _run(self) -> None:
        while True:
            with self._condition:
                while all(engine.idle for engine in self._engines.values()):
                    if self._is_closing:
                        return
                    self._condition.wait()
            for name, engine in self._engines.items():
                if engine.idle:
                    continue
                self._before_step()
                started = time.perf_counter()
                try:
                    events = engine.step()
                except Exception as error:  # an internal error: its requests end, the thread goes on
                    events = engine.fail(error)
                self._busy_seconds[name] += time.perf_counter() - started
                if events:
                    self._on_events(name, events)
