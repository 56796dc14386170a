"""What the data of every stage need: the run's tokenizer, its files, and a way to make what follows from them once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from penjing.base.errors import UserError
from penjing.base.files import printable, read_json, sha256_file, sha256_text, write_json
from penjing.checkpoint.manifest import steps
from penjing.data import formats as records
from penjing.data import tokenize_dataset as prepare
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.parallel.base import Strategy
from penjing.train.config import Run
from penjing.train.load_model import start_tokenizer
from penjing.train.run_dir import RunDir
from penjing.train.stages.base import Report

T = TypeVar("T")
TOKENIZER_TRAINING_BYTES = 64 << 20  # of text a tokenizer is trained on; more changes few merges


def on_rank_0(strategy: Strategy, make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, which the other ranks wait for."""
    made: T = strategy.broadcast(make() if strategy.rank == 0 else None)
    return made


def run_tokenizer(run: Run, report: Report) -> Tokenizer:
    """The run's tokenizer: its own from before, the named one, that of `init_from`, or a new one trained on the text.

    One that an attempt without a checkpoint left behind gives way to a named one, or that of `init_from`: it may have
    been another's.
    """
    folder = RunDir(Path(run.out))
    existing = Tokenizer.load(folder.tokenizer) if (folder.tokenizer / "tokenizer.json").is_file() else None
    if existing is not None and steps(folder.checkpoints):
        return existing
    given = start_tokenizer(run)
    if given is None and existing is not None and existing.size <= run.model.vocab_size:
        given = existing
    if given is None and run.data.format not in ("documents", "chats"):
        raise UserError(
            "no tokenizer: one is trained on texts and conversations only",
            where="init_from",
            got=f"data.format={run.data.format}",
            wanted="a model that is there, or tokenizer.path",
        )
    if given is None:
        size = run.tokenizer.vocab_size or run.model.vocab_size
        report(f"training a tokenizer of {size:,} ids")
        given = train_tokenizer(_training_texts(run), size, max_han_per_token=run.tokenizer.max_han_per_token)
    if given.size > run.model.vocab_size:
        raise UserError(
            "the tokenizer has more ids than the model",
            where="model.vocab_size",
            got=run.model.vocab_size,
            wanted=f"at least {given.size}",
            next_step=f"Set model.vocab_size={given.size}, or use the model's own tokenizer.",
        )
    given.save(folder.tokenizer)
    return given


def _training_texts(run: Run) -> Iterator[str]:
    """The training half's texts, up to the share a tokenizer needs."""
    paths, share = data_paths(run), run.data.val_fraction
    read = records.read_chats if run.data.format == "chats" else records.read_documents
    # What is broken is listed and counted when the shards are made.
    below = prepare.held_out_below((prepare.split_key(each) for each in read(paths, bad_records=_uncounted())), share)
    left = TOKENIZER_TRAINING_BYTES
    for record in read(paths, bad_records=_uncounted()):
        if left <= 0:
            return
        if prepare.is_held_out(prepare.split_key(record), below):
            continue
        text = record.text if isinstance(record, records.Document) else "\n".join(m.content for m in record.messages)
        left -= len(text.encode())
        yield text


def _uncounted() -> records.BadRecords:
    return records.BadRecords(max_bad_fraction=1.0)


def data_paths(run: Run) -> list[Path]:
    """The files that data.train names. Raises UserError if it names none."""
    if not run.data.train:
        raise UserError("no data", where="data.train", next_step="Give data.train=FILE, or see `penjing data list`.")
    return records.list_files([Path(name) for name in run.data.train])


def build_if_stale(
    run: Run,
    folder: Path,
    tokenizer: Tokenizer,
    seq_len: int,
    make: Callable[[list[Path], dict[str, Any]], dict[str, int]],
    report: Report,
) -> dict[str, int]:
    """The counts of what `make(files, about)` wrote into `folder`, or wrote there before from the same files.

    seq_len: what the result depends on of `data.seq_len`; 0 if it does not. `folder/done.json` is written last.
    """
    paths = data_paths(run)
    files = {printable(path): [path.stat().st_size, sha256_file(path)] for path in paths}
    wanted = {
        "source": sha256_text(json.dumps(list(files.values()))),
        "tokenizer": tokenizer.fingerprint,
        "kind": run.data.format,
        "val_fraction": run.data.val_fraction,
        "seq_len": seq_len,
        **({"thinking": run.data.thinking} if run.data.thinking != "as_given" else {}),
    }
    done = folder / "done.json"
    if done.is_file() and read_json(done)["made_from"] == wanted:
        return dict(read_json(done)["counts"])
    report(f"tokenizing {len(paths)} file{'s' if len(paths) > 1 else ''}")
    done.unlink(missing_ok=True)  # it does not vouch for halves of which one is new and the other old
    counts = make(paths, {"source_files": files, "source": wanted["source"]})
    write_json(done, {"made_from": wanted, "counts": counts})
    return counts
