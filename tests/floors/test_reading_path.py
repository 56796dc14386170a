"""The files a learner opens to see how such a model is made: short together, and about one thing each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import penjing

ROOT = Path(penjing.__file__).parent
READING_PATH = (  # in this order
    "data/tokenizer/tokenizer.py",
    "data/packing/best_fit.py",
    "loader/batch.py",
    "model/transformer.py",
    "model/block.py",
    "model/attention.py",
    "model/mlp.py",
    "model/rope.py",
    "model/norm.py",
    "objective/next_token.py",
    "optim/muon.py",
    "optim/schedule.py",
    "train/loop.py",
)
MAX_LINES = 1800
# A branch for a device, a kernel or a compiler, or an import of one.
BRANCH = re.compile(r"is_cuda|device\.type|is_compiling|torch\.compile|\bcpu\.|triton|kernels\.(?!ops|reference)")


def test_the_reading_path_is_short() -> None:
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in READING_PATH}
    assert sum(lines.values()) <= MAX_LINES, lines


@pytest.mark.parametrize("name", READING_PATH)
def test_no_file_of_it_asks_for_a_device_a_kernel_or_a_compiler(name: str) -> None:
    found = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if BRANCH.search(line)]
    assert not found


def test_the_models_files_neither() -> None:
    for name in ("moe.py", "linear.py", "value_head.py"):
        assert not BRANCH.search((ROOT / "model" / name).read_text(encoding="utf-8").replace("kernels.fp8", "")), name
