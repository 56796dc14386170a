"""A device that penjing has never heard of: built here, found by `auto`, and trained on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

pytestmark = pytest.mark.nightly  # torch's headers take 20 s to compile
HERE = Path(__file__).parent
COMPILER = shutil.which("g++")

# torch needs a module for a device's type. The process ends without the destructors of torch's threads.
PROGRAM = """
import os, sys, types
import torch
torch.ops.load_library(sys.argv.pop(1))
torch.utils.rename_privateuse1_backend("standin")
module = types.ModuleType("torch.standin")
module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda seed: None
torch._register_device_module("standin", module)
torch.utils.generate_methods_for_privateuse1_backend()
import penjing.devices
if row := os.environ.get("STAND_IN_ROW"):  # CONTRIBUTING.md's file, in a folder, and its line
    folder, line = row.split(os.linesep)
    penjing.devices.__path__.append(folder)
    name, place = line.strip(' ",').split('": "')
    penjing.devices.DEVICES = {name: place, **penjing.devices.DEVICES}
from penjing.cli import main
try:
    code = main()
except SystemExit as end:
    code = end.code
sys.stdout.flush()
sys.stderr.flush()
os._exit(int(code or 0))
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built module."""
    if COMPILER is None:
        pytest.skip("no g++ to build the stand-in with")
    path = tmp_path_factory.mktemp("stand_in") / "stand_in.so"
    flags = [f"-isystem{folder}" for folder in cpp_extension.include_paths()]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch"]
    build = [COMPILER, "-std=c++20", "-O0", "-fPIC", "-shared", *flags, str(HERE / "stand_in.cpp")]
    subprocess.run([*build, *libraries, "-o", str(path)], check=True, timeout=600)
    return path


def run(stand_in: Path, *command: str, row: str = "") -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(stand_in), *command],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "STAND_IN_ROW": row, "CUDA_VISIBLE_DEVICES": ""},  # `auto` would take a GPU
    )
    assert done.returncode == 0, done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A training of four steps."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(
        "\n\n".join(f"The {number} cats of house {number % 7} sat on {number} mats." for number in range(400))
    )
    return [
        "train",
        "pretrain",
        f"data.train={text}",
        "tokenizer.vocab_size=300",
        "model.num_hidden_layers=2",
        "model.hidden_size=32",
        "model.num_attention_heads=2",
        "data.seq_len=32",
        "batch.size=4",
        "log.every=1",
        "compute.dtype=float32",
    ]


def test_auto_trains_on_it_as_on_a_cpu_and_a_cpu_goes_on_from_there(stand_in, words, tmp_path, penjing):
    there, here = tmp_path / "there", tmp_path / "here"
    run(stand_in, *words, "max_steps=4", f"out={there}")
    penjing(*words, "max_steps=4", f"out={here}", "compute.device=cpu")
    assert losses(there) == pytest.approx(losses(here), rel=1e-4)
    assert "1 x standin" in (there / "plan.json").read_text()
    penjing(*words, "max_steps=6", f"out={there}", "compute.device=cpu", "--allow-change", "max_steps")
    outcome = json.loads((there / "outcome.json").read_text())
    assert outcome["resumed"] == 1 and outcome["tokens"] == 6 * 4 * 32


def test_contributings_row_is_one_file_and_one_line(stand_in, words, tmp_path):
    page = (HERE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    page = page.partition("## Add a device")[2].partition("\n## ")[0]
    code, line = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "standin.py").write_text(code, encoding="utf-8")
    run(stand_in, *words, "max_steps=2", f"out={tmp_path / 'run'}", row=f"{tmp_path}{os.linesep}{line.strip()}")
    assert "1 x Stand-in 1" in (tmp_path / "run/plan.json").read_text()
