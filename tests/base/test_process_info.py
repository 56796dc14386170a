"""A process's own figures, and who speaks for a launch of several."""

import os
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from penjing.base.process_info import own_command, peak_resident_bytes, process_age_seconds, thread_seconds

SAY = """
import sys, time
from penjing.base.process_info import run_once_per_launch
def say():
    time.sleep(float(sys.argv[1]))
    print("said", flush=True)
run_once_per_launch(say)
print("ended", time.time(), flush=True)
"""


def started(tmp_path, seconds, **environment):
    words = [sys.executable, "-c", SAY, str(seconds)]
    everything = {**os.environ, "TMPDIR": str(tmp_path), **environment}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=everything)


def test_one_of_a_launch_speaks_and_the_others_wait_for_it(tmp_path):
    launch = {"TORCHELASTIC_RUN_ID": "one", "MASTER_PORT": "1"}
    first = started(tmp_path, 1.5, **launch)
    while not list(tmp_path.glob("*.said")):
        time.sleep(0.01)
    second = started(tmp_path, 0, **launch)
    one, other = first.communicate(timeout=240)[0].split(), second.communicate(timeout=240)[0].split()
    assert one[0] == "said" and other[0] == "ended"
    assert float(other[1]) > float(one[2]) - 0.1  # not before the other had spoken
    another = started(tmp_path, 0, **{**launch, "MASTER_PORT": "2"})  # of another launch
    assert another.communicate(timeout=240)[0].startswith("said")


def test_what_an_earlier_launch_left_does_not_silence_a_later_one(tmp_path):
    launch = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "1"}
    assert started(tmp_path, 0, **launch).communicate(timeout=240)[0].startswith("said")
    (left,) = tmp_path.glob("*.said")
    os.utime(left, (time.time() - 3600,) * 2)
    assert started(tmp_path, 0, **launch).communicate(timeout=240)[0].startswith("said")


def test_what_launches_long_over_left_is_cleared_away(tmp_path):
    old, fresh, other = (tmp_path / name for name in ("penjing-0.said", "penjing-1.said", "mine.said"))
    for path in (old, fresh, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 86_400,) * 2)
    started(tmp_path, 0, TORCHELASTIC_RUN_ID="none", MASTER_PORT="1").communicate(timeout=240)
    assert not old.exists() and fresh.exists() and other.exists()


def test_under_another_launcher_the_first_rank_speaks(tmp_path):
    plain = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
    for rank, begins in (("0", "said"), ("1", "ended")):
        words = [sys.executable, "-c", SAY, "0"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, env={**plain, "RANK": rank})
        assert done.stdout.startswith(begins)


def test_a_small_process_does_not_inherit_the_peak_of_a_large_one():
    words = "from penjing.base.process_info import peak_resident_bytes as p; print(p())"
    filled = bytearray(600 << 20)
    child = int(subprocess.run([sys.executable, "-c", words], capture_output=True, text=True).stdout)
    assert len(filled) < peak_resident_bytes() and child < 300 << 20


def test_age_counts_in_fine_ticks():
    ages = [process_age_seconds() for _ in range(1000)]
    assert ages[0] > 0 and all(one < other for one, other in pairwise(ages))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="only Linux tells")
def test_a_thread_that_computes_has_a_core():
    before, name = thread_seconds(), str(threading.get_native_id())
    begun = time.thread_time()
    while time.thread_time() - begun < 0.1:
        pass
    had, waited = thread_seconds(since=before)[name]
    assert 0.05 < had < 0.5 and waited >= 0
    assert thread_seconds()[name][0] > had, "since the thread began"


def test_the_command_can_be_typed_without_an_activated_environment(tmp_path, monkeypatch):
    program = tmp_path / "a venv/bin/penjing"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "")
    assert own_command() == "'a venv/bin/penjing'"
    monkeypatch.setenv("PATH", str(program.parent))
    assert own_command() == "penjing"
