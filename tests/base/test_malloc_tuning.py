"""Freed memory stays in the process; old objects are not looked at again and again."""

import gc
import subprocess
import sys

import pytest

from penjing.base import malloc_tuning as heap
from penjing.base.malloc_tuning import gc_frozen, tune_malloc

COUNT_FAULTS = """
import resource, sys
if sys.argv[1] == "kept":
    from penjing.base.malloc_tuning import tune_malloc
    assert tune_malloc()
import torch
def use():
    for _ in range(20):
        torch.ones(4 << 20).add_(1)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", COUNT_FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")
def test_blocks_are_not_asked_for_again():
    if not tune_malloc():
        pytest.skip("another C library")
    assert faults("kept") < 100


GIVE_BACK = """
import resource
from pathlib import Path
from penjing.base.malloc_tuning import malloc_trim, tune_malloc
def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
assert tune_malloc()
blocks = [bytearray(b"x" * (1 << 16)) for _ in range(4000)]
kept = blocks[::2]
del blocks
before = resident_bytes()
malloc_trim()
print(before - resident_bytes(), sum(map(sum, kept[:3])))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")
def test_gaps_between_blocks_are_given_back_and_blocks_are_not():
    if not tune_malloc():
        pytest.skip("another C library")
    done = subprocess.run([sys.executable, "-c", GIVE_BACK], capture_output=True, text=True, check=True)
    given, total = map(int, done.stdout.split())
    assert given > 100 << 20  # of 125 MiB
    assert total == 3 * ord("x") << 16


def test_what_was_there_is_frozen_and_what_comes_is_collected(monkeypatch):
    monkeypatch.setattr(heap, "gc", gc)  # conftest.py has put another there
    gc.unfreeze()

    class Knot:
        pass

    with gc_frozen():
        assert gc.get_freeze_count() > 1000
        assert gc.isenabled()
        knot = Knot()
        knot.itself = knot
        del knot
        assert gc.collect() >= 1
    assert gc.get_freeze_count() == 0
