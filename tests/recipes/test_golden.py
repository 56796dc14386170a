"""Each recipe, resolved, as text: a changed default shows in review. Renew: `python tests/recipes/test_golden.py`."""

from pathlib import Path

import pytest
from user_errors import raises_user_error

from penjing.base import config
from penjing.recipes import RECIPES
from penjing.train.config import Run
from penjing.workflows.train import resolve_run

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipe_resolves_to_what_is_on_record(name):
    assert config.to_toml(resolve_run(name)) == (GOLDEN / f"{name}.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_resolved_recipe_can_be_started_from_its_file(name):
    assert config.resolve(Run, config.read_toml(GOLDEN / f"{name}.toml")) == resolve_run(name)


@pytest.mark.parametrize("name", ["ladder-30m", "ladder:30m", "26m"])
def test_a_model_is_no_recipe(name):
    with raises_user_error(where=name, next_step=f"model={name.replace(':', '-')}"):
        resolve_run(name)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for recipe in RECIPES:
        (GOLDEN / f"{recipe}.toml").write_text(config.to_toml(resolve_run(recipe)), encoding="utf-8")
