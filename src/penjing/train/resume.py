"""Checks that a resumed run has the settings it was started with; every difference that is not allowed is an error."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penjing.base import config
from penjing.base.errors import UserError, suggest
from penjing.base.files import sha256_text
from penjing.checkpoint.load import Checkpoint
from penjing.data.chat import CHAT_TEMPLATE, EARLIER_TEMPLATES
from penjing.train.config import Run
from penjing.train.precision import Precision
from penjing.train.stages.base import Stage

# Settings that may change when a run is resumed: they do not change the result.
FREE_TO_CHANGE = (
    *("compute.device", "compute.threads", "parallel", "log", "checkpoint", "sample", "eval", "out"),
    *("batch.micro_size", "data.prefetch", "data.max_bad_fraction"),
    "compute.dtype",  # its resolved value is compared, as `precision`; `auto` is the dtype the run was started with
    "data.train",  # the files' contents are compared, as `data`
    "data.validation",  # nothing is learned from it; other texts to learn from change `data`
)
# What a checkpoint stores in addition to the settings; the names are valid for --allow-change.
FINGERPRINTS = ("data", "tokenizer", "template", "precision")
_SHOWN = 12  # differences in one error line


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """A field with two values: the checkpoint's (`saved`) and the run's (`now`)."""

    field: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field} was {_shown(self.saved)}, is {_shown(self.now)}"


def differences(run: Run, fingerprints: Mapping[str, str], checkpoint: Checkpoint) -> list[ConfigDifference]:
    """Every field in which `run` and its fingerprints differ from the checkpoint's."""
    before, now = settings_of(checkpoint), flat_settings(run)
    changes = [
        ConfigDifference(key, before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _is_one_of(key, FREE_TO_CHANGE)
    ]
    state = checkpoint.state()
    for name in FINGERPRINTS:
        saved = state.get(name)  # None in checkpoints of older versions
        saved = sha256_text(CHAT_TEMPLATE) if saved in EARLIER_TEMPLATES else saved
        if saved is not None and name in fingerprints and saved != fingerprints[name]:
            changes.append(ConfigDifference(name, saved, fingerprints[name]))
    return changes


def run_fingerprints(stage: Stage[Any], precision: Precision) -> dict[str, str]:
    """What a checkpoint stores about a run in addition to its settings."""
    return {
        "data": stage.fingerprint,
        "tokenizer": stage.tokenizer.vocabulary_hash,
        "template": sha256_text(stage.tokenizer.template),
        "precision": precision.name,
    }


def check_same_run(
    run: Run, fingerprints: Mapping[str, str], checkpoint: Checkpoint, allowed: Sequence[str]
) -> list[ConfigDifference]:
    """The allowed differences. Raises UserError that lists the others.

    allowed: names of fields, or of groups of fields such as `optimizer`.
    """
    changes = differences(run, fingerprints, checkpoint)
    choices = {*flat_settings(run), *FINGERPRINTS}
    for name in allowed:
        if not any(_is_one_of(choice, [name]) for choice in choices):
            raise UserError("no such field", where="--allow-change", got=name, next_step=suggest(name, choices))
    refused = [difference for difference in changes if not _is_one_of(difference.field, allowed)]
    if refused:
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise UserError(
            "settings differ from those that the run was started with: " + "; ".join(map(str, refused[:_SHOWN])) + more,
            where=run.out,
            next_step="Restore them to continue, choose another out= to start anew, or allow the change: "
            + " ".join(f"--allow-change {difference.field}" for difference in refused[:3]),
        )
    return changes


def saved_dtype(checkpoint: Checkpoint, allowed: Sequence[str]) -> str:
    """The `compute.dtype` a run was started with, which `auto` means when it is resumed; empty if it may change or is
    unknown."""
    if _is_one_of("precision", allowed):
        return ""
    for saved in (settings_of(checkpoint).get("compute.dtype"), checkpoint.state().get("precision")):
        if saved in ("bfloat16", "float16", "tf32", "float32"):
            return str(saved)
    return ""


def settings_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's settings; those that are newer than the checkpoint have their defaults."""
    path = checkpoint.folder / "run.toml"
    if not path.is_file():
        return {}
    table = config.read_toml(path)
    try:
        return flat_settings(config.resolve(Run, table))
    except UserError:  # a setting that no longer exists: it shows as a difference
        return dict(config.flat(table))


def _is_one_of(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def flat_settings(run: Run) -> dict[str, Any]:
    """The settings by their dotted names."""
    return dict(config.flat(json.loads(json.dumps(config.to_dict(run)))))


def _shown(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text[:60]
