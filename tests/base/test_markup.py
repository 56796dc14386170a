"""Output that cannot be written: a full disk, a closed terminal, a closed pipe, another encoding."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forks import ENVIRONMENT

from penjing.base.markup import Terminal, open_streams
from penjing.cli import main

FULL = Path("/dev/full")


@pytest.fixture(autouse=True)
def nothing_lost(monkeypatch):
    monkeypatch.setattr(Terminal, "lost", None)


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")
def test_a_full_disk_costs_the_output_and_is_told_at_the_end(monkeypatch, capsys):
    with io.TextIOWrapper(open(FULL, "wb", 0), write_through=True) as stream:
        console = Terminal(file=stream)
        for line in ("one", "two"):
            console.print(line)
        assert Terminal.lost.errno == errno.ENOSPC
        console.file = io.StringIO()  # there is room again
        console.print("three")
        assert console.file.getvalue() == "three\n"
    monkeypatch.setattr(sys, "argv", ["penjing"])
    with pytest.raises(SystemExit) as ended:
        main(lambda **_: 0)
    assert ended.value.code == 2 and "the disk is full" in capsys.readouterr().err


def test_a_terminal_that_was_closed_costs_the_output():
    ours, theirs = os.openpty()
    with io.TextIOWrapper(open(theirs, "wb", 0), write_through=True) as stream:
        console = Terminal(file=stream, force_terminal=True)
        console.print("seen")
        os.close(ours)
        console.print("unseen")
        assert isinstance(Terminal.lost, OSError)


def test_a_pipe_that_was_closed_ends_no_training(monkeypatch):
    monkeypatch.setattr(Terminal, "trains", True)
    ours, theirs = os.pipe()
    with open(theirs, "w") as stream:
        console = Terminal(file=stream)
        os.close(ours)
        for line in ("one", "two"):
            console.print(line)
        assert console.quiet and Terminal.lost is None


def test_a_pipe_that_was_closed_ends_what_only_prints():
    """Such as `penjing watch RUN | head -1`, which would go on unseen for as long as the run."""
    code = "from penjing.base.markup import Terminal\nwhile True:\n    Terminal().print(1)"
    environment = {**os.environ, **ENVIRONMENT}
    printing = subprocess.Popen([sys.executable, "-uc", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert printing.stdout.readline() == "1\n"
    printing.stdout.close()
    assert printing.wait(60) == 1


def test_streams_that_are_closed_or_have_another_encoding(monkeypatch):
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(sys, name, None)
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    open_streams()
    Terminal().print("盆景 ok")
    print("lost", file=sys.stderr)
    assert raw.getvalue() == b"\\u76c6\\u666f ok\n" and sys.stdin.read() == ""
    for name in ("stdin", "stderr"):
        getattr(sys, name).close()


def test_a_training_ends_well_without_any_stream(small_run, tmp_path):
    """As a program of a terminal that is gone, or of a service that closes what it does not need."""
    words = [sys.executable, "-m", "penjing", "train", "pretrain", *small_run, "max_steps=2", f"out={tmp_path / 'run'}"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words],
        env={**os.environ, **ENVIRONMENT},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and (tmp_path / "run" / "outcome.json").is_file()
