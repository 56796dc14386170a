"""Attacks on the sandbox, by an ordinary user and by root, with the oldest and the newest ABI of Landlock.

All attacks of a group share one program: as one user, with one ABI. An older ABI is emulated by using only its rights,
which is what a program written for it gets from any kernel; errors of an older kernel are not emulated.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sandbox_attacks import ATTACKS, BOMBS, PREAMBLE

import penjing
from penjing.agent_tools import sandbox
from penjing.agent_tools.sandbox import run
from penjing.base.errors import UserError

DRIVER = Path(__file__).with_name("sandbox_driver.py")
NOBODY = 65534
NEWEST = 99
ABIS = {"ABI 1": 1, "ABI 2": 2, "newest ABI": NEWEST}
# What the filter, Landlock and Python answer; EINVAL or EFAULT would mean that the kernel has looked at the arguments.
REFUSALS = {"EPERM", "EACCES", "ENOSYS", "EXDEV", "LookupError", "KeyError"}


def landlock_abi() -> int:
    return ctypes.CDLL(None).syscall(444, None, 0, 1) if sys.platform == "linux" else 0


if sys.platform != "linux":
    pytest.skip("the sandbox is for Linux", allow_module_level=True)
if landlock_abi() < 1:
    pytest.skip("this kernel has no Landlock, and the sandbox runs nothing", allow_module_level=True)


@pytest.fixture(scope="module")
def public():
    """A folder that every user can read, with the package in it. Those of pytest are its user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="penjing-attacks-"))
    os.chmod(folder, 0o755)
    package = Path(penjing.__file__).parent
    for name in ("base", "agent_tools"):
        shutil.copytree(package / name, folder / "penjing" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (package / "__init__.py", DRIVER):
        shutil.copy(file, folder / "penjing" if file.name == "__init__.py" else folder)
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    yield folder
    shutil.rmtree(folder)


def interpreter_for_nobody(public):
    """A Python that the user nobody can start, or None: one in /root is not to be reached."""
    modules = "import sys; sys.path.insert(0, {!r}); assert sys.version_info >= (3, 11); import penjing.agent_tools"
    check = modules.format(str(public))
    for candidate in (sys.executable, "/usr/bin/python3"):
        command = [candidate, "-I", "-B", "-c", check]
        try:
            if subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    return None


@pytest.fixture(scope="module")
def groups(public):
    """For each user and ABI that there are here: the report of sandbox_driver.py, or its error."""
    commands = {}
    if os.geteuid() == 0:
        python = interpreter_for_nobody(public)
        ordinary = [python] if python else [sys.executable, "capless"]
        commands = {"ordinary user": ordinary, "root": [sys.executable]}
        if python and python != sys.executable:
            commands["root that becomes nobody"] = [python]
    else:
        commands = {"ordinary user": [sys.executable]}
    given = json.dumps({"preamble": PREAMBLE, "attacks": ATTACKS})
    reports = {}
    for user, (python, *how) in commands.items():
        drop = user == "ordinary user" and os.geteuid() == 0 and not how
        identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if drop else {}
        for name, abi in ABIS.items():
            if abi > landlock_abi() and abi != NEWEST:
                continue
            if user.endswith("nobody") and abi != 1:  # one is enough, as it is the same there
                continue
            ran = subprocess.run(
                [python, "-I", "-B", str(public / DRIVER.name), str(public), str(abi), *how],
                input=given,
                env={"SANDBOX_TEST_TOKEN": "42", "PATH": "/usr/bin:/bin"},
                cwd="/",
                text=True,
                capture_output=True,
                **identity,
            )
            report = json.loads(ran.stdout) if ran.returncode == 0 else {"died": [ran.returncode, ran.stderr]}
            reports[user, name] = report
    return reports


@pytest.mark.parametrize(
    ("user", "abi"), [*itertools.product(("ordinary user", "root"), ABIS), ("root that becomes nobody", "ABI 1")]
)
def test_every_attack_is_tried_and_no_run_ends(groups, user, abi):
    if (user, abi) not in groups:
        pytest.skip(f"no {user} here (uid {os.geteuid()}, {sys.executable}), or no {abi} in this kernel")
    report = groups[user, abi]
    assert "died" not in report
    assert list(report["results"]) == list(ATTACKS), report["errors"]
    assert report["changed"] == {}
    assert report["again"] == "42\n"


@pytest.mark.parametrize("attack", ATTACKS)
def test_refused_and_nothing_outside_changes(groups, attack):
    assert {group for group, report in groups.items() if "died" in report} == set()
    went = {group: report["results"].get(attack) for group, report in groups.items()}
    assert {group: result for group, result in went.items() if result not in REFUSALS} == {}
    assert [group for group, report in groups.items() if attack in report["changed"]] == []


ENDS = {
    "memory": "MemoryError",
    "endless output, in spite of errors": "bytes of output",
    "deleted files that stay mapped": "no mapping",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_a_failed_program(bomb, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    if bomb == "a call of 32 bits" and platform.machine() != "x86_64":
        pytest.skip("only x86-64 has int 0x80")
    ran = run(BOMBS[bomb], cpu_seconds=0.5 if bomb in ("an endless loop", "stopping itself") else 5)
    assert not ran.finished
    assert ENDS.get(bomb, "") in ran.errors
    assert len(ran.output) <= sandbox.OUTPUT_BYTES
    assert list(tmp_path.iterdir()) == []


def test_without_landlock_nothing_is_run_and_the_line_names_it(monkeypatch):
    monkeypatch.setattr(sandbox, "NEWEST_LANDLOCK", 0)
    with pytest.raises(UserError) as caught:
        run("print(1)")
    assert "Landlock" in caught.value.got
    assert "lsm=" in caught.value.got
    assert caught.value.next_step
    assert "\n" not in str(caught.value)


def test_what_may_only_be_read_is_not_opened_to_be_emptied(monkeypatch):
    """Before ABI 3 Landlock allows O_RDONLY | O_TRUNC for what may be read, as the library of a user's own Python."""
    monkeypatch.setattr(sandbox, "NEWEST_LANDLOCK", 1)
    ran = run("import os\nos.open('/dev/null', os.O_RDONLY | os.O_TRUNC)")
    assert "Operation not permitted" in ran.errors
