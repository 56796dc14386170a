"""What ends a run of two ranks and what does not: both watchdogs in one process, with a clock that is told the time."""

import json
import os
import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest

from penjing.base.errors import EXIT_FOLLOWED, UserError
from penjing.train import watchdog
from penjing.train.oom_recovery import SmallerPasses
from penjing.train.signals import Stopped
from penjing.train.watchdog import LostRank, Watchdog, watched


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
        self.now, self.stacks, self.codes, self.living, self.collectives = 1000.0, 0, [], [], {}
        self.store, self.sleep = Store(), lambda seconds: None

    def begin(self):
        self.strategies = [SimpleNamespace(rank=rank, world=2, any=bool) for rank in range(2)]
        self.living = list(map(Watchdog, self.strategies))
        return list(self.living)

    def edge(self, step, longest_seconds):
        for each in self.living:
            each.report_progress(step, longest_seconds)

    def wait(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            for each in self.living:
                self.looks = each.rank
                each._check()


@pytest.fixture
def ranks(monkeypatch):
    made = Ranks()

    def end(code):
        made.codes.append(code)
        raise Ended

    def dump(**how):
        made.stacks += 1

    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 3600.0)
    monkeypatch.setattr(watchdog, "_make_store", lambda strategy: made.store)
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=lambda seconds: made.sleep(seconds))
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", dump)
    monkeypatch.setattr(watchdog, "_collectives", lambda: made.collectives.get(made.looks, 0))
    monkeypatch.setattr(watchdog, "run_once_per_launch", lambda action: action())
    made.looks, made.sent = 0, []
    monkeypatch.setattr(watchdog.os, "kill", lambda process, number: made.sent.append((process, number)))
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
    assert f"each rank is stuck after step 7: no step since {allowed} s" in said
    assert ranks.stacks == 1


def test_a_judge_that_one_rank_waits_for_may_take_any_time(ranks):
    ranks.edge(7, 1.0)
    ranks.wait(10)
    with ranks.strategies[1].untimed():
        ranks.wait(200)
    ranks.wait(40)
    with pytest.raises(Ended):
        ranks.wait(10)


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


def test_ranks_that_were_stopped_and_go_on_are_no_hang(ranks, monkeypatch):
    """Ctrl-Z stops all ranks, and `fg` lets them go on: each finds its own beat late by that time."""
    ranks.edge(7, 1.0)
    ranks.wait(10)
    began = ranks.now
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 1.0)
    for each in ranks.living:
        beats = iter([600.0, 0.0])  # seconds that the beat is late

        def wait(seconds, beats=beats):
            late = next(beats, None)
            ranks.now += 0.0 if late is None else late + seconds
            return late is None

        monkeypatch.setattr(each, "_stop", SimpleNamespace(wait=wait, set=each._stop.set, is_set=bool))
        ranks.looks = each.rank
        ranks.now = began  # both were stopped at the same time
        each._watch()
    ranks.wait(30)
    with pytest.raises(Ended):
        ranks.wait(10)


def test_the_rank_that_began_fewer_collectives_is_slow_and_then_stuck(ranks, capsys):
    """Rank 0 waits in a collective that rank 1 does not begin. Named with its stack in time, it may still go on."""
    ranks.collectives = {0: 8, 1: 7}
    ranks.edge(7, 1.0)
    ranks.wait(20)
    said = capsys.readouterr().err
    assert said.count("\n") == 1, "once"
    assert said.startswith("penjing: rank 1 is slow after step 7: no step since")
    assert ranks.stacks == 1
    with pytest.raises(Ended):
        ranks.wait(27)
    assert "rank 1 is stuck after step 7: no step since 45 s, the others wait for it" in capsys.readouterr().err
    assert (ranks.looks, ranks.codes, ranks.stacks) == (1, [1], 2)
    ranks.living.pop()
    with pytest.raises(Ended):
        ranks.wait(2)
    assert (ranks.looks, ranks.codes, ranks.stacks) == (0, [1, EXIT_FOLLOWED], 2), "rank 0 has no stack to show"


def test_a_silent_rank_of_this_machine_is_made_to_write_its_stack(ranks):
    ranks.edge(7, 1.0)
    ranks.wait(2)
    ranks.living.pop()
    with pytest.raises(Ended):
        ranks.wait(22)
    assert ranks.sent == [(os.getpid(), signal.SIGABRT), (os.getpid(), signal.SIGCONT)]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no such file", where="data.train", got="x"), 2, "data.train: no such file; got x"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SmallerPasses(4, "of 2 GiB"), 75, "batch.micro_size=4"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(ranks, capsys, error, code, line):
    ranks.living[0].fail(error)
    with pytest.raises(Ended):
        ranks.living[1]._check()
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert (ranks.codes, ranks.stacks) == ([code], 0)


@pytest.mark.parametrize("node", ["0", "1"])
def test_a_bug_shows_one_traceback_on_each_machine(ranks, capsys, node):
    """The failing rank's own is printed by Python as it ends."""
    ranks.living[0].node = node
    ranks.edge(3, 1.0)
    try:
        raise ZeroDivisionError("the one that counts")
    except ZeroDivisionError as error:
        ranks.living[1].fail(error)
    assert capsys.readouterr().err == "penjing: rank 1 failed after step 3:\n"
    with pytest.raises(Ended):
        ranks.living[0]._check()
    assert ("the one that counts" in capsys.readouterr().err) == (node == "1")
    assert ranks.codes == [EXIT_FOLLOWED]


@pytest.mark.parametrize("first", [True, False])
def test_an_error_that_follows_from_a_lost_rank_is_one_line(ranks, first):
    """The other rank may have said why, or was killed before it could."""
    ranks.sleep = lambda seconds: setattr(ranks, "now", ranks.now + seconds)
    if first:
        ranks.living[0].fail(ZeroDivisionError())
    lost = ranks.living[1].fail(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert isinstance(lost, LostRank)
    assert ("failed" in ranks.store.told) == first


def test_ranks_with_other_settings_or_code_are_refused_on_all_ranks(ranks):
    for rank, rate in enumerate((0.1, 0.2)):
        ranks.store.set(f"about {rank}", json.dumps({"torch": "2", "optimizer.learning_rate": rate}))
    for each, rate in zip(ranks.living, (0.1, 0.2), strict=True):
        with pytest.raises(UserError) as caught:
            each.require_same({"torch": "2", "optimizer.learning_rate": rate})
        assert caught.value.where == "optimizer.learning_rate"
        assert "0.2 on rank 1" in caught.value.got
    ranks.store.set("about 1", json.dumps({"torch": "2"}))
    ranks.living[0].require_same({"torch": "2"})


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
