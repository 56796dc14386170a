"""Data of all stages: the run's tokenizer, its files, and derived files that are made once."""

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
from penjing.track.run_dir import RunDir
from penjing.train.config import Run
from penjing.train.load_model import start_tokenizer
from penjing.train.stages.base import Report

T = TypeVar("T")
TOKENIZER_TRAINING_BYTES = 64 << 20  # of training text for a tokenizer; more changes few merges


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
        raise UserError(
            "no tokenizer: one is trained on texts and conversations only",
            where="init_from",
            got=f"data.format={run.data.format}",
            wanted="an existing model, or tokenizer.path",
        )
    if given is None:
        size = run.tokenizer.vocab_size or run.model.vocab_size
        data_paths(run)  # an error comes before a line says that something begins
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
    """The training texts, up to TOKENIZER_TRAINING_BYTES."""
    paths, val_fraction = data_paths(run), run.data.val_fraction
    read = records.read_chats if run.data.format == "chats" else records.read_documents
    # Broken records are listed and counted later, when the shards are made.
    keys = (prepare.split_key(record) for record in read(paths, bad_records=_uncounted()))
    below = prepare.held_out_below(keys, val_fraction)
    remaining = TOKENIZER_TRAINING_BYTES
    for record in read(paths, bad_records=_uncounted()):
        if remaining <= 0:
            return
        if prepare.is_held_out(prepare.split_key(record), below):
            continue
        text = record.text if isinstance(record, records.Document) else "\n".join(m.content for m in record.messages)
        remaining -= len(text.encode())
        yield text


def _uncounted() -> records.BadRecords:
    return records.BadRecords(max_bad_fraction=1.0)


def data_paths(run: Run) -> list[Path]:
    """The files of data.train. Raises UserError if it is empty."""
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
    """The counts of `make(files, about)`, which writes into `folder`; not repeated if made before from the same files.

    seq_len: `data.seq_len` if the result depends on it, else 0. `folder/done.json` is written last.
    """
    paths = data_paths(run)
    files = {printable(path): [path.stat().st_size, sha256_file(path)] for path in paths}
    made_from = {
        "source": sha256_text(json.dumps(list(files.values()))),
        "tokenizer": tokenizer.fingerprint,
        "kind": run.data.format,
        "val_fraction": run.data.val_fraction,
        "seq_len": seq_len,
        **({"thinking": run.data.thinking} if run.data.thinking != "as_given" else {}),
    }
    done = folder / "done.json"
    if done.is_file() and read_json(done)["made_from"] == made_from:
        return dict(read_json(done)["counts"])
    report(f"tokenizing {len(paths)} file{'s' if len(paths) > 1 else ''}")
    done.unlink(missing_ok=True)  # not valid while some files are new and others old
    counts = make(paths, {"source_files": files, "source": made_from["source"]})
    write_json(done, {"made_from": made_from, "counts": counts})
    return counts
