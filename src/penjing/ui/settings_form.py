"""The settings of training as a form: read from their dataclasses, with the comments of the code as help."""

import tomllib
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from penjing.base import config
from penjing.base.code_help import field_comments, summary
from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.formats.files import is_data_name
from penjing.recipes import RECIPES
from penjing.track.run_record import flatten
from penjing.ui.processes import command


@cache
def form() -> dict[str, Any]:
    """Recipes, and the groups of settings in the order of the code."""
    from penjing.model.presets import names
    from penjing.train.config import Run

    groups: dict[str, dict[str, Any]] = {}
    for setting in config.walk(Run):
        name, _, leaf = setting.path.rpartition(".")
        about = {"help": summary(setting.owner), "zh": chinese("groups", name or "run")}
        group = groups.setdefault(name, {"name": name, **about, "fields": {}})
        if leaf == "name" and setting.needs:  # the choice itself: one field with all of its members
            about = {"help": "", "zh": chinese("settings", setting.path)}
            field = group["fields"].setdefault(
                leaf, {"path": setting.path, "kind": "choice", "options": [], "range": [], "needs": "", **about}
            )
            field["options"].append(setting.field.default)
            field["help"] += f"{setting.field.default}: {summary(setting.owner)} "
            group["help"] = ""  # each of its members has another
        else:
            group["fields"][f"{leaf} {setting.needs}"] = _field(setting)
    return {
        "recipes": [
            {"name": name, "help": summary(look_up(RECIPES, name, what="recipe")), "zh": chinese("recipes", name)}
            for name in RECIPES
        ],
        "groups": [{**group, "fields": list(group["fields"].values())} for group in groups.values()],
        "presets": names(),
    }


def _field(setting: config.Setting) -> dict[str, Any]:
    """kind: number, whole, yes, choice, list or text."""
    annotation, origin = setting.annotation, typing.get_origin(setting.annotation)
    kinds = {bool: "yes", int: "whole", float: "number", str: "text"}
    kind = "choice" if origin is Literal else "list" if origin is tuple else kinds[annotation]
    return {
        "path": setting.path,
        "kind": kind,
        "options": list(typing.get_args(annotation)) if kind == "choice" else [],
        "range": [f"{sign} {limit}" for sign, limit in setting.bounds if abs(limit) < 2**62],
        "help": field_comments(setting.owner).get(setting.field.name, ""),
        "zh": chinese("settings", setting.path, setting.needs),
        "needs": setting.needs,
    }


@cache
def chinese_texts() -> dict[str, dict[str, str]]:
    """{"settings": {name: help}, "groups": ..., "recipes": ...}."""
    return tomllib.loads((Path(__file__).parent / "help_zh.toml").read_text("utf-8"))


def chinese(part: str, name: str, needs: str = "") -> str:
    """The help in Chinese; of a name that several choices have, that of the choice if there is one."""
    texts = chinese_texts()[part]
    return texts.get(f"{name}@{needs.partition('=')[2]}", texts.get(name, ""))


def words(recipe: str, settings: Mapping[str, str]) -> list[str]:
    """The arguments of `penjing` that train with these settings."""
    return ["train", recipe, *(f"{name}={value}" for name, value in settings.items())]


def check(recipe: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """The command line of these settings, and what it would do: `values` of all settings, of the recipe alone where
    these cannot be; its `error`, if there is one."""
    line = command(words(recipe, settings))
    answer: dict[str, Any] = {"command": line, "error": None, "values": {}, "decisions": []}
    try:
        run = resolved(recipe, settings)
        decisions = [[decision.field, *decision.values, decision.why] for decision in run.decisions]
        answer |= {"values": flatten(config.to_dict(run)), "out": run.out, "decisions": decisions}
        missing = tuple(name for name in run.data.train if not is_data_name(Path(name)))
        if missing or not run.data.train:
            _ = Corpus(DataSettings(train=missing)).sources  # raises what training would
    except UserError as error:
        where = "" if error.where is None else str(error.where)
        answer["error"] = {"where": where, "message": f"penjing: {error.line()}"}
        if settings and not answer["values"]:
            answer["values"] = check(recipe, {})["values"]
    return answer


def resolved(recipe: str, settings: Mapping[str, str]) -> Any:
    """The run that the command line would start. Raises UserError, as it would."""
    from penjing.workflows.train import named_run

    return named_run(recipe, config.parse_overrides(words(recipe, settings)[2:]))
