"""The C kernels for CPUs: built when first needed, by the machine's own C compiler and for its processor.

kernels.c has all ops of a step except matmuls, attention.c document attention, weight_grad.c weight gradients on
processors with matrix units. An eager program makes a pass over memory for each operation: an RMSNorm is five of them,
its gradient ten. In C each is one, in float32 inside, whatever is read and written. Building takes two seconds, once.
Without a compiler torch's operations are used, and a run says so. The kernels share torch's threads: they are linked
with the OpenMP library that torch has loaded.
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
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

from penjing.base.cache_dir import cache_dir
from penjing.kernels import SWITCH

_is_off = f"{SWITCH}=off" if os.environ.get(SWITCH) == "off" else ""
SOURCES = tuple(Path(__file__).with_name(it) for it in ("kernels.c", "attention.c", "weight_grad.c", "types.h"))
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
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
OUT_OF_RANGE = 2  # what a kernel returns; 1: no memory
_FAILING = {"attention", "attention_backward", "weight_grad", "cross_entropy", "log_probs", "log_softmax_backward"}
_ANSWERING = _FAILING | {"use_tiles", "attention_types"}


class _Kernels:
    """The functions of the built library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, types in _SIGNATURES.items():
            function = getattr(library, f"penjing_{name}")
            function.argtypes, function.restype = types, c_int if name in _ANSWERING else None
            setattr(self, name, function)
        self.has_tiles = bool(self.use_tiles(True))
        self.types = self.attention_types()  # those without matrix units are fewer

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:  # for type checkers
        raise AttributeError(name)


@cache
def kernels() -> _Kernels | None:
    """The built library; None where there is none (see `unavailable_reason`)."""
    found = _is_off or _build()
    return found if isinstance(found, _Kernels) else None


def unavailable_reason() -> str:
    """Why this CPU has no kernels; empty where it has them."""
    found = _is_off or _build()
    return found if isinstance(found, str) else ""


def switch_off() -> None:
    """Use torch's own operations in this process from here on."""
    global _is_off
    _is_off = "they were switched off"
    kernels.cache_clear()


@cache
def _build() -> _Kernels | str:
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
                return _loaded(compiler, openmp, folder)
            except (OSError, subprocess.SubprocessError, AttributeError) as error:
                reason = f"{compiler} could not build them: {_last_line(error)}"
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays
    return reason


def _loaded(compiler: str, openmp: str, folder: Path) -> _Kernels:
    """Load from the folder, after building there if needed. Raises OSError, SubprocessError and AttributeError."""
    path = folder / f"cpu_kernels-{_key(compiler, openmp)}.so"
    if path.exists():
        try:
            return _Kernels(path)
        except OSError:
            pass  # truncated by a crash: build it again
    _compile(compiler, openmp, path)
    return _Kernels(path)


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


def _key(compiler: str, openmp: str) -> str:
    """Identifies a build by source, flags, compiler, processor and OpenMP library: machines may share a home."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_SECONDS).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = [line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name")][:2]
    about = repr((FLAGS, WIDEST, openmp, platform.machine(), processor)).encode()
    known = [*(source.read_bytes() for source in SOURCES), about, version]
    return hashlib.sha256(b"\0".join(known)).hexdigest()[:20]


def _compile(compiler: str, openmp: str, path: Path) -> None:
    """Build to `path`; other processes may do so at the same time. Raises OSError and SubprocessError."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    widest = WIDEST if platform.machine() in ("x86_64", "AMD64") else ()
    try:
        for more in dict.fromkeys((widest, ())):
            done = subprocess.run(
                [compiler, *FLAGS, *more, "-o", draft, *map(str, SOURCES[:-1]), openmp, "-lm"],
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
