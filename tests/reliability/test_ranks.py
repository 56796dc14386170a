"""Two ranks: one that dies, hangs or fails ends the run within a minute and by name, and the same command goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from reliability_harness import by_chance

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
# One rank's trouble, at a step: the lines run in that rank only. The limits are shorter than a user's.
SCRIPT = """
import os, signal, sys, time
import torch
torch.set_num_threads(1)
import penjing.train.loop as loop
import penjing.train.watchdog as watchdog
watchdog.SILENT_SECONDS, watchdog.STUCK_SECONDS = 6.0, 8.0
watchdog.Watchdog.__init__.__kwdefaults__.update(silent_seconds=6.0, stuck_seconds=8.0)
real, calls = loop._gradients, [0]
def spoiled(parts):
    if parts.report_progress.__qualname__.startswith("Watchdog"):
        calls[0] += 1
        if calls[0] == 3 and os.environ["RANK"] == "1":
            with open({when!r}, "w") as stream: stream.write(repr(time.monotonic()))
            {trouble}
    return real(parts)
loop._gradients = spoiled
sys.argv = ["penjing", *sys.argv[1:]]
from penjing.cli import main
main()
"""
TROUBLE = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stuck": "time.sleep(300)",
    "failing": "raise ZeroDivisionError('the one that counts')",
}


def launch(folder, trouble, recipe, words, *options):
    """(exit code, seconds from the trouble to the end of the last process, all that was said)."""
    script, when = folder / "spoiled.py", folder / "when"
    script.write_text(SCRIPT.format(trouble=trouble, when=str(when)))
    process = subprocess.Popen(
        [*LAUNCH, *options, str(script), "train", recipe, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=600)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    # One clock for all processes of a machine.
    return process.returncode, time.monotonic() - float(when.read_text()), said


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("times", by_chance(1, 2))
def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path, penjing, stages, times):
    """Each attempt takes the step at which it is killed for the third of its own; the last one is left alone."""
    recipe, words = stages["pretrain"]
    words = [*words, "max_steps=8", "checkpoint.every=1"]
    penjing("train", recipe, *words, f"out={tmp_path / 'whole'}", ranks=2)
    trouble = f"if int(os.environ['TORCHELASTIC_RESTART_COUNT']) < {times}: {TROUBLE['killed']}"
    words = [*words, f"out={tmp_path / 'killed'}"]
    code, _, said = launch(tmp_path, trouble, recipe, words, "--max-restarts", str(times))
    assert code == 0, said
    whole, again = (json.loads((tmp_path / name / "outcome.json").read_text()) for name in ("whole", "killed"))
    assert (whole["resumed"], again["resumed"]) == (0, times)
    assert again["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", TROUBLE)
def test_one_rank_in_trouble_ends_the_run_loudly(tmp_path, server, stages, name):
    recipe, words = stages["pretrain"]
    words = [*words, f"out={tmp_path / 'run'}"]
    code, seconds, said = launch(tmp_path, TROUBLE[name], recipe, words)
    assert code != 0
    assert 0 < seconds < 60, "not within a minute"
    if name == "killed":
        assert "rank      : 1" in said and "Signal 9" in said
    if name == "failing":
        assert "rank 1 failed after step 2" in said
        assert "the one that counts" in said
    elif name == "stopped":
        assert "rank 1 is silent" in said and "after step 2" in said
        assert "Current thread" in said or "Thread 0x" in said  # the stacks
    elif name == "stuck":
        assert "no step since" in said
        assert "spoiled.py" in said  # the stuck rank's own stack
    # Gone on with by one process, where two began.
    status, _, more = server.run(recipe, words)
    assert status == 0, more
    assert "continues after step" in more
