"""benchmarks/trackers.py turns the trackers off and on, and compares the steps of both."""

import time
from types import SimpleNamespace

import pages
import pytest


@pytest.fixture
def program():
    return pages.script("benchmarks/trackers.py")


def test_blocks_come_as_on_off_off_on(program, monkeypatch):
    clock, sent = iter(float(second) for second in range(1000)), []
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(program.os, "killpg", lambda group, what: sent.append((group, what)))
    switch = program.Switch()
    switch.processes = [SimpleNamespace(_process=SimpleNamespace(pid=7))]
    while len(switch.blocks) < 8:
        switch.tick()
    assert [on for on, _, _ in switch.blocks] == [True, False, False, True] * 2
    assert all(seconds >= program.BLOCK_SECONDS and steps > 1 for _, steps, seconds in switch.blocks)
    stopped, goes_on = (7, program.signal.SIGSTOP), (7, program.signal.SIGCONT)
    assert sent == [stopped, goes_on, stopped, goes_on]


def test_seconds_of_a_step_are_of_all_its_blocks(program):
    blocks = [(True, 10, 5.0), (False, 20, 5.0), (True, 30, 5.0)]
    assert program.step_seconds(blocks, on=True) == 0.25 and program.step_seconds(blocks, on=False) == 0.25
