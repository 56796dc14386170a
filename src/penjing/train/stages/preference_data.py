"""Judged answers for a run: read from files, laid out as groups of tokens, and held out by question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data import formats as records
from penjing.data.preference_shards import META, TokenGroups, prepare_groups
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.group_sampler import pack_tight
from penjing.loader.shared_prompt_batch import Group
from penjing.parallel.base import Strategy
from penjing.train.config import Run
from penjing.train.run_dir import RunFolder
from penjing.train.stages.base import Report
from penjing.train.stages.next_token import made_once, run_tokenizer

MakeGroup = Callable[[int], Group]


@dataclass(frozen=True, kw_only=True)
class Judgements:
    """The judged answers of a run: what is learned from, what is held out, and lines about what was left out."""

    tokenizer: Tokenizer
    train: TokenGroups
    validation: TokenGroups
    notes: list[str]


def prepare_judgements(run: Run, strategy: Strategy, report: Report) -> Judgements:
    """Tokenizer and groups of a run; rank 0 makes the files, the others wait and read them.

    Raises UserError for data of another kind, or groups made with another tokenizer.
    """
    if run.data.kind != "preferences":
        raise UserError(
            f"objective.kind={run.objective.kind} learns from preferences",
            where="data.kind",
            got=run.data.kind,
            wanted="preferences",
        )
    folder = RunFolder(Path(run.out))
    if strategy.rank == 0:
        tokenizer = run_tokenizer(run, folder, report)
        made, counts = _groups(run, folder, tokenizer, report)
    else:
        made, counts = Path(), {}
    made, counts = strategy.broadcast((made, counts))
    tokenizer = Tokenizer.load(folder.tokenizer)
    train, validation = TokenGroups(made / "train"), TokenGroups(made / "validation")
    for half in (train, validation):
        if half.meta["tokenizer"] != tokenizer.fingerprint:
            raise UserError(
                "these token groups were made with another tokenizer",
                where=half.folder,
                next_step="Give the preferences themselves as data.train, or tokenizer.folder=the one of the groups.",
            )
        if half.meta["row_tokens"] > run.data.row_tokens:
            raise UserError(
                "these token groups were made for longer rows",
                where="data.row_tokens",
                got=run.data.row_tokens,
                wanted=f"at least {half.meta['row_tokens']}",
            )
    notes = [f"{number} left out: {reason}" for reason, number in sorted(counts.items()) if number]
    return Judgements(tokenizer=tokenizer, train=train, validation=validation, notes=notes)


def _groups(run: Run, folder: RunFolder, tokenizer: Tokenizer, report: Report) -> tuple[Path, dict[str, int]]:
    """The folder with `train` and `validation` groups: the given one, this run's from before, or newly made."""
    if len(run.data.train) == 1 and (Path(run.data.train[0]) / "train" / META).is_file():
        return Path(run.data.train[0]), {}
    place = folder.path / "groups"

    def make(paths: list[Path], about: dict[str, Any]) -> dict[str, int]:
        counts: Counter[str] = Counter()

        def skip(_file: str, _line: int, reason: str) -> None:
            counts[reason] += 1

        quarantine = records.Quarantine(run.data.max_bad, folder.quarantine)
        made = prepare_groups(
            records.read_preferences(paths, on_skip=skip, quarantine=quarantine),
            tokenizer,
            place,
            row_tokens=run.data.row_tokens,
            validation_fraction=run.data.validation_fraction,
            about=about,
            quarantine=quarantine,
        )
        counts["broken"] = quarantine.bad
        counts[f"longer than data.row_tokens={run.data.row_tokens}"] = made.too_long
        return dict(counts)

    return place, made_once(run, place, tokenizer, run.data.row_tokens, make, report)


def need_pairs(groups: TokenGroups, what: str) -> None:
    """Raise UserError if some group is not a pair."""
    if not groups.has_pairs:
        raise UserError(
            "single answers with a label are no pairs",
            where=groups.folder,
            wanted=f"chosen and rejected in every record, for {what}",
            next_step="objective.loss=kto learns from single answers.",
        )


def measure(make: MakeGroup, num_groups: int, batch_groups: int) -> tuple[float, float, float]:
    """Of groups drawn evenly: tokens of one, keys that a query sees, and the share of padding in batches."""
    sample = [make(index) for index in range(0, num_groups, max(1, num_groups // 512))]
    tokens = sum(group.num_tokens for group in sample)
    keys = 0.0
    for group in sample:
        prompt = len(group.prompt)
        keys += prompt * (prompt + 1) / 2
        for answer in group.answers:
            read = len(answer.ids) - 1
            keys += read * prompt + read * (read + 1) / 2
    positions = 0
    for first in range(0, len(sample), batch_groups):
        positions += pack_tight(sample[first : first + batch_groups]).ids_BT.numel()
    return tokens / len(sample), keys / tokens, 1 - tokens / positions
