"""The tab of training: the form, and to start, stop and continue runs; chat servers of their checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from penjing.base import config
from penjing.checkpoint.manifest import folder_name
from penjing.serve.errors import ApiError
from penjing.track.run_record import RunRecord, flatten
from penjing.ui import settings_form
from penjing.ui.processes import Chats, Trainings
from penjing.ui.site import Body, Site, text_field

QUICKSTART = ("quickstart", "--out", "runs/quickstart")
# Texts that may look like paths; any other value is taken for one.
NO_PATHS = ("sample.prompts", "freeze", "objective.reward.pattern", "objective.reward.format_pattern")


def add_routes(app: FastAPI, site: Site, trainings: Trainings, chats: Chats) -> None:
    app.get("/api/settings")(settings_form.form)

    @app.post("/api/check")
    def check(body: Body) -> dict[str, Any]:
        return settings_form.check(*_asked(site, body))

    @app.post("/api/start")
    def start(body: Body) -> dict[str, str]:
        recipe, values = _asked(site, body)
        run = settings_form.resolved(recipe, values)
        _check_paths(site, flatten(config.to_dict(run)))  # those of a TOML file too
        out = site.path(run.out)
        trainings.start(settings_form.words(recipe, values), out)
        return {"run": site.name(out)}

    @app.post("/api/quickstart")
    def quickstart(_: Body) -> dict[str, str]:  # a body that no form of another site can send
        trainings.start(QUICKSTART, site.path(QUICKSTART[-1]))
        return {"run": QUICKSTART[-1]}

    @app.post("/api/resume")
    def resume(body: Body) -> dict[str, str]:
        run = _run(site, text_field(body, "run"))
        words, folder = resuming(run, site.folder)
        trainings.start(words, run, folder=folder)
        return {"run": site.name(run)}

    @app.post("/api/stop")
    def stop(body: Body) -> dict[str, str]:
        run = site.path(text_field(body, "run"))
        trainings.stop(run)
        return {"run": site.name(run)}

    @app.get("/api/chats")
    def list_chats() -> dict[str, Any]:
        return {"chats": chats.list()}

    @app.post("/api/chats")
    def start_chat(body: Body) -> dict[str, Any]:
        run, step = _run(site, text_field(body, "run")), body.get("step")
        if not isinstance(step, int) or not (RunRecord(run).folder.checkpoints / folder_name(step)).is_dir():
            raise ApiError(404, f"step {str(step)[:20]}: this run has no such checkpoint", param="step")
        chats.start(run, site.name(run), step)
        return {"chats": chats.list()}

    @app.post("/api/chats/stop")
    def stop_chat(body: Body) -> dict[str, Any]:
        step = body.get("step")
        chats.stop(text_field(body, "run"), step if isinstance(step, int) else -1)
        return {"chats": chats.list()}


def _asked(site: Site, body: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The recipe and the settings of a request. Raises ApiError (403) for paths outside the folder."""
    recipe, settings = text_field(body, "recipe"), body.get("settings")
    given = settings.items() if isinstance(settings, dict) else ()
    values = {name: value for name, value in given if isinstance(value, str)}
    if recipe.startswith("-"):
        raise ApiError(400, "recipe: not a recipe", param="recipe")
    site.check_value(recipe)
    _check_paths(site, values)
    for name, value in values.items():
        if name.startswith("-") or "=" in name or "\0" in name + value:
            raise ApiError(400, "not a setting", param=name[:100])
    return recipe, values


def _check_paths(site: Site, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        if name not in NO_PATHS:
            site.check_value(value)


def _run(site: Site, name: str) -> Path:
    path = site.path(name)
    if not RunRecord(path).exists:
        raise ApiError(404, f"{name[:200]}: no run in this folder", code="no_run")
    return path


def resuming(run: Path, folder: Path) -> tuple[list[str], Path]:
    """The command that continues a run, and where: in the folder that its `out` is relative to, since its data may be
    too. Of a run that was moved, or copied here: with another `out`, in `folder`."""
    out = Path(RunRecord(run, problems=[]).settings.get("out", ""))
    parts = () if out.is_absolute() else out.parts
    if parts and run.parts[-len(parts) :] == parts:
        return ["train", f"{out}/run.toml"], Path(*run.parts[: -len(parts)])
    name = run.relative_to(folder).as_posix()
    return ["train", f"{name}/run.toml", f"out={name}"], folder
