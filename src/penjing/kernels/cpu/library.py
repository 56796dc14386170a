"""The C kernels for CPUs: built when first needed, by the machine's own C compiler and for its processor.

kernels.c has all ops of a step except matmuls, attention.c document attention, weight_grad.c weight gradients on
processors with matrix units; decode.c, a library of its own, a whole forward pass that writes text. An eager program
makes a pass over memory for each operation: an RMSNorm is five of them, its gradient ten. In C each is one, in float32
inside, whatever is read and written. Building takes two seconds, once. Without a compiler torch's operations are used,
and a run says so. The kernels share torch's threads: they are linked with the OpenMP library that torch has loaded.
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
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

from penjing.base.cache_dir import cache_dir
from penjing.kernels import SWITCH

_is_off = f"{SWITCH}=off" if os.environ.get(SWITCH) == "off" else ""
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-pthread", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-ffp-contract=fast"),
)
WIDEST = ("-mprefer-vector-width=512",)  # on x86; compilers use half of it by default
BUILD_SECONDS = 120  # timeout of one compiler call
_SIGNATURES = {
    "rms_norm": (c_void_p,) * 4 + (c_long,) * 2 + (c_float,) + (c_int,) * 3,
    "rms_norm_backward": (c_void_p,) * 7 + (c_long,) * 3 + (c_int,) * 3,
    "add": (c_void_p,) * 3 + (c_long,) + (c_int,) * 2,
    "add_scaled": (c_void_p,) * 2 + (c_float,) * 2 + (c_long,) + (c_int,) * 2,
    "nesterov_update": (c_void_p,) * 3 + (c_float, c_long, c_int),
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

    SOURCES: tuple[str, ...]  # those that the compiler is given
    HEADERS: tuple[str, ...]
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
    """Those of a training step."""

    SOURCES, HEADERS = ("kernels.c", "attention.c", "weight_grad.c"), ("types.h",)
    SIGNATURES = _SIGNATURES

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_tiles = bool(self.use_tiles(True))
        self.types = self.attention_types()  # those without matrix units are fewer


class _DecodeKernels(_Functions):
    """Those of a forward pass that writes text."""

    SOURCES, HEADERS = ("decode.c",), ("linear.h", "panels.h", "team.h", "types.h")
    SIGNATURES = _DECODE_SIGNATURES


@cache
def kernels() -> _Kernels | None:
    """The built library; None where there is none (see `unavailable_reason`)."""
    found = _is_off or _build(_Kernels)
    return found if isinstance(found, _Kernels) else None


@cache
def decode_kernels() -> _DecodeKernels | None:
    """The library of `decode.py`; None where there is none (see `unavailable_decode_reason`)."""
    found = _is_off or _build(_DecodeKernels)
    return found if isinstance(found, _DecodeKernels) else None


def unavailable_reason() -> str:
    """Why this CPU has no kernels; empty where it has them."""
    found = _is_off or _build(_Kernels)
    return found if isinstance(found, str) else ""


def unavailable_decode_reason() -> str:
    """The same of `decode_kernels`."""
    found = _is_off or _build(_DecodeKernels)
    return found if isinstance(found, str) else ""


def switch_off() -> None:
    """Use torch's own operations in this process from here on."""
    global _is_off
    _is_off = "they were switched off"
    kernels.cache_clear()
    decode_kernels.cache_clear()


@cache
def _build(library: type[_Functions]) -> _Functions | str:
    """The kernels, or why there are none."""
    if sys.platform != "linux":
        return f"they are built on Linux only, not on {sys.platform}"
    compilers = list(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))))
    openmp, reason = _openmp(), "there is no C compiler (cc, gcc or clang)"
    if openmp is None:
        return "torch has loaded no OpenMP library whose threads they could share"
    folder, is_kept = _folder()
    try:
        for compiler in dict.fromkeys(compilers):
            try:
                return _loaded(library, compiler, openmp, folder)
            except (OSError, subprocess.SubprocessError, AttributeError) as error:
                reason = f"{compiler} could not build them: {_last_line(error)}"
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays
    return reason


def _loaded(library: type[_Functions], compiler: str, openmp: str, folder: Path) -> _Functions:
    """Load from the folder, after building there if needed. Raises OSError, SubprocessError and AttributeError."""
    here = Path(__file__).parent
    sources, headers = ([here / name for name in names] for names in (library.SOURCES, library.HEADERS))
    path = folder / f"cpu_{Path(library.SOURCES[0]).stem}-{_key([*sources, *headers], compiler, openmp)}.so"
    if path.exists():
        try:
            return library(path)
        except OSError:
            pass  # truncated by a crash: build it again
    _compile(sources, compiler, openmp, path)
    return library(path)


def _openmp() -> str | None:
    """The file of torch's OpenMP library in this process. A second one would have threads of its own residual
    torch's."""
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    files = {line.split(maxsplit=5)[-1] for line in loaded.splitlines() if "/" in line}
    found = sorted(file for file in files if Path(file).name.startswith(("libgomp", "libiomp", "libomp")))
    return next((file for file in found if "torch" in file), found[0] if found else None)


def _folder() -> tuple[Path, bool]:
    """The cache folder for built kernels and True; a temporary folder and False where the cache cannot be written."""
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder, True
    except (OSError, RuntimeError):  # disk full, no permission, or no home
        pass
    return Path(tempfile.mkdtemp(prefix="penjing-")), False


def _key(files: Sequence[Path], compiler: str, openmp: str) -> str:
    """Identifies a build by source, flags, compiler, processor and OpenMP library: machines may share a home."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_SECONDS).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = [line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name")][:2]
    about = repr((FLAGS, WIDEST, openmp, platform.machine(), processor)).encode()
    known = [*(source.read_bytes() for source in files), about, version]
    return hashlib.sha256(b"\0".join(known)).hexdigest()[:20]


def _compile(sources: Sequence[Path], compiler: str, openmp: str, path: Path) -> None:
    """Build to `path`; other processes may do so at the same time. Raises OSError and SubprocessError."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    widest = WIDEST if platform.machine() in ("x86_64", "AMD64") else ()
    try:
        for more in dict.fromkeys((widest, ())):
            done = subprocess.run(
                [compiler, *FLAGS, *more, "-o", draft, *map(str, sources), openmp, "-lm"],
                capture_output=True,
                text=True,
                timeout=BUILD_SECONDS,
            )
            if done.returncode == 0:
                os.replace(draft, path)
                return
        raise OSError(done.stderr.strip() or f"exit status {done.returncode}")
    finally:
        Path(draft).unlink(missing_ok=True)


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
