"""The C kernels for CPUs: built on first use, by the machine's C compiler and for its processor.

kernels.c has all ops of a training step except matmuls, attention.c document attention, weight_grad.c weight gradients
on processors with matrix units. decode.c, a library of its own, has the whole forward pass of generation. An eager
program makes one pass over memory per operation: five for an RMSNorm, ten for its gradient. In C each is one pass, with
float32 arithmetic for any dtype. The build takes two seconds, once. Without a compiler torch's operations are used, and
a run says so. The kernels share torch's threads: they are linked with the OpenMP library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

from penjing.base.cache_dir import cache_dir
from penjing.base.errors import UserError
from penjing.base.files import atomic_write
from penjing.kernels import SWITCH

_is_off = f"{SWITCH}=off" if os.environ.get(SWITCH) == "off" else ""
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-pthread", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
)
WIDEST_FLAGS = ("-mprefer-vector-width=512",)  # on x86; compilers use half of it by default
BUILD_SECONDS = 300  # timeout of one compiler call: seconds alone, minutes beside other programs
_SIGNATURES = {
    "rms_norm": (c_void_p,) * 4 + (c_long,) * 2 + (c_float,) + (c_int,) * 3,
    "rms_norm_backward": (c_void_p,) * 7 + (c_long,) * 3 + (c_int,) * 3,
    "add": (c_void_p,) * 3 + (c_long,) + (c_int,) * 2,
    "add_scaled": (c_void_p,) * 2 + (c_float,) * 2 + (c_long,) + (c_int,) * 2,
    "nesterov_update": (c_void_p,) * 3 + (c_float, c_long, c_int),
    "sum_squares": (c_void_p,) * 2 + (c_long, c_int),
    "swiglu": (c_void_p,) * 3 + (c_long,) * 3 + (c_int,) * 2,
    "swiglu_backward": (c_void_p,) * 8 + (c_long,) * 4 + (c_int,) * 2,
    "apply_rope": (c_void_p,) * 4 + (c_long, c_float) + (c_long,) * 5 + (c_int,) * 5,
    "softmax": (c_void_p,) * 3 + (c_long,) * 4 + (c_int,) * 2,
    "add_tiles": (c_void_p,) * 3 + (c_long,) * 2 + (c_int,) * 2,
    "use_tiles": (c_int,),
    "attention_types": (),
    "weight_grad": (c_void_p,) * 3 + (c_long,) * 4 + (c_int,) * 2,
    "attention": (c_void_p,) * 6 + (c_long,) * 5 + (c_float,) + (c_int,) * 2,
    "attention_backward": (c_void_p,) * 10 + (c_long,) * 5 + (c_float,) + (c_int,) * 2,
    "log_probs": (c_void_p,) * 5 + (c_long,) * 2 + (c_int,) * 2,
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


class _Functions:
    """The functions of a built library."""

    SOURCES: tuple[str, ...]  # passed to the compiler
    HEADERS: tuple[str, ...]
    FLAGS: tuple[str, ...]
    SIGNATURES: Mapping[str, tuple[type, ...]]

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, types in self.SIGNATURES.items():
            function = getattr(library, f"penjing_{name}")
            function.argtypes, function.restype = types, _RETURNS.get(name)
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:  # for type checkers
        raise AttributeError(name)


class _Kernels(_Functions):
    """The kernels of a training step."""

    SOURCES, HEADERS = ("kernels.c", "attention.c", "weight_grad.c"), ("types.h",)
    FLAGS = (*FLAGS, "-ffp-contract=fast")
    SIGNATURES = _SIGNATURES

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_tiles = bool(self.use_tiles(True))
        self.types = self.attention_types()  # fewer without matrix units


class _DecodeKernels(_Functions):
    """The kernels of a forward pass for generation."""

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
def _build(library: type[_Functions]) -> _Functions | str:
    """The kernels, or the reason why they are unavailable."""
    if sys.platform != "linux":
        return f"they are built on Linux only, not on {sys.platform}"
    compilers = list(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))))
    openmp, reason = openmp_library(), "there is no C compiler (cc, gcc or clang)"
    if openmp is None:
        return "torch has loaded no OpenMP library, whose threads they would share"
    for compiler in dict.fromkeys(compilers):
        try:
            return _load(library, compiler, openmp)
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            reason = f"{compiler} could not build them: {_last_line(error)}"
    return reason


def _load(library: type[_Functions], compiler: str, openmp: str) -> _Functions:
    """Load the library from the cache; build it if needed. Raises OSError, SubprocessError and AttributeError."""
    source_dir = Path(__file__).parent
    sources, headers = ([source_dir / name for name in names] for names in (library.SOURCES, library.HEADERS))
    name = f"cpu_{Path(library.SOURCES[0]).stem}-{_key(library, [*sources, *headers], compiler, openmp)}.so"
    with suppress(OSError, RuntimeError):  # not built yet, no home, or a file system that forbids execution
        cached = cache_dir() / name
        if _is_intact(cached):
            return library(cached)
        warnings.warn(f"{cached} is damaged: the CPU kernels are built again", stacklevel=2)
    with tempfile.TemporaryDirectory(prefix="penjing-") as folder:  # a loaded library stays mapped
        built = Path(folder) / name
        _compile(library, sources, compiler, openmp, built)
        with suppress(OSError, UserError, RuntimeError):  # the cache cannot be written: disk full, no permission
            cached = cache_dir() / name
            content = built.read_bytes()
            with atomic_write(cached) as stream:
                stream.write(content + hashlib.sha256(content).digest())
            return library(cached)
        return library(built)


def _is_intact(path: Path) -> bool:
    """Whether the library ends in the SHA-256 of its other bytes. To load a truncated one kills the process (SIGBUS).

    Loaders ignore bytes after the last section. Raises OSError if the file cannot be read.
    """
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def openmp_library() -> str | None:
    """The path of the OpenMP library that torch has loaded. A second one would add threads of its own to torch's."""
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    files = {line.split(maxsplit=5)[-1] for line in loaded.splitlines() if "/" in line}
    candidates = sorted(file for file in files if Path(file).name.startswith(("libgomp", "libiomp", "libomp")))
    return next((file for file in candidates if "torch" in file), candidates[0] if candidates else None)


def _key(library: type[_Functions], files: Sequence[Path], compiler: str, openmp: str) -> str:
    """A hash of source, flags, compiler, processor and OpenMP library: machines may share a home directory."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_SECONDS).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = [line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name")][:2]
    build_info = repr(("ends in SHA-256", library.FLAGS, WIDEST_FLAGS, openmp, platform.machine(), processor)).encode()
    parts = [*(source.read_bytes() for source in files), build_info, version]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _compile(library: type[_Functions], sources: Sequence[Path], compiler: str, openmp: str, path: Path) -> None:
    """Build to `path`. Raises OSError and SubprocessError."""
    widest_flags = WIDEST_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()
    for extra_flags in dict.fromkeys((widest_flags, ())):
        result = subprocess.run(
            [compiler, *library.FLAGS, *extra_flags, "-o", path, *sources, openmp, "-lm"],
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
        )
        if result.returncode == 0:
            return
    raise OSError(result.stderr.strip() or f"exit status {result.returncode}")


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
