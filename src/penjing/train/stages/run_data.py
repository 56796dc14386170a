"""Data of all stages: the run's tokenizer, its files, and derived files that are made once."""

from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from penjing.base.files import read_json, write_json
from penjing.checkpoint.manifest import steps
from penjing.data.corpus import FAR, Corpus
from penjing.data.progress import ProgressLines
from penjing.data.token_shards import META, TokenShards
from penjing.data.tokenize_dataset import Kept, TokenizedDataset
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.parallel.base import Strategy
from penjing.track.run_dir import RunDir
from penjing.train.config import Run
from penjing.train.load_model import added_pieces, start_tokenizer
from penjing.train.stages.base import Report

T = TypeVar("T")


def on_rank_0(strategy: Strategy, make: Callable[[], T]) -> T:
    """The result of `make` on rank 0, for which the other ranks wait."""
    result: T = strategy.broadcast(make() if strategy.rank == 0 else None)
    return result


def run_tokenizer(run: Run, report: Report) -> Tokenizer:
    """The run's tokenizer: its existing one, the named one, that of `init_from` or of the run that made the tokens of
    data.train, or a new one trained on the text.

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
    if given is None and (ready := Corpus(run.data).ready_tokens(META)):
        given = Tokenizer.load(RunDir(ready.parent).tokenizer)  # of the run that made them
    if given is None and run.data.format not in ("documents", "chats"):
        what = "no tokenizer: one is trained on texts and conversations only"
        wanted = "an existing model, or tokenizer.path"
        raise run.error("init_from", what, got=f"data.format={run.data.format}", wanted=wanted)
    if given is None:
        size = run.tokenizer.vocab_size or run.model.vocab_size
        corpus = Corpus(run.data, ProgressLines(report, "reading text for the tokenizer"))
        texts = corpus.texts(held_out=False)  # an error comes before a line says that something begins
        report(f"training a tokenizer of {size:,} ids")
        han = run.tokenizer.max_han_per_token
        given = train_tokenizer(texts, size, max_han_per_token=han, note=report)
    elif run.tokenizer.path and (added := added_pieces(run, given)):
        more = f"tokenizer.path extends that of init_from by {len(added):,} tokens"
        report(f"{more}; each begins as the mean of its pieces")
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
    kept = None if meta_file != META else _kept(corpus, folder, made_from)
    files = f"{len(corpus.hashes)} file{'s' if len(corpus.hashes) > 1 else ''}"
    report(f"tokenizing {files}" + (f", {len(kept)} of them from the tokens made before" if kept else ""))
    done.unlink(missing_ok=True)  # not valid while some files are new and others old
    counts = corpus.counts(RunDir(Path(run.out)).bad_records)
    made = prepare(
        corpus.placed(counts),
        tokenizer,
        folder,
        split=corpus.split,
        about={"source_files": corpus.contents, "source": made_from["source"], **corpus.about},
        bad_records=counts,
        **options,
        **({"kept": kept} if kept else {}),
    )
    notes = [note for note in (counts.note(), corpus.split.note) if note]
    if made.held_out_share > FAR * run.data.val_fraction and not (run.data.validation or corpus.split.note):
        notes.append(f"{made.held_out_share:.0%} of the tokens are held out: there are few records, which stay whole")
    if made.skipped:
        notes.append(f"{made.skipped:,} records are left out: longer than data.seq_len, or nothing to learn in them")
    if made.shortened:
        notes.append(f"{made.shortened:,} conversations lost their last turns: longer than data.seq_len")
    write_json(done, {"made_from": made_from, "notes": notes})
    return folder, notes


def _kept(corpus: Corpus, folder: Path, made_from: Mapping[str, Any]) -> Kept | None:
    """The tokens in `folder` that were made of the same files, by the same settings."""
    if not (folder / "done.json").is_file():
        return None
    before = read_json(folder / "done.json")["made_from"]
    if any(
        before.get(name) != made_from.get(name) for name in (before.keys() | made_from.keys()) - {"source", "sources"}
    ):
        return None
    meta = TokenShards(folder / "train").meta
    old, now, split = meta.get("hashes", {}), corpus.hashes, corpus.split
    below = split.below
    if below is None and meta["held_out_below"] == split.share and set(old.values()) <= set(now.values()):
        below = split.share  # both splits have records, and keep them
    names = [*corpus.validation_files, *corpus.files]
    if below is None or split.cut is not None or len(set(now.values())) < len(names):
        return None
    if corpus.settings.clean:  # a rule may know the records of earlier files
        same = takewhile(lambda pair: pair[0][1] == pair[1][1], zip(old.items(), now.items(), strict=False))
        old = dict(before for before, _ in same)
    return Kept(folder, below, old, now)
