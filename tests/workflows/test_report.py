"""Where a report is written, and what it takes for a recipe's defaults."""

from pathlib import Path

from penjing.base import config
from penjing.report.load_runs import read_record
from penjing.workflows.report import recipe_defaults, write_page
from penjing.workflows.train import resolve_run


def settled(folder: Path, recipe: str, **changed: object) -> Path:
    """The folder of a run that has written its settings and nothing else."""
    folder.mkdir()
    (folder / "run.toml").write_text(config.to_toml(resolve_run(recipe, {**changed, "out": str(folder)})))
    return folder


def test_one_run_has_its_page_inside_and_several_have_it_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = settled(tmp_path / "a", "sft"), settled(tmp_path / "b", "sft")
    assert write_page([first])[1] == first / "report.html"
    assert write_page([first, second])[1] == Path("report.html")
    assert write_page([first, second], tmp_path / "c.html")[1].read_text().startswith("<!doctype html>")


def test_only_what_was_changed_differs_from_the_recipe(tmp_path):
    folder = settled(tmp_path / "run", "pretrain", seed=7, optimizer={"learning_rate": 0.25})
    record, page = write_page([folder])
    run = record.runs[0]
    changed = {name for name, value in run.settings.items() if run.defaults[name] != value}
    assert changed == {"seed", "out", "optimizer.learning_rate"}
    assert "optimizer.learning_rate" in page.read_text() and "weight_decay" not in page.read_text()


def test_the_shape_of_the_model_a_run_begins_with_is_no_change(tmp_path):
    folder = settled(tmp_path / "run", "sft", model={"hidden_size": 96})
    text = (folder / "run.toml").read_text()
    run = read_record([folder]).runs[0]
    assert recipe_defaults(run)["model.hidden_size"] != "96"
    (folder / "run.toml").write_text(text.replace('init_from = ""', 'init_from = "elsewhere"'))
    run = read_record([folder]).runs[0]
    assert recipe_defaults(run)["model.hidden_size"] == "96"


def test_a_stage_of_another_name_has_no_defaults(tmp_path):
    (tmp_path / "run.toml").write_text('stage = "mine"\n')
    assert recipe_defaults(read_record([tmp_path]).runs[0]) == {}
