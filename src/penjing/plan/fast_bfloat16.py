"""Whether a processor multiplies bfloat16 matrices faster than float32 ones: a fact of the machine, not of the minute.

What the processor has decides. With AMX oneDNN's bfloat16 matmul is 6 to 8 times as fast as float32; without bfloat16
units it is slower. AVX512-BF16 alone does not decide: an AMD EPYC is 4.4 times as fast in bfloat16 (500 against 113
GFLOP/s on one thread), another processor half as fast (166 against 320). There, and on ARM, it is measured, in a way
that other load does not turn, and saved for the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from penjing.base.errors import UserError
from penjing.base.files import read_json, write_json
from penjing.plan.user_dir import home

SURE_UNITS = frozenset({"amx_bf16"})
POSSIBLE_UNITS = frozenset({"avx512_bf16", "bf16"})  # the latter of ARM
# Values of ONEDNN_MAX_CPU_ISA that keep oneDNN from these units while it still takes bfloat16; with lower ones it says
# itself that it does not.
ISA_WITHOUT_UNITS = ("AVX512_CORE", "AVX512_CORE_VNNI")
WORTH = 1.2  # a measured ratio from which on bfloat16 is taken
PAIRS = 15
RATIOS_FILE = "bfloat16.json"  # in the user's folder: measured ratios by machine


def cpu_has_fast_bfloat16(name: str) -> bool:
    """The same answer in every process on this machine, however busy it is. name: of the processor."""
    units = cpu_units()
    if not units & (SURE_UNITS | POSSIBLE_UNITS) or not _library_takes_bfloat16():
        return False
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ISA_WITHOUT_UNITS:
        return False
    if units & SURE_UNITS and not limit:
        return True
    return _cached_ratio(name, units, limit) > WORTH


def cpu_units() -> frozenset[str]:
    """What the processor has, by Linux's names (`avx512_bf16`, `amx_bf16`, on ARM `bf16`)."""
    ask = getattr(torch.cpu, "get_capabilities", None)  # torch 2.12 and later
    if ask is not None:
        known: Mapping[str, Any] = ask()
        return frozenset(name for name, value in known.items() if value is True)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.partition(":")[2].split())


def _library_takes_bfloat16() -> bool:
    """Whether torch has oneDNN, and oneDNN has bfloat16 here."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _cached_ratio(name: str, units: frozenset[str], limit: str) -> float:
    """The ratio measured for this machine: the first one that was, as long as processor, torch and threads stay."""
    about = [name, sorted(units), limit, torch.__version__, torch.get_num_threads()]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    path = home() / RATIOS_FILE
    known: dict[str, float] = {}
    # A broken file is written anew; in a folder that cannot be searched there is none.
    with suppress(UserError, TypeError, ValueError, OSError):
        known = dict(read_json(path)) if path.is_file() else {}
    if key not in known:
        known[key] = speed_ratio()
        with suppress(UserError, OSError):  # a folder that cannot be written: measured again next time
            write_json(path, known)
    return float(known[key])


def speed_ratio() -> float:
    """CPU seconds of a float32 matmul over those of the same in bfloat16: the median of pairs, taken in turn.

    CPU time does not count what other programs take, and what slows the processor slows both of a pair.
    """
    pairs = {dtype: (torch.ones(512, 512, dtype=dtype),) * 2 for dtype in (torch.float32, torch.bfloat16)}
    for left, right in pairs.values():
        left @ right
    ratios = []
    for _ in range(PAIRS):
        wide, narrow = (_cpu_seconds(*pairs[dtype]) for dtype in (torch.float32, torch.bfloat16))
        ratios.append(wide / max(narrow, 1e-9))
    return statistics.median(ratios)


def _cpu_seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    start = time.process_time()
    for _ in range(4):
        left @ right
    return time.process_time() - start
