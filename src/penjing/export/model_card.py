"""The model card that goes with an export: what was made, from what, how well it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing import __version__
from penjing.base import formatting as units
from penjing.base.files import read_json, sha256_file
from penjing.checkpoint.manifest import WEIGHTS
from penjing.plan.flops import parameters
from penjing.train.load_model import LoadedModel
from penjing.train.run_dir import RunDir, stage_folder

HELD_OUT, LOSS = "val_", "val_loss"


def _held_out(name: str, value: Any) -> str:
    """A row, if it is a figure of held-out data: each kind of stage has its own."""
    if not name.startswith(HELD_OUT) or name.endswith("_seconds") or not isinstance(value, int | float):
        return ""
    if name == LOSS:
        return f"| held-out loss | {value:.4f} nats per token |"
    return f"| held-out {name.removeprefix(HELD_OUT).replace('_', ' ')} | {value:.4f} |"


def _facts(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.is_file() else {}


def model_card(trained: LoadedModel, run_path: Path) -> str:
    """README.md of an export, in the form the hub expects. What is not known is left out, never invented."""
    run, config = trained.run, trained.run.model
    external = run.stage == "external"
    folder = RunDir(Path(run.out) if external else stage_folder(run_path))
    title = folder.path.resolve().name if external else f"{folder.path.parent.name}-{folder.path.name}"
    outcome, plan = _facts(folder.outcome), _facts(folder.plan)
    if outcome and outcome["weights_sha256"] != sha256_file(trained.checkpoint.folder / WEIGHTS):
        outcome = {}  # it speaks of a later checkpoint
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
        f"{'converted' if external else 'made'} with penjing {__version__}.",
        "",
        "| | |",
        "|---|---|",
        *(
            []
            if external
            else [
                f"| stage | {run.stage} |",
                f"| step | {trained.checkpoint.step} |",
                f"| data | {', '.join(Path(name).name for name in run.data.train)} |",
            ]
        ),
        f"| vocabulary | {trained.tokenizer.size} |",
    ]
    if outcome:
        lines.append(f"| tokens seen | {outcome['tokens']:,} |")
        lines += filter(None, (_held_out(name, value) for name, value in outcome.items()))
        lines.append(f"| weights sha256 | {outcome['weights_sha256']} |")
    if plan:
        lines.append(f"| planned compute | {plan['flops']:.2e} FLOPs |")
    lines += ["", "The licence of the weights follows from the data; it is yours to state.", ""]
    return "\n".join(lines)
