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

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "penjing"]
# Read by each Python at its start: in a rank, it runs a file once the training is imported.
SITE = """
import importlib.util, os, sys
class Spoiler:
    def find_spec(self, name, path, target=None):
        if name != "penjing.workflows.train":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            exec(open({spoil!r}).read(), dict())
        spec.loader.exec_module = exec_module
        return spec
if "RANK" in os.environ:
    sys.meta_path.insert(0, Spoiler())
"""
# One rank's trouble, at a step: the lines run in that rank only. The limits are shorter than a user's.
SPOIL = """
import os, signal, sys, time
import torch
torch.set_num_threads(1)
import penjing.train.loop as loop
import penjing.train.watchdog as watchdog
from penjing.base.errors import UserError
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
"""
TROUBLE = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stuck": "time.sleep(300)",
    "failing": "raise ZeroDivisionError('the one that counts')",
    "mistaken": "raise UserError('a mistake', where='data.train')",
}


def launch(folder, trouble, words, options=(), launcher=("penjing",)):
    """(exit code, seconds from the trouble to the end of the last process, all that was said)."""
    site, when = folder / "site", folder / "when"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE.format(spoil=str(site / "spoil")))
    (site / "spoil").write_text(SPOIL.format(trouble=trouble, when=str(when)))
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "train", *map(str, words), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
            "TMPDIR": str(folder),
        },
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
def test_a_run_whose_rank_was_killed_starts_again(tmp_path, penjing, stages, times):
    """Each attempt takes the step at which it is killed for the third of its own; the last one is left alone. Under
    torchrun the attempts have one store, under penjing's launcher each has its own."""
    recipe, words = stages["pretrain"]
    words = [recipe, *words, "max_steps=8", "checkpoint.every=1"]
    penjing("train", *words, f"out={tmp_path / 'whole'}", ranks=2)
    trouble = f"if int(os.environ['TORCHELASTIC_RESTART_COUNT']) < {times}: {TROUBLE['killed']}"
    words = [*words, f"out={tmp_path / 'killed'}"]
    options = ["--max-restarts", str(times)]
    if times > 1:
        code, _, said = launch(tmp_path, trouble, words, launcher=[*TORCHRUN[:2], *options, *TORCHRUN[2:]])
    else:
        code, _, said = launch(tmp_path, trouble, words, ["--nproc-per-node", "2", *options])
        assert "rank 1 was killed by SIGKILL; restart 1 of 1" in said
    assert code == 0, said
    whole, again = (json.loads((tmp_path / name / "outcome.json").read_text()) for name in ("whole", "killed"))
    assert (whole["resumed"], again["resumed"]) == (0, times)
    assert again["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_out_of_memory_on_one_rank_shrinks_the_passes_of_all(tmp_path, penjing, stages):
    """No restart is allowed, and this one does not count."""
    recipe, words = stages["pretrain"]
    words = [recipe, *words, "max_steps=5", "checkpoint.every=1"]
    trouble = "if parts.source.micro_size > 1: calls[0] -= 1; raise torch.OutOfMemoryError('of 2 GiB')"
    code, _, said = launch(tmp_path, trouble, [*words, f"out={tmp_path / 'run'}"], ["--nproc-per-node", "2"])
    assert code == 0, said
    assert said.count("out of memory: with batch.micro_size=1") == 1
    assert "continues after step 2" in said
    penjing("train", *words, f"out={tmp_path / 'whole'}", ranks=2)
    whole, again = (json.loads((tmp_path / name / "outcome.json").read_text()) for name in ("whole", "run"))
    assert (again["resumed"], again["val_loss"]) == (1, pytest.approx(whole["val_loss"], abs=1e-6))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name != "failing" else ()) for name in TROUBLE],
)
def test_one_rank_in_trouble_ends_the_run_loudly(tmp_path, server, stages, name):
    recipe, words = stages["pretrain"]
    words = [*words, f"out={tmp_path / 'run'}"]
    code, seconds, said = launch(tmp_path, TROUBLE[name], [recipe, *words], ["--nproc-per-node", "2"])
    assert 0 < seconds < 60, "not within a minute"
    told = said[said.index("penjing: ") :]
    assert code == {"killed": 137, "stopped": 134, "mistaken": 2}.get(name, 1), said
    if name == "mistaken":
        assert told == "penjing: data.train: a mistake\n"
    elif name == "killed":
        assert "Traceback" not in told
        assert "rank 1 was killed by SIGKILL" in told
    elif name == "failing":
        assert told.startswith("penjing: rank 1 failed after step 2:")
        assert told.count("Traceback") == told.count("Error: the one that counts") == 1
    else:  # the stack of that rank, and of no other
        assert {"stopped": "rank 1 is silent", "stuck": "rank 1 is stuck after step 2"}[name] in told
        assert "in spoiled" in told
        assert "all_reduce" not in told
    # Gone on with by one process, where two began.
    status, _, more = server.run(recipe, words)
    assert status == 0, more
    assert "continues after step" in more
