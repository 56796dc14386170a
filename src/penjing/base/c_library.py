"""Libraries in C: built on first use, by the machine's C compiler and for its processor, and kept in the cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, TypeVar

from penjing.base.errors import UserError
from penjing.base.files import atomic_write
from penjing.base.user_dir import cache_dir

WIDEST_FLAGS = ("-mprefer-vector-width=512",)  # on x86; compilers use half of it by default
BUILD_SECONDS = 300  # timeout of one compiler call: seconds alone, minutes beside other programs


class CLibrary:
    """The functions of a built library, `penjing_NAME` in C; a subclass says what it is built from."""

    FOLDER: ClassVar[Path]  # of the sources
    SOURCES: ClassVar[tuple[str, ...]]  # passed to the compiler; the first gives the library its name
    HEADERS: ClassVar[tuple[str, ...]] = ()
    FLAGS: ClassVar[tuple[str, ...]]
    SIGNATURES: ClassVar[Mapping[str, tuple[type, ...]]]
    RETURNS: ClassVar[Mapping[str, type]] = {}  # of functions that return a value

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, types in self.SIGNATURES.items():
            function = getattr(library, f"penjing_{name}")
            function.argtypes, function.restype = types, self.RETURNS.get(name)
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:  # for type checkers
        raise AttributeError(name)


L = TypeVar("L", bound=CLibrary)


def build(library: type[L], links: Sequence[str] = ()) -> L | str:
    """The library, or the reason why it cannot be built. links: what else the compiler links it with."""
    reason = "there is no C compiler (cc, gcc or clang)"
    for compiler in dict.fromkeys(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang")))):
        try:
            return load(library, compiler, links)
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            reason = f"{compiler} could not build them: {_last_line(error)}"
    return reason


def load(library: type[L], compiler: str, links: Sequence[str] = ()) -> L:
    """Load the library from the cache; build it if needed. Raises OSError, SubprocessError and AttributeError."""
    sources, headers = ([library.FOLDER / name for name in names] for names in (library.SOURCES, library.HEADERS))
    name = f"cpu_{sources[0].stem}-{_key(library, [*sources, *headers], compiler, links)}.so"
    with suppress(OSError, RuntimeError):  # not built yet, no home, or a file system that forbids execution
        cached = cache_dir() / name
        if is_intact(cached):
            return library(cached)
        warnings.warn(f"{cached} is damaged: it is built again", stacklevel=2)
    with tempfile.TemporaryDirectory(prefix="penjing-") as folder:  # a loaded library stays mapped
        built = Path(folder) / name
        _compile(library, sources, compiler, links, built)
        with suppress(OSError, UserError, RuntimeError):  # the cache cannot be written: disk full, no permission
            cached = cache_dir() / name
            content = built.read_bytes()
            with atomic_write(cached) as stream:
                stream.write(content + hashlib.sha256(content).digest())
            return library(cached)
        return library(built)


def is_intact(path: Path) -> bool:
    """Whether the library ends in the SHA-256 of its other bytes. To load a truncated one kills the process (SIGBUS).
    Loaders ignore bytes after the last section. Raises OSError if the file cannot be read."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _key(library: type[CLibrary], files: Sequence[Path], compiler: str, links: Sequence[str]) -> str:
    """A hash of source, flags, compiler, processor and linked libraries: machines may share a home directory."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_SECONDS).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = [line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name")][:2]
    build_info = repr(("ends in SHA-256", library.FLAGS, WIDEST_FLAGS, links, platform.machine(), processor)).encode()
    parts = [*(source.read_bytes() for source in files), build_info, version]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _compile(library: type[CLibrary], sources: Sequence[Path], compiler: str, links: Sequence[str], path: Path) -> None:
    """Build to `path`. Raises OSError and SubprocessError."""
    widest_flags = WIDEST_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()
    for extra_flags in dict.fromkeys((widest_flags, ())):
        result = subprocess.run(
            [compiler, *library.FLAGS, *extra_flags, "-o", path, *sources, *links, "-lm"],
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
        )
        if result.returncode == 0:
            return
    raise OSError(result.stderr.strip() or f"exit status {result.returncode}")


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
