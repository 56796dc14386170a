"""Runs attacks in the sandbox as whoever starts it, and prints what came of them, as JSON.

Arguments: the folder of the package, the newest ABI of Landlock to use, and "capless" to give up capabilities first:
root without any is, to the kernel, a user who owns root's files. The attacks come as JSON through standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import errno, json
FILES, NAMES = {files!r}, {attacks!r}
results = {{}}
for name, code in NAMES.items():
    F = FILES[name]
    D = os.path.dirname(F)
    try:
        exec(code, globals())
        results[name] = "went through"
    except OSError as error:
        results[name] = errno.errorcode.get(error.errno, str(error))
    except BaseException as error:
        results[name] = type(error).__name__
print(json.dumps(results))
"""


def look(folder: Path) -> dict[str, list[object]]:
    """Everything about a folder that an attack could change. Reading changes times of access: they are left out."""
    found: dict[str, list[object]] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        facts = path.lstat()
        content: object = "unreadable"
        with contextlib.suppress(OSError):
            content = path.read_text() if path.is_file() else sorted(os.listdir(path))
        try:
            attributes = {name: os.getxattr(path, name).hex() for name in os.listxattr(path)}
        except OSError:
            attributes = {}
        found[str(path)] = [
            facts.st_mode, facts.st_uid, facts.st_gid, facts.st_nlink, facts.st_size, facts.st_mtime_ns,
            facts.st_ctime_ns, content, attributes,
        ]  # fmt: skip
    return found


def main() -> None:
    source, newest_abi, *how = sys.argv[1:]
    if "capless" in how:
        capset = {"x86_64": 126, "aarch64": 91}[os.uname().machine]
        header, nothing = (0x20080522).to_bytes(4, "little") + bytes(4), bytes(24)
        assert ctypes.CDLL(None).syscall(capset, header, nothing) == 0
    sys.path.insert(0, source)
    from penjing.agent_tools import sandbox

    sandbox.NEWEST_LANDLOCK = int(newest_abi)
    given = json.load(sys.stdin)
    with tempfile.TemporaryDirectory(prefix="penjing-outside-", ignore_cleanup_errors=True) as outside:
        os.chmod(outside, 0o755)
        files = {}
        for number, name in enumerate(given["attacks"]):
            folder = Path(outside) / str(number)
            (folder / "empty").mkdir(parents=True)
            (folder / "file").write_text("42")
            os.chmod(folder / "file", 0o644)
            with contextlib.suppress(OSError):
                os.setxattr(folder / "file", "user.mark", b"1")
            files[name] = str(folder / "file")
        left_open = os.open(next(iter(files.values())), os.O_RDWR)
        os.set_inheritable(left_open, True)
        before = {name: look(Path(file).parent) for name, file in files.items()}
        code = given["preamble"] + PROGRAM.format(files=files, attacks=given["attacks"])
        ran = sandbox.run(code, cpu_seconds=10)
        after = {name: look(Path(file).parent) for name, file in files.items()}
        again = sandbox.run("print(6 * 7)")
    report = {
        "user": os.geteuid(),
        "errors": ran.errors,
        "results": json.loads(ran.output or "{}"),
        "changed": {name: [before[name], after[name]] for name in files if before[name] != after[name]},
        "again": again.output,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
