"""What ends a run of two ranks and what does not: both watchdogs in one process, with a clock that is told the time."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from penjing.base.errors import UserError
from penjing.train import watchdog
from penjing.train.signals import Stopped
from penjing.train.watchdog import Watchdog, watched


class Ended(BaseException):
    """The process would have ended here."""


class Store:
    """As torch's, within a process."""

    def __init__(self):
        self.told = {}

    def set(self, key, value):
        self.told[key] = value.encode()

    def get(self, key):
        return self.told[key]

    def check(self, keys):
        return all(key in self.told for key in keys)

    def compare_set(self, key, expected, wanted):
        return self.told.setdefault(key, wanted.encode())


class Ranks:
    """Two watchdogs whose threads sleep: `wait` lets seconds pass, in each of which those that live look around."""

    def __init__(self):
        self.now, self.stacks, self.living = 1000.0, 0, []
        self.store, self.sleep = Store(), lambda seconds: None

    def begin(self):
        self.living = [Watchdog(SimpleNamespace(rank=rank, world=2, any=bool)) for rank in range(2)]
        return list(self.living)

    def edge(self, step, longest_seconds):
        for each in self.living:
            each.report_progress(step, longest_seconds)

    def wait(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            for each in self.living:
                each._check()


@pytest.fixture
def ranks(monkeypatch):
    made = Ranks()

    def end(code):
        raise Ended

    def dump(**how):
        made.stacks += 1

    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 3600.0)
    monkeypatch.setattr(watchdog, "_make_store", lambda strategy: made.store)
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=lambda seconds: made.sleep(seconds))
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", dump)
    both = made.begin()
    yield made
    for each in both:
        each.close()


def test_steps_of_a_minute_are_no_hang(ranks):
    ranks.wait(3600)  # data, probe
    ranks.edge(0, 0.0)
    ranks.wait(300)  # the first step
    for step in range(1, 4):
        ranks.edge(step, 60.0)
        ranks.wait(60)
    ranks.edge(4, 60.0)
    ranks.wait(250)


@pytest.mark.parametrize(("longest", "allowed"), [(0.1, 45), (60.0, 300)])
def test_a_step_that_does_not_end_is_found(ranks, capsys, longest, allowed):
    ranks.edge(7, longest)
    ranks.wait(allowed)
    with pytest.raises(Ended):
        ranks.wait(2)
    said = capsys.readouterr().err
    assert f"no step since {allowed} s" in said
    assert "after step 7" in said
    assert ranks.stacks == 1


def test_a_validation_or_a_save_may_take_any_time(ranks):
    ranks.edge(6, 1.0)
    ranks.wait(1)
    ranks.edge(7, 0.0)
    ranks.wait(600)
    ranks.edge(7, 1.0)
    ranks.wait(40)


def test_one_rank_waits_in_its_next_step_while_the_other_saves(ranks):
    saving, other = ranks.living
    saving.report_progress(7, 0.0)
    other.report_progress(7, 1.0)
    ranks.wait(600)
    saving.report_progress(7, 1.0)
    ranks.wait(40)
    with pytest.raises(Ended):
        ranks.wait(10)


def test_a_rank_that_says_nothing_is_found_also_in_a_save(ranks, capsys):
    ranks.edge(7, 0.0)
    ranks.wait(30)
    ranks.living.pop()
    ranks.wait(20)
    with pytest.raises(Ended):
        ranks.wait(2)
    assert "rank 1 is silent since 20 s, after step 7" in capsys.readouterr().err


def test_what_the_user_can_put_right_is_one_line(ranks, capsys):
    ranks.living[0].fail(UserError("no such file", where="data.train", got="typo.jsonl"))
    with pytest.raises(Ended):
        ranks.living[1]._check()
    why = "rank 0 failed before step 1: data.train: no such file; got typo.jsonl"
    assert capsys.readouterr().err.strip().splitlines() == [f"penjing: rank 1, before step 1, gives up: {why}"]
    assert ranks.stacks == 0


def test_a_bug_comes_with_its_traceback_and_all_stacks(ranks, capsys):
    ranks.edge(3, 1.0)
    try:
        raise ZeroDivisionError("the one that counts")
    except ZeroDivisionError as error:
        ranks.living[1].fail(error)
    with pytest.raises(Ended):
        ranks.living[0]._check()
    said = capsys.readouterr().err
    assert "rank 1 failed after step 3:\nTraceback" in said
    assert "the one that counts" in said
    assert ranks.stacks == 1


@pytest.mark.parametrize(
    ("error", "order"),
    [
        (None, ["work", "waits", "closed", "closed"]),
        (Stopped(15, 3), ["work", "waits", "closed", "closed"]),
        (ZeroDivisionError(), ["work", "closed"]),  # the other one is told, and ends
    ],
)
def test_nobody_leaves_before_the_last(ranks, monkeypatch, error, order):
    """Rank 0 hashes and writes when the others are done; whoever is silent is taken for dead."""
    happened, close = [], Watchdog.close
    monkeypatch.setattr(Watchdog, "close", lambda self: happened.append("closed") or close(self))

    def sleep(seconds):
        if seconds == watchdog.POLL_SECONDS:
            happened.append("waits")
            ranks.store.set("done 0", "")

    ranks.sleep = sleep
    with suppress(Stopped, ZeroDivisionError), watched(SimpleNamespace(rank=1, world=2, any=bool)):
        happened.append("work")
        if error is not None:
            raise error
    assert happened == order


def test_rank_0_goes_last_as_the_store_goes_with_it(ranks):
    looks = []

    def sleep(seconds):
        looks.append(sorted(ranks.store.told))
        if len(looks) == 3:
            ranks.store.set("left 1", "")

    ranks.sleep = sleep
    ranks.store.set("done 1", "")
    with watched(SimpleNamespace(rank=0, world=2, any=bool)):
        pass
    assert len(looks) == 3
    assert all("left 0" in told and "left 1" not in told for told in looks)


def test_rank_0_does_not_wait_for_ever_for_one_that_died_at_the_end(ranks):
    def sleep(seconds):
        ranks.now += 1.0

    ranks.sleep, began = sleep, ranks.now
    ranks.store.set("done 1", "")
    with watched(SimpleNamespace(rank=0, world=2, any=bool)):
        pass
    assert ranks.now - began == watchdog.SILENT_SECONDS


def test_a_store_that_went_with_rank_0_means_that_all_are_done(ranks, monkeypatch):
    def gone(keys):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(ranks.store, "check", gone)
    with watched(SimpleNamespace(rank=1, world=2, any=bool)) as edge:
        pass
    assert edge.__self__._stop.is_set()
