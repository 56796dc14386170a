"""Prefetches batches in a background thread while the model computes."""

import queue
import threading
from contextlib import suppress
from typing import Any

import torch

from penjing import devices
from penjing.loader.batch import Batch
from penjing.loader.batch_source import Source, WrappedSource


class Prefetch(WrappedSource):
    """Wraps a source and keeps up to `depth` batches ready on `device`.

    `state()` is the position after the last returned batch, so a resume neither repeats nor loses a batch. An error in
    the thread is raised by the call that would have returned that batch; the next call tries again.
    """

    def __init__(self, source: Source, device: torch.device, depth: int = 2) -> None:
        super().__init__(source)
        self.device, self.depth = device, depth
        self._state = source.state()
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        self._ready: queue.Queue[tuple[Batch, dict[str, Any]] | BaseException] = queue.Queue(self.depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(self._ready, self._stop), daemon=True)
        self._thread.start()

    def _work(self, ready: queue.Queue[Any], stop: threading.Event) -> None:
        item: Any
        devices.of(self.device).set_current(self.device)  # every thread has its own current device, initially 0
        while not stop.is_set():
            try:
                batch = next(self.source).to(self.device)
                item = (batch, self.source.state())
            except BaseException as error:  # passed to the caller
                item = error
            ready.put(item)  # waits while the queue is full; close() empties it
            if isinstance(item, BaseException):
                return

    def __next__(self) -> Batch:
        if self._thread is None:
            self._start()
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        batch, self._state = item
        return batch

    def state(self) -> dict[str, Any]:
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        self.close()
        self.source.restore(state)
        self._state = state

    def position(self) -> dict[str, Any]:
        return self._state

    def close(self) -> None:
        """Stop the thread, and set the source, which is ahead, back to the last returned batch."""
        if self._thread is not None:
            self._stop.set()
            with suppress(queue.Empty):
                while True:  # the thread may be waiting to put one more batch before it stops
                    self._ready.get_nowait()
            self._thread.join()
            self._thread = None
            self.source.restore(self._state)
