"""The model card of an export: the model, its data and its validation metrics."""

from pathlib import Path
from typing import Any

from penjing import __version__
from penjing.base import formatting as units
from penjing.checkpoint.load import weights_sha256
from penjing.plan.flops import parameters
from penjing.track.run_dir import stage_folder
from penjing.track.run_record import RunRecord
from penjing.train.load_model import LoadedModel

VAL_PREFIX, LOSS = "val_", "val_loss"


def _val_metric_row(name: str, value: Any) -> str:
    """A table row if `name` is a validation metric (each stage has its own), else an empty text."""
    if not name.startswith(VAL_PREFIX) or name.endswith("_seconds") or not isinstance(value, int | float):
        return ""
    if name == LOSS:
        return f"| held-out loss | {value:.4f} nats per token |"
    return f"| held-out {name.removeprefix(VAL_PREFIX).replace('_', ' ')} | {value:.4f} |"


def model_card(trained: LoadedModel, run_path: Path) -> str:
    """README.md of an export, in the format of the hub. Unknown values are left out."""
    run, config = trained.run, trained.run.model
    path = (Path(run.out) if trained.external else stage_folder(run_path)).resolve()
    title = path.name if trained.external else f"{path.parent.name}-{path.name}"
    data = ", ".join(Path(name).name for name in run.data.train)
    facts = {"stage": run.stage, "step": trained.checkpoint.step, "data": data}
    record = RunRecord(path)
    outcome, plan = record.outcome.raw, record.plan.raw
    if outcome and outcome["weights_sha256"] != weights_sha256(trained.checkpoint.folder):
        outcome = {}  # it belongs to a later checkpoint
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [penjing]",
        "---",
        "",
        f"# {title}",
        "",
        f"A {units.count(parameters(config).total)}-parameter {config.architecture} model, "
        f"{'converted' if trained.external else 'made'} with penjing {__version__}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items() if not trained.external),
        f"| vocabulary | {trained.tokenizer.size} |",
    ]
    if outcome:
        lines.append(f"| tokens seen | {outcome['tokens']:,} |")
        lines += filter(None, (_val_metric_row(name, value) for name, value in outcome.items()))
        lines.append(f"| weights sha256 | {outcome['weights_sha256']} |")
    if plan:
        lines.append(f"| planned compute | {plan['flops']:.2e} FLOPs |")
    lines += ["", "The licence of the weights follows from the data; it is yours to state.", ""]
    return "\n".join(lines)
