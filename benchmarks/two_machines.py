"""A rehearsal of two machines on one: two agents that meet on localhost, one of them killed with its rank.

    python benchmarks/two_machines.py [--kill-store]

Each "machine" is `penjing train --nnodes 2 --rdzv-endpoint localhost:PORT --nproc-per-node 1`. Once the run has taken
some steps, the second machine is killed (kill -9), and its command typed again. The run has to finish, with the
weights of a run that nobody disturbed. With `--kill-store` the first machine is killed, at which the others meet: then
both commands are typed again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

STEPS, KILL_AT = 30, 8
SHAPE = {
    "model.preset": "tiny", "model.vocab_size": 400, "model.hidden_size": 32, "model.num_hidden_layers": 2,
    "model.num_attention_heads": 2, "model.num_key_value_heads": 1, "model.head_dim": 16, "model.intermediate_size": 48,
    "data.seq_len": 64, "batch.size": 8, "max_steps": STEPS, "compute.device": "cpu", "compute.dtype": "float32",
    "eval.every": 0, "eval.sequences": 8, "sample.every": 0, "checkpoint.every": 2, "log.every": 1,
}  # fmt: skip


def write_text(path: Path) -> None:
    """Four hundred short documents of eleven words."""
    words = ["a", "small", "dog", "found", "the", "red", "kite", "under", "an", "old", "tree"]
    lines = (" ".join(words[(line + place * (line % 5 + 1)) % 11] for place in range(60)) for line in range(400))
    path.write_text("\n\n".join(lines))


def start(folder: Path, out: str, *options: str) -> subprocess.Popen[bytes]:
    words = [f"{name}={value}" for name, value in SHAPE.items()]
    command = [sys.executable, "-m", "penjing", "train", "pretrain", *words]
    command += [f"data.train={folder / 'text.txt'}", f"out={folder / out}", *options]
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def kill_machine(agent: subprocess.Popen[bytes]) -> None:
    """End an agent and its rank at once, as a power cut does."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == agent.pid:
                os.kill(int(status.parent.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue
    agent.kill()
    agent.wait()


def steps_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 400) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"not in {seconds:g} s: {what}")
        time.sleep(0.05)


def rehearse(folder: Path, *, kill_store: bool = False) -> dict[str, float | int | str]:
    """Returns how the disturbed run ended, beside an undisturbed one."""
    write_text(folder / "text.txt")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        meet = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{found.getsockname()[1]}", "--nproc-per-node", "1"]
    meet += ["--max-restarts", "3"]
    if start(folder, "whole", "--nproc-per-node", "2").wait():
        raise SystemExit((folder / "log").read_text())
    machines = [start(folder, "run", *meet)]
    time.sleep(2)  # the first one to arrive has the store
    machines.append(start(folder, "run", *meet))
    wait_for(lambda: steps_done(folder / "run") >= KILL_AT, f"step {KILL_AT}")
    kill_machine(machines[0 if kill_store else 1])
    killed = time.monotonic()
    if kill_store:
        wait_for(lambda: machines[1].poll() is not None, "the end of the machine that is left", 120)
        machines = [start(folder, "run", *meet), start(folder, "run", *meet)]
    else:
        machines[1] = start(folder, "run", *meet)
    ended_after = time.monotonic() - killed
    for machine in machines:
        wait_for(lambda machine=machine: machine.poll() is not None, "the end of the run")
    outcomes = [json.loads((folder / name / "outcome.json").read_text()) for name in ("whole", "run")]
    return {
        "exit_codes": str([machine.returncode for machine in machines]),
        "resumed": outcomes[1]["resumed"],
        "seconds_until_typed_again": round(ended_after, 1),
        "seconds_until_finished": round(time.monotonic() - killed, 1),
        "same_weights": outcomes[0]["weights_sha256"] == outcomes[1]["weights_sha256"],
        "val_loss_difference": abs(outcomes[0]["val_loss"] - outcomes[1]["val_loss"]),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        try:
            print(json.dumps(rehearse(Path(name), kill_store="--kill-store" in sys.argv), indent=2))
        finally:
            if "--log" in sys.argv:
                print((Path(name) / "log").read_text())
