"""The tab plan: what `penjing plan` says to settings that change while somebody drags a slider.

Memory comes from the formula (`--rough`), so that an answer takes milliseconds; `refine` runs the command itself.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import FastAPI, Request

from penjing.base import config
from penjing.base.errors import UserError
from penjing.model import presets
from penjing.parallel import STRATEGIES
from penjing.plan import cost
from penjing.plan.gpu_specs import GPU_SPECS
from penjing.ui.background import penjing_json
from penjing.ui.processes import command
from penjing.ui.site import Body, Site

RECIPES = ("pretrain", "sft", "dpo", "grpo")
SIZES: tuple[str, ...] = ("tiny", "ladder-3m", "ladder-10m", "26m", "64m", "104m")
SIZES += ("198m-moe", "ladder-300m", "qwen3-0.6b", "ladder-1b", "ladder-3b")
REFINE_SECONDS = 180.0
_LOAD_AFTER_SECONDS = 1.0  # so that the page is there first
_OPTIONS = ("gpu", "gpus", "tokens", "unique", "price")  # of `penjing plan`, with the page's names
_SETTINGS = {
    "seq_len": "data.seq_len",
    "batch": "batch.size",
    "optimizer": "optimizer",
    "checkpointing": "compute.activation_checkpointing",
}
_LONG = {"model": "model.preset", "optimizer": "optimizer.name"}
_MOST = {"batch": 1 << 20, "gpus": 1 << 16}  # the plan counts one by one
_EXITS = (0, 3)  # 3: it does not fit


@dataclass(frozen=True)
class Asked:
    """A request of the page as arguments of the command line."""

    recipe: str
    settings: list[str]
    options: dict[str, str]

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "Asked":
        """The page's fields; an empty one is not given. Raises UserError."""
        given = {name: str(value).strip() for name, value in body.items() if str(value).strip()}
        recipe = given.get("recipe", "pretrain")
        if recipe not in RECIPES:
            raise UserError("unknown recipe", where="recipe", got=repr(recipe), wanted=", ".join(RECIPES))
        for name, most in _MOST.items():
            if name in given and cost.read_count(given[name], name) > most:
                raise UserError("too large for a plan", where=name, got=given[name], wanted=f"at most {most}")
        settings = [f"model={given.get('model', '26m')}"]
        settings += [f"{key}={given[name]}" for name, key in _SETTINGS.items() if name in given]
        if given.get("strategy", "auto") != "auto":
            settings.append(f"parallel.strategy={given['strategy']}")
        return cls(recipe, settings, {name: given[name] for name in _OPTIONS if name in given})

    def words(self, *more: str) -> list[str]:
        """The arguments of `penjing`."""
        options = [word for name, value in self.options.items() for word in (f"--{name}", value)]
        return ["plan", self.recipe, *self.settings, *options, *more]


def estimate(body: Body) -> dict[str, Any]:
    """The plan of the page's fields, the commands that do the same, and settings to train.

    {"refused": {"where", "message"}} for settings that the command line refuses.
    """
    from penjing.planner.inputs import PlanOptions
    from penjing.planner.report import make_report
    from penjing.workflows.train import resolve_run

    try:
        asked = Asked.read(body)
        run = resolve_run(asked.recipe, config.parse_overrides(asked.settings))
        gpus = cost.read_count(asked.options.get("gpus", "1"), "--gpus")
        options: dict[str, Any] = {**asked.options, "gpus": gpus}
        report = make_report(asked.recipe, run, PlanOptions(**options), trace=False)
    except UserError as error:
        return {"refused": {"where": str(error.where or ""), "message": error.line()}}
    figures = asdict(report)
    pairs = (setting.split("=", 1) for setting in _to_train(asked, figures))
    settings = {_LONG.get(key, key): value for key, value in pairs}  # as the tab train names them
    return {"plan": figures, "commands": commands(asked, figures), "settings": settings}


def _to_train(asked: Asked, plan: Mapping[str, Any]) -> list[str]:
    """The settings that train by this plan."""
    micro = [f"batch.micro_size={plan['micro_size']}"] if plan["passes"] > 1 else []
    return [*asked.settings, f"max_steps={plan['steps']}", *micro]


def commands(asked: Asked, plan: Mapping[str, Any]) -> dict[str, str]:
    """The command lines that print this plan, and that train by it."""
    words = asked.words() if plan["traced"] else asked.words("--rough")
    gpus = ["--gpus", str(plan["devices"])] if plan["devices"] > 1 else []
    train = ["train", asked.recipe, *_to_train(asked, plan), "data.train=FILES", *gpus]
    return {"plan": command(words), "train": command(train)}


def cards(body: Body) -> dict[str, Any]:
    """The same plan on every known card."""
    return {"rows": [_row(name, {**body, "gpu": name}) for name in GPU_SPECS]}


def sizes(body: Body) -> dict[str, Any]:
    """The same plan with models of other sizes."""
    return {"rows": [_row(name, {**body, "model": name}) for name in SIZES]}


def _row(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    found = estimate(body)
    if "refused" in found:
        return {"name": name, **found}
    wanted = ("fits", "tight", "peak_memory_bytes", "predicted_seconds", "cost")
    return {"name": name, **{key: found["plan"][key] for key in wanted}}


def load() -> None:
    """Import what a plan needs, which takes seconds, with torch."""
    time.sleep(_LOAD_AFTER_SECONDS)
    estimate({"gpu": next(iter(GPU_SPECS))})


def add_routes(app: FastAPI, site: Site) -> None:
    """Routes below /api/plan."""

    @app.get("/api/plan/choices")
    def choices() -> dict[str, Any]:
        known = [{"name": card.name, "memory_gib": card.memory_gib} for card in GPU_SPECS.values()]
        strategies = ["auto", *(name for name in STRATEGIES if name != "single")]
        return {"recipes": RECIPES, "models": presets.names(), "cards": known, "strategies": strategies}

    for answer in (estimate, cards, sizes):
        app.post(f"/api/plan/{answer.__name__}")(answer)

    @app.post("/api/plan/refine")
    async def refine(request: Request, body: Body) -> dict[str, Any]:
        asked = Asked.read(body)
        plan = await penjing_json(request, asked.words("--json"), site.folder, REFINE_SECONDS, ok=_EXITS)
        return {"plan": plan, "commands": commands(asked, plan)}
