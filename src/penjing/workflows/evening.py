"""penjing evening: the pipeline of the quickstart at a real size, on one card, by a plan that is shown first."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from rich.console import Console

from penjing import devices
from penjing.base.errors import UserError
from penjing.base.lock import locked
from penjing.data.catalog import registry as catalogue
from penjing.data.formats import READERS, UncheckedRecords
from penjing.model.presets import PRESETS
from penjing.plan import cost
from penjing.plan.profile import gpu_machine
from penjing.planner.inputs import PlanOptions, find_machine
from penjing.rl.prompts import prompt_of
from penjing.rl.rewards.base import RewardMix, RewardRuntime
from penjing.track.run_record import RunRecord
from penjing.train.config import Run
from penjing.train.load_model import set_threads
from penjing.workflows import evening_plan as planning
from penjing.workflows import quickstart as stages
from penjing.workflows.evening_plan import STAGES, Amount, Budget, EveningPlan
from penjing.workflows.stage_log import StageLog, open_log
from penjing.workflows.train import resolve_run

UNPLANNED = ("incidents.jsonl", "bad_records.jsonl")  # files that there are only if something is wrong
DEFAULT_SECONDS = 8 * 3600.0
# In place of downloads; a thousandth of them.
REHEARSED = {"documents": 1000, "conversations": 1500, "preferences": 64, "prompts": 64, "questions_per_kind": 2}


@dataclass(frozen=True, kw_only=True)
class EveningOptions(stages.QuickstartOptions):
    data: str = "minimind-pretrain-mini,minimind-sft-mini,minimind-dpo"
    out: Path = Path("runs/evening")
    hours: str = ""  # such as 8, 8h or 90min; empty and no price: 8 hours
    price: str = ""  # what all may cost, such as 20CNY
    hourly: str = ""  # price of the card for an hour; empty: as `penjing plan` knows it
    size: str = ""  # a preset or a size such as 64m; empty: the best for the budget
    gpu: str = ""  # plan for this card, which is not here
    rehearse: bool = False  # 1/1000 of the tokens, here
    yes: bool = False  # do not ask
    uses: ClassVar[tuple[str, ...]] = tuple(STAGES.values())
    prefixes: ClassVar[tuple[str, ...]] = tuple(STAGES)[1:]

    def request(self) -> dict[str, Any]:
        names = ("data", "hours", "price", "hourly", "size", "gpu", "rehearse")
        return {**{name: getattr(self, name) for name in names}, "settings": list(self.settings)}

    def toyworld_sizes(self) -> dict[str, int]:
        return REHEARSED if self.rehearse else super().toyworld_sizes()


def evening(options: EveningOptions, console: Console) -> EveningPlan:
    """Show the plan, ask, and run the stages that are not done yet; returns the plan. Raises UserError."""
    set_threads(0, 1)
    wanted = options  # what a rehearsal is of
    if options.rehearse and all(name in catalogue.CATALOGUE for name in stages.data_names(options)):
        options = replace(options, data=stages.TOYWORLD)
    stages.source_of(options)
    if options.gpu and not options.rehearse:
        with TemporaryDirectory() as folder:
            there = replace(options, out=Path(folder))
            if options.data == stages.TOYWORLD:
                stages.make_toyworld(there)
            plan = planning.make_plan(_amounts(there), _budget(options))
        planning.print_plan(plan, console)
        console.print("This is a plan for another machine: start it there, without --gpu, or add --rehearse.")
        return plan
    command = f"penjing evening --data {options.data}"
    log = open_log(options.out, command, options.request(), console, fresh=options.fresh)
    with locked(options.out):
        if options.data == stages.TOYWORLD:  # quickly made, and then known exactly
            log.stage("data", lambda: stages.make_data(options, log))
        if "evening" not in log.facts:
            log.record(evening=asdict(_plan(wanted, options)))
        plan = EveningPlan.from_dict(log.facts["evening"])
        planning.print_plan(plan, console)
        planning.check_disk(plan, options.out)
        if log.facts.get("confirmed") or _confirmed(options, console):
            log.record(confirmed=True)
            stages.run_stages(options, log, {stage: partial(_training, options, plan, stage) for stage in STAGES})
            log.record(actual=_actual(options.out, plan, log))
            planning.print_comparison(plan, log.facts["actual"], console)
    return plan


def _plan(wanted: EveningOptions, options: EveningOptions) -> EveningPlan:
    """The plan; of a rehearsal: with a thousandth of the tokens, for this machine and the data that are here."""
    amounts, budget = _amounts(wanted), _budget(wanted)
    if not options.rehearse:
        return planning.make_plan(amounts, budget)
    here = replace(budget, gpu="", share=planning.REHEARSAL_SHARE, cleans=bool(stages.cleaning(options)))
    return planning.make_plan(amounts, budget, here, amounts if wanted == options else _amounts(options))


def _confirmed(options: EveningOptions, console: Console) -> bool:
    """Whether to go on: by --yes, by a rehearsal, or by the answer of a person."""
    if options.yes or options.rehearse:
        return True
    if sys.stdin.isatty():
        return console.input("Start? [y/N] ").strip().lower() in ("y", "yes")
    console.print(f"Nothing was started. To start: {shlex.join(['penjing', *sys.argv[1:]])} --yes", soft_wrap=True)
    return False


def _amounts(options: EveningOptions) -> dict[str, Amount]:
    """How much data of each kind there is. Raises UserError if there are no texts."""
    names = stages.data_names(options)
    fetched = [name for name in names if name in catalogue.CATALOGUE]
    files = [name for name in names if name not in catalogue.CATALOGUE]
    own = stages.data_files(replace(options, data=",".join(files))) if files else stages.DataFiles([], [])
    amounts = planning.measure(fetched, {kind: getattr(own, kind) for kind in STAGES.values()})
    if not amounts.get("documents", Amount()).tokens:
        step = "Add a text: --data TEXT.txt,..."
        raise UserError("there is no text to pretrain on", where=options.data, next_step=step)
    if own.prompts and "preferences" not in amounts and (options.rehearse or not options.gpu):
        _check_rewards(options, own.prompts)
    return amounts


def _check_rewards(options: EveningOptions, prompts: Sequence[str]) -> None:
    """Raise UserError for prompts whose answers cannot be scored: GRPO would fail after hours of other trainings."""
    settings: Any = resolve_run("grpo", planning.overrides(options.settings, "grpo")).objective
    runtime = RewardRuntime(device=devices.HOST, max_tokens=settings.rollout.max_new_tokens)
    read = READERS["prompts"](list(map(Path, prompts)), bad_records=UncheckedRecords())
    RewardMix(settings, runtime).check(list(map(prompt_of, read)))


def _budget(options: EveningOptions) -> Budget:
    size = options.size.removeprefix("ladder-")
    model = planning.overrides(options.settings, "pretrain").get("model", {})
    if named := model if isinstance(model, str) else model.get("", model.get("preset")):
        raise UserError("--size names the model here", where="model", got=named, wanted=f"--size {named}")
    return Budget(
        seconds=_seconds(options),
        size=size if size in PRESETS or not size else f"ladder-{size}",
        gpu=options.gpu,
        price=options.hourly,
        settings=options.settings,
        cleans=bool(stages.cleaning(options)),
    )


def _seconds(options: EveningOptions) -> float:
    """The time of --hours and of what --price buys: the less of the two."""
    limits = [cost.read_seconds(options.hours, "--hours", "h")] if options.hours else []
    if options.price:
        money = cost.read_money(options.price, "--price")
        if not money.amount:
            raise UserError("not above zero", where="--price", got=repr(options.price))
        machine = gpu_machine(options.gpu) if options.gpu else find_machine(PlanOptions(), Run())[0]
        hourly = cost.price_of(machine.name, options.hourly)
        if hourly is None or hourly.hour.currency != money.currency:
            got = f"{machine.name}: {hourly.hour if hourly else 'unknown'}"
            step = f"Give what an hour costs, in {money.currency}: --hourly 2{money.currency}"
            raise UserError("no price an hour in this currency", where="--price", got=got, next_step=step)
        limits += [3600 * money.amount / hourly.hour.amount] if hourly.hour.amount else []
    return min(limits, default=DEFAULT_SECONDS)


def _training(options: EveningOptions, plan: EveningPlan, name: str, files: stages.DataFiles) -> Run | None:
    """The run of a planned stage, which begins where the stage before it ended; None: not planned."""
    order = [stage.name for stage in plan.stages]
    if name not in order:
        return None
    planned, before = plan.stages[order.index(name)], order[order.index(name) - 1]
    start = {"model": plan.size} if name == "pretrain" else {"init_from": str(options.out / before)}
    layer = {
        **start,
        "out": str(options.out / name),
        "data": {"train": getattr(files, STAGES[name]), "clean": stages.cleaning(options)},
    }
    run = resolve_run(name, planned.settings, layer, planning.overrides(options.settings, name))
    return stages.with_prompts(run, options.data == stages.TOYWORLD)


def _actual(out: Path, plan: EveningPlan, log: StageLog) -> dict[str, dict[str, float]]:
    """What each planned stage took: tokens, seconds, bytes and files on the disk, peak memory."""
    seconds = {entry["name"]: entry["seconds"] for entry in log.facts["stages"]}
    actual = {}
    for stage in plan.stages:
        folder = out / stage.name
        paths = out.glob("*") if stage.name == "evaluate" else folder.rglob("*")
        found = [path for path in paths if path.is_file() and path.name not in UNPLANNED]
        outcome = RunRecord(folder).outcome
        actual[stage.name] = {
            "tokens": outcome.number("tokens") or 0,
            "seconds": seconds[stage.name],
            "num_bytes": sum(path.stat().st_size for path in found),
            "files": len(found),
            "memory_bytes": outcome.number("peak_memory_bytes") or 0,
        }
    return actual
