"""`penjing doctor RUN` says what is sound, what is not, and from where the same command continues."""

import io
import shutil

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penjing.base.errors import UserError
from penjing.checkpoint.manifest import folder_name, steps
from penjing.cli import app
from penjing.workflows.check_run import check_runs, examine


@pytest.fixture(scope="module")
def run(tmp_path_factory, server, stages):
    folder = tmp_path_factory.mktemp("examined") / "run"
    recipe, words = stages["pretrain"]
    assert server.run(recipe, [*words, f"out={folder}"])[0] == 0
    return folder


def said_of(folder):
    said = io.StringIO()
    sound = check_runs(folder, Console(file=said, width=200))
    return sound, said.getvalue()


def test_a_sound_run(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    sound, said = said_of(run)
    assert sound
    assert "finished at step 6" in said
    assert "checkpoint step-00000006" in said and "checkpoint step-00000005" in said
    assert "tokenizer" in said and "train shards, every byte" in said and "metrics.jsonl" in said
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_folder_above_shows_all_its_runs(run):
    sound, said = said_of(run.parent)
    assert sound
    assert str(run) in said


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"])
def test_a_damaged_checkpoint(run, copy_of, name):
    folder = copy_of(run)
    path = folder / "checkpoints" / folder_name(6) / name
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    sound, said = said_of(folder)
    assert not sound
    assert f"checkpoint step-00000006: {name}" in said
    assert "the same command continues after step 5" in said


def test_everything_damaged(run, copy_of):
    folder = copy_of(run)
    for step in steps(folder / "checkpoints"):
        (folder / "checkpoints" / folder_name(step) / "state.json").unlink()
    (folder / "checkpoints" / ".step-00000007.partial").mkdir()
    (folder / "run.toml").write_text("seed = [")
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    tokens = folder / "shards" / "train" / "tokens.bin"
    tokens.write_bytes(bytes(tokens.stat().st_size))
    findings = examine(folder)
    assert findings.verdict == "nothing to resume from"
    told = " ".join(findings.errors)
    for word in ("step-00000006", "step-00000005", "run.toml", "tokenizer", "train shards"):
        assert word in told
    assert any("never silently restarted" in note for note in findings.notes)
    assert any("partially written" in note for note in findings.notes)


def test_before_the_first_checkpoint(run, copy_of):
    folder = copy_of(run)
    shutil.rmtree(folder / "checkpoints")
    assert examine(folder).verdict == "no checkpoint yet: the same command starts from step 0"


def test_no_run(tmp_path):
    with pytest.raises(UserError, match="no run in this folder"):
        check_runs(tmp_path, Console(file=io.StringIO()))
    with pytest.raises(UserError, match="no such folder"):
        check_runs(tmp_path / "gone", Console(file=io.StringIO()))


def test_the_command(run, copy_of, penjing):
    done = CliRunner().invoke(app, ["doctor", str(run)])
    assert done.exit_code == 0
    assert "finished at step 6" in done.stdout
    folder = copy_of(run)
    (folder / "checkpoints" / folder_name(6) / "state.json").unlink()
    done = penjing("doctor", folder, check=False)
    assert done.returncode == 1
    assert "continues after step 5" in done.stdout
