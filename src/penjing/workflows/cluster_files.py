"""The files with which a cluster runs `penjing train`: a batch script of Slurm, a task of SkyPilot."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penjing import devices
from penjing.base.errors import UserError
from penjing.base.files import write_text

PORT = 29500  # where the machines of a job meet: torchrun's default

SLURM = """#!/bin/bash
#SBATCH --job-name=penjing
#SBATCH --nodes={nnodes}
#SBATCH --ntasks-per-node=1
{cards}#SBATCH --output=penjing-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
{options}
cd {folder} || exit 2
# On each machine torchrun's agent starts a rank for each GPU; they meet at the first machine.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {python} -m penjing {command} --max-restarts 3{nodes} &
step=$!

# The ranks save and stop after their step: two minutes before the time is over, and then the job is queued again; or
# when the job is ended. Slurm itself queues it again if another job took its machines, and not if scancel ended it.
save() {{
    kill -USR1 "$step"
    wait "$step"
}}
trap 'save; scontrol requeue "$SLURM_JOB_ID"; exit 0' USR1
trap 'save; exit 143' TERM
wait "$step"
"""

SKYPILOT = """# This folder, penjing's own, is copied to each machine. To continue after the machines were taken away,
# out= has to be in storage that outlives them (file_mounts).
name: penjing
num_nodes: {nnodes}
workdir: .
resources:
  accelerators: {gpu}:{gpus}
{options}
setup: |
  pip install .
run: |
  head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  python3 -m penjing {command} --max-restarts 3{nodes}
"""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """What runs: `penjing train WORDS` on `nnodes` machines. options: further lines of the file, as KEY=VALUE."""

    words: Sequence[str]
    nnodes: int
    gpus: int
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        for option in self.options:
            if not option.partition("=")[0].replace("-", "").replace("_", "").isalnum() or "\n" in option:
                raise UserError("no such line", where="--option", got=option, wanted="KEY=VALUE, such as partition=gpu")

    def slurm(self) -> str:
        options = "".join(f"#SBATCH --{option}\n" for option in self.options)
        cards = "" if self._on_cpu() else f"#SBATCH --gpus-per-node={self.gpus}\n"
        folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
        fields = self._fields("$SLURM_JOB_NUM_NODES")
        return SLURM.format(**fields, options=options, folder=folder, python=python, cards=cards)

    def skypilot(self, gpu: str) -> str:
        pairs = (option.partition("=") for option in self.options)
        options = "".join(f"  {key}: {value}\n" for key, _, value in pairs)
        return SKYPILOT.format(**self._fields("$SKYPILOT_NUM_NODES"), options=options, gpu=gpu)

    def _fields(self, count: str) -> dict[str, object]:
        nodes = f' --nnodes "{count}" --rdzv-endpoint "$head:{PORT}"' if self.nnodes > 1 else ""
        command = shlex.join(["train", *self.words, "--nproc-per-node" if self._on_cpu() else "--gpus", str(self.gpus)])
        return {"command": command, "nnodes": self.nnodes, "gpus": self.gpus, "nodes": nodes}

    def _on_cpu(self) -> bool:
        return f"compute.device={devices.HOST.type}" in self.words


def write_and_submit(path: Path, text: str, submit: Sequence[str] | None) -> None:
    """Write the file; submit: the program that takes it, with its arguments."""
    write_text(path, text)
    if submit is None:
        return
    if shutil.which(submit[0]) is None:
        next_step = f"{path} is written: submit it where {submit[0]} is."
        raise UserError(f"no {submit[0]} on this machine", where="--submit", next_step=next_step)
    done = subprocess.run([*submit, str(path)])
    if done.returncode:
        raise UserError(f"{submit[0]} ended with exit code {done.returncode}", where=path)
