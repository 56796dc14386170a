"""Threads spin for long on free cores and shortly on busy ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from penjing.kernels.cpu import spinning

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long threads wait")

REAL = """
import threading, time, torch
from penjing.kernels.cpu import spinning
torch.set_num_threads(2)
spinning.control(2)
assert spinning._control is not None and spinning._control.is_alive()
x_BD = torch.randn(512, 512)
before = x_BD @ x_BD
threads = lambda: len(list(__import__("pathlib").Path("/proc/self/task").iterdir()))
alone = threads()
team = threading.Thread(target=spinning._control._hold, args=(1.0,))
team.start()
time.sleep(0.5)
assert threads() > alone + len(__import__("os").sched_getaffinity(0)), "a team larger than the CPUs"
assert torch.equal(before, x_BD @ x_BD)
team.join()
assert torch.equal(before, x_BD @ x_BD)
print("ok")
"""


def control_with(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> tuple[spinning.SpinControl, list[int]]:
    """A control that sees these waits, one per look, and the sizes of the teams that it starts."""
    teams: list[int] = []
    monkeypatch.setattr(spinning, "_look", lambda: (waits.pop(0), []) if waits else None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return spinning.SpinControl(lambda work, data, threads, flags: teams.append(threads)), teams


def test_threads_that_have_their_cores_spin_for_long(monkeypatch):
    control, teams = control_with(monkeypatch, [0.0, 0.1, 0.06])
    control.run()
    assert teams == []


def test_threads_that_wait_spin_shortly_and_long_again_when_the_cores_are_free(monkeypatch):
    control, teams = control_with(monkeypatch, [0.0, 1.2, 0.7, 0.9, 0.0, 0.0, 0.7, 0.9])
    control.run()
    assert len(teams) == 3 and min(teams) > len(os.sched_getaffinity(0))


def test_one_busy_look_alone_changes_nothing(monkeypatch):
    control, teams = control_with(monkeypatch, [0.7, 0.0, 0.9, 0.1, 0.3])
    control.run()
    assert teams == []


def test_one_quiet_look_alone_changes_nothing(monkeypatch):
    control, _ = control_with(monkeypatch, [0.7, 0.9, 0.1, 0.9, 0.1, 0.0, 0.9])
    holds: list[float] = []
    monkeypatch.setattr(control, "_hold", holds.append)
    control.run()
    assert holds == [spinning.FIRST_SECONDS, 2 * spinning.FIRST_SECONDS]


def test_the_user_is_told_once_and_only_of_lasting_load(monkeypatch):
    lines: list[str] = []
    control, _ = control_with(monkeypatch, [1.0, 1.0, 0.0, 0.0] * 4)
    control.report = lines.append
    control.run()
    assert lines == []
    control, _ = control_with(monkeypatch, [1.0] * 20)
    control.report = lines.append
    control.run()
    assert lines == [spinning.REPORT]


def test_waiting_is_measured():
    end = time.monotonic() + 2
    cpus = sorted(os.sched_getaffinity(0))

    def spin() -> None:
        os.sched_setaffinity(0, cpus[:1])  # of this thread
        while time.monotonic() < end:
            sum(range(1000))

    loop = f"import os, time\nos.sched_setaffinity(0, {cpus[:1]})\nend = time.time() + 3\nwhile time.time() < end: pass"
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(2)]
    time.sleep(0.5)
    thread = threading.Thread(target=spin)
    thread.start()
    looks = [look for _ in range(4) if (look := spinning._look())]
    thread.join()
    for other in others:
        other.wait()
    waiting, computing = max(looks)
    assert waiting > spinning.BUSY
    assert set(computing) - {threading.get_native_id()} == {thread.native_id}  # the one that looks may wait, too


def test_two_threads_share_a_cpu_from_the_second_busy_look_on_and_leave_no_thread_bound(monkeypatch):
    cpus, stop = os.sched_getaffinity(0), threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    first, second = (thread.native_id for thread in threads)
    looks = [(1.0, [first, second])] * 2
    monkeypatch.setattr(spinning, "_look", lambda: looks.pop() if looks else None)
    seen: list[list[set[int]]] = []
    control = spinning.SpinControl(lambda *team: None)
    hold = lambda seconds: seen.append([os.sched_getaffinity(thread) for thread in (first, second)])  # noqa: E731
    monkeypatch.setattr(control, "_hold", lambda seconds: (time.sleep(0.2), hold(seconds)))
    control.run()
    assert len(seen) == 1 and seen[0][0] == seen[0][1] and len(seen[0][0]) == 1 and seen[0][0] <= cpus
    assert [os.sched_getaffinity(thread) for thread in (first, second)] == [cpus, cpus]
    stop.set()


def test_a_real_second_team_starts_ends_and_changes_no_result():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run([sys.executable, "-c", REAL], env=environment, capture_output=True, text=True, timeout=600)
    assert ran.stdout == "ok\n", ran.stderr
