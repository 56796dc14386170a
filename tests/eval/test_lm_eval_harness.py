"""Scores beside lm-evaluation-harness's, on the exported model: in an environment that has it (PENJING_LM_EVAL)."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penjing.cli import app

PYTHON = os.environ.get("PENJING_LM_EVAL", "")
BENCHMARK = Path(__file__).parents[2] / "benchmarks/lm_eval_harness.py"
WORDS = ("cat", "dog", "frog", "house", "tree", "sings", "sleeps", "runs", "over", "the", "a", "red", "old")


def sentence(draw, length=6):
    return " ".join(draw.choices(WORDS, k=length)).capitalize() + "."


def write_files(folder):
    draw = random.Random(5)
    choices = [
        {"query": f"Question: {sentence(draw)}", "choices": [sentence(draw, n) for n in (2, 3, 3, 4)], "gold": n % 4}
        for n in range(120)
    ]
    rows = {
        "blimp": [{"good": sentence(draw), "bad": sentence(draw), "uid": "a"} for _ in range(200)],
        "arc_easy": choices,
        "lambada_openai": [{"context": sentence(draw, 12)[:-1], "continuation": draw.choice(WORDS)} for _ in range(60)],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="PENJING_LM_EVAL names no interpreter with lm-eval: NOT compared with it")
def test_equal_scores_through_the_exported_model_and_the_server(tmp_path, small_run):
    done = CliRunner().invoke(app, ["train", "pretrain", *small_run, "max_steps=20", f"out={tmp_path / 'run'}"])
    assert done.exit_code == 0, done.output
    write_files(tmp_path)
    out = tmp_path / "record.json"
    words = [sys.executable, str(BENCHMARK), str(tmp_path / "run"), "--data", str(tmp_path), "--lm-eval", PYTHON]
    subprocess.run(
        [*words, "--tasks", "blimp,arc_easy,lambada", "--through", "hf,server", "--out", str(out)], check=True
    )
    for name, programs in json.loads(out.read_text())["tasks"].items():
        own = programs.pop("penjing")
        assert len(programs) == 2
        for other in programs.values():
            shared = (own.keys() & other.keys()) - {"asked", "cpu_seconds", "ties"}
            assert "acc" in shared and other["asked"] == own["asked"]
            for score in shared:
                slack = 0.001 + own["ties"] if own["ties"] else 0.001
                assert own[score] == pytest.approx(other[score], rel=1e-3 if score == "perplexity" else 0, abs=slack), (
                    name
                )
