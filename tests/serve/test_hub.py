"""The event loop comes first: answers begin, and the engine steps, when no request waits for it."""

import asyncio

import pytest

from penjing.infer.requests import Event
from penjing.serve import hub
from penjing.serve.errors import ApiError
from penjing.serve.hub import Hub, Job


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


def test_a_request_that_is_late_ends_whatever_the_clock_says():
    """A timer may fire before the loop's clock shows its time."""

    async def main():
        waiting = Hub({})
        waiting.reserve(job := Job("client"), 1)
        asyncio.get_running_loop().call_soon(job.expire)
        with pytest.raises(ApiError, match="no answer within") as late:
            await asyncio.wait_for(anext(waiting.events(job)), 10)
        assert late.value.status == 503 and not waiting._open
        waiting.close()

    asyncio.run(main())


def test_an_answer_that_ends_in_time_is_delivered():
    async def main():
        waiting = Hub({})
        waiting.reserve(job := Job("client"), 1)
        job.events[0].append(event := Event(7, 0, finish_reason="stop"))
        waiting._count(job, -1)
        job.expire()
        assert [batches async for batches in waiting.events(job)] == [[(0, [event])]]
        waiting.close()

    asyncio.run(main())
