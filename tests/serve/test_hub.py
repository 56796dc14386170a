"""The event loop comes first: answers begin, and the engine steps, when no request waits for it."""

import asyncio

import pytest

from penjing.serve import hub
from penjing.serve.hub import Hub


def test_an_answer_begins_after_the_requests_that_wait():
    async def main():
        waiting, order = Hub({}), []

        async def begin():
            await waiting.wait_to_begin()
            order.append("answer")

        async def arrive():
            for _ in range(10):
                waiting.count_arrival()
                order.append("request")
                await asyncio.sleep(0)

        await asyncio.gather(begin(), arrive())
        waiting.close()
        assert order == ["request"] * 10 + ["answer"]

    asyncio.run(main())


def test_an_answer_begins_though_requests_never_end(monkeypatch):
    monkeypatch.setattr(hub, "MAX_BEGIN_WAITS", 5)

    async def main():
        waiting = Hub({})

        async def arrive():
            while True:
                waiting.count_arrival()
                await asyncio.sleep(0)

        arrivals = asyncio.ensure_future(arrive())
        await asyncio.wait_for(waiting.wait_to_begin(), 10)
        assert not arrivals.done()
        arrivals.cancel()
        waiting.close()

    asyncio.run(main())


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(
    ("requests", "pause"),
    [(0, 0.0), (hub.BURST_REQUESTS - 1, 0.0), (hub.BURST_REQUESTS, hub.STEP_PAUSE)],
)
def test_a_burst_of_requests_delays_a_step_of_the_engine(monkeypatch, requests, pause):
    async def main():
        waiting = Hub({})
        clock = Clock()
        monkeypatch.setattr(hub, "time", clock)
        for _ in range(requests):
            waiting.count_arrival()
        waiting._wait_to_step()
        waiting.close()
        assert clock.now - 100 == pytest.approx(pause, abs=0.0011)

    asyncio.run(main())
