"""Data of all stages: the run's tokenizer, its files, and derived files that are made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from penjing.base.files import read_json, write_json
from penjing.checkpoint.manifest import steps
from penjing.data.corpus import Corpus
from penjing.data.progress import ProgressLines
from penjing.data.tokenize_dataset import TokenizedDataset
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.parallel.base import Strategy
from penjing.track.run_dir import RunDir
from penjing.train.config import Run
from penjing.train.load_model import start_tokenizer
from penjing.train.stages.base import Report

T = TypeVar("T")


def on_rank_0(strategy: Strategy, make: Callable[[], T]) -> T:
    """The result of `make` on rank 0, for which the other ranks wait."""
    result: T = strategy.broadcast(make() if strategy.rank == 0 else None)
    return result


def run_tokenizer(run: Run, report: Report) -> Tokenizer:
    """The run's tokenizer: its existing one, the named one, that of `init_from`, or a new one trained on the text.

    If the run has no checkpoint yet, a named tokenizer or that of `init_from` replaces an existing one, which may be
    that of an earlier attempt with other settings.
    """
    folder = RunDir(Path(run.out))
    existing = Tokenizer.load(folder.tokenizer) if (folder.tokenizer / "tokenizer.json").is_file() else None
    if existing is not None and steps(folder.checkpoints):
        return existing
    given = start_tokenizer(run)
    if given is None and existing is not None and existing.size <= run.model.vocab_size:
        given = existing
    if given is None and run.data.format not in ("documents", "chats"):
        what, wanted = (
            "no tokenizer: one is trained on texts and conversations only",
            "an existing model, or tokenizer.path",
        )
        raise run.error("init_from", what, got=f"data.format={run.data.format}", wanted=wanted)
    if given is None:
        size = run.tokenizer.vocab_size or run.model.vocab_size
        corpus = Corpus(run.data, ProgressLines(report, "reading text for the tokenizer"))
        texts = corpus.texts(held_out=False)  # an error comes before a line says that something begins
        report(f"training a tokenizer of {size:,} ids")
        han = run.tokenizer.max_han_per_token
        given = train_tokenizer(texts, size, max_han_per_token=han, note=report)
    if given.size > run.model.vocab_size:
        raise run.error(
            "model.vocab_size",
            "the tokenizer has more ids than the model",
            wanted=f"at least {given.size}",
            next_step=f"Set model.vocab_size={given.size}, or use the model's own tokenizer.",
        )
    given.save(folder.tokenizer)
    return given


def tokenized(
    run: Run,
    folder: Path,
    meta_file: str,
    tokenizer: Tokenizer,
    prepare: Callable[..., TokenizedDataset],
    report: Report,
    **options: Any,
) -> tuple[Path, list[str]]:
    """The folder with the tokens of both splits, and notes for the user.

    It is that of data.train if this holds tokens; else `folder`, which is made unless it was made from the same data.
    meta_file: names the tokens in a split's folder. prepare: such as `prepare_documents`, which gets `options`.
    `folder/done.json` is written last.
    """
    corpus = Corpus(run.data, ProgressLines(report, "tokenizing"))
    if ready := corpus.ready_tokens(meta_file):
        return ready, []
    made_from = {**corpus.fingerprint, "tokenizer": tokenizer.fingerprint, "seq_len": options.get("seq_len", 0)}
    done = folder / "done.json"
    if done.is_file() and (saved := read_json(done))["made_from"] == made_from:
        return folder, saved.get("notes", [])
    num_files = len(corpus.files)
    report(f"tokenizing {num_files} file{'s' if num_files > 1 else ''}")
    done.unlink(missing_ok=True)  # not valid while some files are new and others old
    counts = corpus.counts(RunDir(Path(run.out)).bad_records)
    made = prepare(
        corpus.records(counts),
        tokenizer,
        folder,
        val_fraction=run.data.val_fraction,
        about={"source_files": corpus.contents, "source": made_from["source"]},
        bad_records=counts,
        **options,
    )
    notes = [note] if (note := counts.note()) else []
    if made.skipped:
        notes.append(f"{made.skipped:,} records are left out: longer than data.seq_len, or nothing to learn in them")
    if made.shortened:
        notes.append(f"{made.shortened:,} conversations lost their last turns: longer than data.seq_len")
    write_json(done, {"made_from": made_from, "notes": notes})
    return folder, notes
