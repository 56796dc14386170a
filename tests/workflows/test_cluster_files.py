"""Files for clusters, run with stand-ins for the programs of Slurm; the Dockerfile, read."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from penjing.base.errors import UserError
from penjing.workflows.cluster_files import ClusterJob, write_and_submit

ROOT = Path(__file__).parents[2]
WORDS = ("pretrain", "data.train=a folder/it's.jsonl", 'sample.prompts=["a $b"]')
# srun hands SIGUSR1 on to the command, as Slurm's does; the command stands for penjing and tells what it hears.
STAND_INS = {
    "srun": 'printf "%s\\n" "$@" > srun.words; "$TRAINS" & trap "kill -USR1 $!" USR1; echo > hears; wait $!; wait $!',
    "scontrol": 'echo "$@" >> scontrol.words; [ "$1" = show ] && printf "first\\nsecond\\n"',
    "trains": (
        'trap "echo saved > saved; exit 138" USR1; until [ -e hears ]; do sleep 0.02; done; echo > began; '
        "for i in $(seq 600); do sleep 0.05; done"
    ),
    "fails": "exit 7",
    "sbatch": 'cp "$1" submitted',
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with the stand-ins on PATH; starts a batch script in it."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def start(text, trains):
        (tmp_path / "job").write_text(text)
        assert subprocess.run(["bash", "-n", "job"]).returncode == 0
        environment = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "5"}
        return subprocess.Popen(["bash", "job"], env={**os.environ, **environment, "TRAINS": trains})

    return start


@pytest.mark.parametrize(
    ("number", "code", "queued"), [(signal.SIGUSR1, 0, ["requeue 5"]), (signal.SIGTERM, 143, [])], ids=["time", "ended"]
)
def test_a_job_that_must_stop_saves_and_is_queued_again_if_its_time_is_over(cluster, tmp_path, number, code, queued):
    job = cluster(ClusterJob(words=WORDS, nnodes=2, gpus=4, options=("partition=gpu",)).slurm(), "trains")
    while not (tmp_path / "began").exists():
        time.sleep(0.02)
    job.send_signal(number)
    assert job.wait(timeout=60) == code
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "scontrol.words").read_text().splitlines() == ["show hostnames n[1-2]", *queued]
    words = (tmp_path / "srun.words").read_text().splitlines()
    assert words[1:7] == ["-m", "penjing", "train", *WORDS]
    assert words[7:] == shlex.split("--gpus 4 --max-restarts 3 --nnodes 2 --rdzv-endpoint first:29500")


def test_a_job_that_fails_is_not_queued_again(cluster, tmp_path):
    job = cluster(ClusterJob(words=WORDS, nnodes=1, gpus=4).slurm(), "fails")
    assert job.wait(timeout=60) == 7
    assert "requeue" not in (tmp_path / "scontrol.words").read_text()
    assert "--nnodes" not in (tmp_path / "srun.words").read_text(), "one machine has no one to meet"


def test_the_header_says_what_the_job_needs():
    job = ClusterJob(words=WORDS, nnodes=2, gpus=4, options=("partition=gpu", "time=8:00:00"))
    header = re.findall(r"^#SBATCH --(\S+)$", job.slurm(), flags=re.MULTILINE)
    needed = {"nodes=2", "gpus-per-node=4", "requeue", "signal=B:USR1@120", "partition=gpu", "time=8:00:00"}
    assert needed <= set(header)
    on_cpus = ClusterJob(words=(*WORDS, "compute.device=cpu"), nnodes=2, gpus=4).slurm()
    assert "gpus" not in on_cpus
    assert "--nproc-per-node 4" in on_cpus


def test_skypilot_reads_the_task(cluster, tmp_path):
    yaml = pytest.importorskip("yaml")
    job = ClusterJob(words=WORDS, nnodes=2, gpus=8, options=("use_spot=true",))
    task = yaml.safe_load(job.skypilot("A100"))
    assert task["resources"] == {"accelerators": "A100:8", "use_spot": True}
    assert task["num_nodes"] == 2
    (tmp_path / "python3").symlink_to("/bin/echo")
    environment = {**os.environ, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    said = subprocess.run(
        ["bash", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert (
        said.strip()
        == f"-m penjing train {' '.join(WORDS)} --gpus 8 --max-restarts 3 --nnodes 2 --rdzv-endpoint 10.0.0.1:29500"
    )


def test_a_file_is_submitted_where_the_program_is(cluster, tmp_path):
    write_and_submit(tmp_path / "file", "text", ["sbatch"])
    assert (tmp_path / "submitted").read_text() == "text"
    with pytest.raises(UserError, match="no sky on this machine"):
        write_and_submit(tmp_path / "task", "text", ["sky", "jobs", "launch"])
    assert (tmp_path / "task").exists()


@pytest.mark.parametrize("option", ["a b=c", "x\n#SBATCH --y=z", "=1"])
def test_an_option_is_one_line(option):
    with pytest.raises(UserError, match="--option"):
        ClusterJob(words=WORDS, nnodes=1, gpus=1, options=(option,))


def test_the_dockerfile_can_be_read():
    """Instructions that exist, sources that are there, commands that a shell can parse. No docker runs it here."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    assert [name for name, _ in lines][:3] == ["ARG", "FROM", "ARG"]
    assert {name for name, _ in lines} <= {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "ENTRYPOINT"}
    for name, rest in lines:
        if name == "RUN":
            assert subprocess.run(["sh", "-n", "-c", rest]).returncode == 0
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
    extras = re.search(r"\[([a-z,]+)\]", text)[1]
    assert all(
        re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) for extra in extras.split(",")
    )
