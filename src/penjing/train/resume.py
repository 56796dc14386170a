"""A continued run must be the run that was begun: what differs is named, field by field, unless it was allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penjing.base import config
from penjing.base.errors import UserError, suggest
from penjing.base.files import sha256_text
from penjing.checkpoint.load import Checkpoint
from penjing.train.config import Run
from penjing.train.precision import Precision
from penjing.train.stages.base import Stage

# Settings that may differ when a run is continued: they do not change what is computed.
FREE_TO_CHANGE = (
    "compute.device",
    "compute.threads",
    "compute.dtype",  # what it comes to is compared, as `precision`; `auto` is what the run was begun in
    "log",
    "checkpoint",
    "sample",
    "eval",
    "out",
    "batch.micro_size",
    "data.prefetch",
    "data.train",  # what the files hold is compared, as `data`
    "data.max_bad_fraction",
)
# What a checkpoint knows beside the settings, by the names they are allowed under.
FACTS = ("data", "tokenizer", "template", "precision")
_SHOWN = 12  # differences in one error line


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """A field and its two values; `known` is what the checkpoint has."""

    field: str
    known: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field} was {_shown(self.known)}, is {_shown(self.now)}"


def differences(run: Run, facts: Mapping[str, str], checkpoint: Checkpoint) -> list[ConfigDifference]:
    """Every field in which `run` and its facts differ from what the checkpoint was made with, by name."""
    before, now = _settings_of(checkpoint), _flat_settings(run)
    found = [
        ConfigDifference(key, before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _is_one_of(key, FREE_TO_CHANGE)
    ]
    saved = checkpoint.state()
    for name in FACTS:
        known = saved.get(name)  # checkpoints from before it was written down say nothing
        if known is not None and name in facts and known != facts[name]:
            found.append(ConfigDifference(name, known, facts[name]))
    return found


def run_facts(stage: Stage[Any], precision: Precision) -> dict[str, str]:
    """What a checkpoint knows of a run beside its settings."""
    return {
        "data": stage.fingerprint,
        "tokenizer": stage.tokenizer.vocabulary_hash,
        "template": sha256_text(stage.tokenizer.template),
        "precision": precision.name,
    }


def with_known_batch(run: Run, checkpoint: Checkpoint) -> Run:
    """A run whose batch follows the data goes on with the batch it was begun with."""
    known = _settings_of(checkpoint)
    rows, length = known.get("batch.size"), known.get("data.seq_len")
    if run.batch.min_steps and isinstance(rows, int):
        run = replace(run, batch=replace(run.batch, size=rows, min_steps=0))
    if run.data.min_seq_len and isinstance(length, int):
        run = replace(run, data=replace(run.data, seq_len=length, min_seq_len=0))
    return run


def check_same_run(
    run: Run, facts: Mapping[str, str], checkpoint: Checkpoint, allowed: Sequence[str]
) -> list[ConfigDifference]:
    """The differences that were allowed. Raises UserError with all that were not.

    allowed: names of fields, or of groups of them such as `optimizer`.
    """
    found = differences(run, facts, checkpoint)
    choices = {*_flat_settings(run), *FACTS}
    for name in allowed:
        if not any(_is_one_of(choice, [name]) for choice in choices):
            raise UserError("no such field", where="--allow-change", got=name, next_step=suggest(name, choices))
    refused = [difference for difference in found if not _is_one_of(difference.field, allowed)]
    if refused:
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise UserError(
            "settings differ from those that the run was started with: " + "; ".join(map(str, refused[:_SHOWN])) + more,
            where=run.out,
            next_step="Put it back to continue, choose another out= to start anew, or allow it: "
            + " ".join(f"--allow-change {difference.field}" for difference in refused[:3]),
        )
    return found


def begun_dtype(checkpoint: Checkpoint, allowed: Sequence[str]) -> str:
    """The `compute.dtype` a run was begun in, which `auto` means when it goes on; empty if that may change or is not
    known."""
    if _is_one_of("precision", allowed):
        return ""
    for known in (_settings_of(checkpoint).get("compute.dtype"), checkpoint.state().get("precision")):
        if known in ("bfloat16", "float16", "tf32", "float32"):
            return str(known)
    return ""


def _settings_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings a checkpoint was made with; those it did not know yet have their defaults."""
    path = checkpoint.folder / "run.toml"
    if not path.is_file():
        return {}
    table = config.read_toml(path)
    try:
        return _flat_settings(config.resolve(Run, table))
    except UserError:  # a setting that is no more: it shows as a difference
        return dict(flat(table))


def _is_one_of(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def _flat_settings(run: Run) -> dict[str, Any]:
    return dict(flat(json.loads(json.dumps(config.to_dict(run)))))


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of nested tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text[:60]
