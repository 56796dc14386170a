"""The C kernels for CPUs: built on first use, by the machine's C compiler and for its processor.

kernels.c has all ops of a training step except matmuls, attention.c document attention, weight_grad.c weight gradients
on processors with matrix units. decode.c, a library of its own, has the whole forward pass of generation. An eager
program makes one pass over memory per operation: five for an RMSNorm, ten for its gradient. In C each is one pass, with
float32 arithmetic for any dtype. The build takes two seconds, once. Without a compiler torch's operations are used, and
a run says so. The kernels share torch's threads: they are linked with the OpenMP library that torch has loaded.
"""

import os
import sys
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

from penjing.base.c_library import CLibrary, L, build
from penjing.kernels import SWITCH

_is_off = f"{SWITCH}=off" if os.environ.get(SWITCH) == "off" else ""
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-pthread", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
)
_SIGNATURES = {
    "rms_norm": (c_void_p,) * 4 + (c_long,) * 2 + (c_float,) + (c_int,) * 3,
    "rms_norm_backward": (c_void_p,) * 7 + (c_long,) * 3 + (c_int,) * 3,
    "add": (c_void_p,) * 3 + (c_long,) + (c_int,) * 2,
    "add_scaled": (c_void_p,) * 2 + (c_float,) * 2 + (c_long,) + (c_int,) * 2,
    "nesterov_update": (c_void_p,) * 3 + (c_float, c_long, c_int),
    "sum_squares": (c_void_p,) * 2 + (c_long, c_int),
    "dropout": (c_void_p,) * 3 + (c_long,) * 2 + (c_int, c_float) + (c_int,) * 2,
    "swiglu": (c_void_p,) * 3 + (c_long,) * 3 + (c_int,) * 2,
    "swiglu_backward": (c_void_p,) * 8 + (c_long,) * 4 + (c_int,) * 2,
    "apply_rope": (c_void_p,) * 4 + (c_long, c_float) + (c_long,) * 5 + (c_int,) * 5,
    "softmax": (c_void_p,) * 3 + (c_long,) * 4 + (c_int,) * 2,
    "add_tiles": (c_void_p,) * 3 + (c_long,) * 2 + (c_int,) * 2,
    "use_tiles": (c_int,),
    "attention_types": (),
    "weight_grad": (c_void_p,) * 3 + (c_long,) * 4 + (c_int,) * 2,
    "attention": (c_void_p,) * 7 + (c_long,) * 5 + (c_float,) + (c_int,) * 2,
    "attention_backward": (c_void_p,) * 10 + (c_long,) * 5 + (c_float,) + (c_int,) * 2,
    "log_probs": (c_void_p,) * 5 + (c_long,) * 2 + (c_int,) * 2,
    "log_sum_exp": (c_void_p,) * 4 + (c_long,) * 2 + (c_int,),
    "log_softmax_backward": (c_void_p,) * 4 + (c_long,) * 2 + (c_int,) * 2,
    "cross_entropy": (c_void_p,) * 4 + (c_long,) * 2 + (c_int,) * 3,
}
_DECODE_SIGNATURES = {
    "use_large_pages": (c_void_p, c_long),
    "decode_open": (c_void_p,),
    "decode_close": (c_void_p,),
    "decode_bytes": (c_void_p, c_long, c_int),
    "decode": (c_void_p,) * 3 + (c_int,),
    "pack": (c_void_p,) + (c_long,) * 2 + (c_int, c_void_p) + (c_long,) * 4 + (c_int,) * 2,
}
_FAILING = {"attention", "attention_backward", "weight_grad", "cross_entropy", "log_probs", "log_softmax_backward"}
_RETURNS = {
    **dict.fromkeys((*_FAILING, "use_tiles", "attention_types", "decode"), c_int),
    "decode_bytes": c_long,
    "decode_open": c_void_p,
}


class _Kernels(CLibrary):
    FOLDER, RETURNS = Path(__file__).parent, _RETURNS
    SOURCES, HEADERS = ("kernels.c", "attention.c", "weight_grad.c"), ("types.h",)
    FLAGS = (*FLAGS, "-ffp-contract=fast")
    SIGNATURES = _SIGNATURES

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_tiles = bool(self.use_tiles(True))
        self.types = self.attention_types()  # fewer without matrix units


class _DecodeKernels(CLibrary):
    """The kernels of a forward pass for generation."""

    FOLDER, RETURNS = Path(__file__).parent, _RETURNS
    SOURCES, HEADERS = ("decode.c",), ("linear.h", "panels.h", "team.h", "types.h")
    FLAGS = (*FLAGS, "-ffp-contract=off")  # else which a * b + c become FMAs depends on the unrolled rows
    SIGNATURES = _DECODE_SIGNATURES


@cache
def kernels() -> _Kernels | None:
    """The built library; None if unavailable (see `unavailable_reason`)."""
    built = _is_off or _build(_Kernels)
    return built if isinstance(built, _Kernels) else None


@cache
def decode_kernels() -> _DecodeKernels | None:
    """The library of `decode.py`; None if unavailable (see `unavailable_decode_reason`)."""
    built = _is_off or _build(_DecodeKernels)
    return built if isinstance(built, _DecodeKernels) else None


def unavailable_reason() -> str:
    """Why the kernels are unavailable; empty if they are available."""
    built = _is_off or _build(_Kernels)
    return built if isinstance(built, str) else ""


def unavailable_decode_reason() -> str:
    """The same of `decode_kernels`."""
    built = _is_off or _build(_DecodeKernels)
    return built if isinstance(built, str) else ""


def switch_off() -> None:
    """Use torch's operations in this process from now on."""
    global _is_off
    _is_off = "they were switched off"
    kernels.cache_clear()
    decode_kernels.cache_clear()


@cache
def _build(library: type[L]) -> L | str:
    """The kernels, or the reason why they are unavailable."""
    if sys.platform != "linux":
        return f"they are built on Linux only, not on {sys.platform}"
    openmp = openmp_library()
    if openmp is None:
        return "torch has loaded no OpenMP library, whose threads they would share"
    return build(library, [openmp])


def openmp_library() -> str | None:
    """The path of the OpenMP library that torch has loaded. A second one would add threads of its own to torch's."""
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    files = {line.split(maxsplit=5)[-1] for line in loaded.splitlines() if "/" in line}
    candidates = sorted(file for file in files if Path(file).name.startswith(("libgomp", "libiomp", "libomp")))
    return next((file for file in candidates if "torch" in file), candidates[0] if candidates else None)
