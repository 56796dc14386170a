"""Whether bfloat16 matmuls are faster than float32 on this CPU. The answer does not depend on the current load.

The CPU's instruction set decides. With AMX, oneDNN's bfloat16 matmul is 6 to 8 times as fast as float32; without
bfloat16 units it is slower. AVX512-BF16 alone does not decide: an AMD EPYC is 4.4 times as fast in bfloat16 (500
against 113 GFLOP/s on one thread), another CPU half as fast (166 against 320). There, and on ARM, the ratio is
measured by a method that other load does not bias, and saved for the machine.
"""

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
from penjing.base.user_dir import user_dir

FAST_UNITS = frozenset({"amx_bf16"})
MAYBE_FAST_UNITS = frozenset({"avx512_bf16", "bf16"})  # the latter of ARM
# Values of ONEDNN_MAX_CPU_ISA with which oneDNN still accepts bfloat16 but does not use these units. With lower values
# oneDNN reports that it does not support bfloat16.
ISA_WITHOUT_UNITS = ("AVX512_CORE", "AVX512_CORE_VNNI")
MIN_SPEEDUP = 1.2  # measured ratio above which bfloat16 is used
NUM_PAIRS = 15
RATIOS_FILE = "bfloat16.json"  # in the user's folder: measured ratios by machine


def cpu_has_fast_bfloat16(name: str) -> bool:
    """The same answer in every process on this machine, whatever its load. name: of the CPU."""
    units = cpu_units()
    if not units & (FAST_UNITS | MAYBE_FAST_UNITS) or not _onednn_supports_bfloat16():
        return False
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ISA_WITHOUT_UNITS:
        return False
    return bool(units & FAST_UNITS and not limit) or _cached_ratio(name, units, limit) > MIN_SPEEDUP


def cpu_units() -> frozenset[str]:
    """The CPU's features, by their Linux names (`avx512_bf16`, `amx_bf16`, on ARM `bf16`)."""
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.12 and later
    if get_capabilities is not None:
        capabilities: Mapping[str, Any] = get_capabilities()
        return frozenset(name for name, value in capabilities.items() if value is True)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.partition(":")[2].split())


def _onednn_supports_bfloat16() -> bool:
    """Whether torch has oneDNN, and oneDNN supports bfloat16 on this CPU."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _cached_ratio(name: str, units: frozenset[str], limit: str) -> float:
    """The ratio measured for this machine; measured again only if the CPU, torch or the threads change."""
    cache_key = [name, sorted(units), limit, torch.__version__, torch.get_num_threads()]
    key = hashlib.sha256(json.dumps(cache_key).encode()).hexdigest()
    path = user_dir() / RATIOS_FILE
    ratios: dict[str, float] = {}
    # A broken file is rewritten; in an unreadable folder the file counts as missing.
    with suppress(UserError, TypeError, ValueError, OSError):
        ratios = dict(read_json(path)) if path.is_file() else {}
    if key not in ratios:
        ratios[key] = speed_ratio()
        with suppress(UserError, OSError):  # a read-only folder: measured again next time
            write_json(path, ratios)
    return float(ratios[key])


def speed_ratio() -> float:
    """CPU seconds of a float32 matmul over CPU seconds of the same in bfloat16: the median of alternating pairs.

    CPU time excludes other programs, and a slower clock slows both of a pair.
    """
    pairs = {dtype: (torch.ones(512, 512, dtype=dtype),) * 2 for dtype in (torch.float32, torch.bfloat16)}
    for left, right in pairs.values():
        left @ right
    timings = ([_cpu_seconds(*pair) for pair in pairs.values()] for _ in range(NUM_PAIRS))
    return statistics.median(float32_seconds / max(seconds, 1e-9) for float32_seconds, seconds in timings)


def _cpu_seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    start = time.process_time()
    for _ in range(4):
        left @ right
    return time.process_time() - start
