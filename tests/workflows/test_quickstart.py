"""The quickstart from outside, in its short form: run again, exported and talked to."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from penjing.api import load
from penjing.data.chat.render import render
from penjing.data.formats import Message
from penjing.infer.generate import generate

pytestmark = pytest.mark.slow
STAGES = ["data", "pretrain", "sft", "evaluate", "export"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, penjing):
    """An uninterrupted short quickstart, made once by the first of pytest's processes that asks for it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out, done = shared / "quickstart" / "out", shared / "quickstart.done"
    with open(shared / "quickstart.lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if not done.exists():
            penjing("quickstart", "--short", "--out", out, real=True)
            done.touch()
    return out


def test_everything_is_there(finished):
    facts = json.loads((finished / "quickstart.json").read_text())
    assert [(entry["name"], entry["state"]) for entry in facts["stages"]] == [(name, "done") for name in STAGES]
    assert facts["export"]["verified"] is True
    assert facts["export"]["largest_logit_difference"] < 1e-3
    evaluation = json.loads((finished / "evaluation.json").read_text())
    assert {row["language"] for row in evaluation["rows"]} == {"en", "zh"}
    assert all(row["chance"] > 0 for row in evaluation["rows"])
    assert "<html" in (finished / "report.html").read_text(encoding="utf-8")
    outcome = json.loads((finished / "pretrain/outcome.json").read_text())
    plan = json.loads((finished / "pretrain/plan.json").read_text())
    assert outcome["tokens"] == plan["tokens"] == plan["steps"] * plan["rows_per_step"] * 256  # no padding


def test_again_it_only_shows(finished, penjing):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")}
    done = penjing("quickstart", "--short", "--out", finished)
    assert "from before" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")} == before


def test_asked_for_something_else_is_refused(finished, penjing):
    done = penjing("quickstart", "--out", finished, check=False)
    assert done.returncode == 2
    assert "--fresh" in done.stderr


def test_the_export_says_what_the_model_says(finished):
    transformers = pytest.importorskip("transformers")
    own, folder = load(finished), finished / "export"
    turns = [{"role": "user", "content": "Tell a story about Tom and a kite."}]
    asked = render(own.tokenizer, [Message(**turns[0])], ask=True).ids
    said = generate(own.module, [asked], max_new_tokens=40, stop=())[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    assert model.generate(**ids, max_new_tokens=40, do_sample=False)[0].tolist() == asked + said
    assert len(said) == 40


def test_real_text_skips_what_it_has_no_data_for(tmp_path, toy, penjing):
    text = tmp_path / "my.txt"
    lines = [json.loads(line)["text"] for line in (toy / "pretrain.jsonl").read_text().splitlines()]
    text.write_text("\n".join(lines))
    out = tmp_path / "out"
    done = penjing("quickstart", "--short", "--data", text, "--out", out)
    states = {entry["name"]: entry["state"] for entry in json.loads((out / "quickstart.json").read_text())["stages"]}
    assert states["sft"] == "skipped"
    facts = json.loads((out / "compression.json").read_text())
    assert 0 < facts["zstd_19_bits_per_byte"] < 8
    assert "zstd -19" in done.stdout
    assert "zstd" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_novels_of_the_development_data_read(penjing, tmp_path):
    novel = Path(__file__).parents[2] / "../shared/data/pretrain_zh/三国演义.txt"
    if not novel.exists():
        pytest.skip("needs ../shared/data")
    penjing("quickstart", "--short", "--data", novel, "--out", tmp_path / "out")
    assert (tmp_path / "out/compression.json").exists()
