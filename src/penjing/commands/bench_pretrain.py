"""What `penjing bench train` of pretraining hands to bench/: the same text, tokenizer and shape for everyone."""

from __future__ import annotations

import ast
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.bench.pretrain import Asked, compare
from penjing.bench.race import IGNORED, RaceSpec
from penjing.commands.train import resolve_run
from penjing.convert.hf import hf_config
from penjing.data import formats as records
from penjing.data.catalog import registry as catalogue
from penjing.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from penjing.optim.adamw import AdamW
from penjing.parallel.base import local_device
from penjing.plan import hardware
from penjing.plan.flops import parameters, training_flops_per_token
from penjing.train.config import Run

MOST_EPOCHS = 4  # through a text that are about as good as fresh text (arXiv:2305.16264)
USUAL_SHARE = 0.5  # of the device's matrix-product rate, to say how many steps the given seconds are about
# What the peers learn with. A usual rate, searched for with Asked.search only; benchmarks/recipe.py compares with AdamW
# at its best.
PEERS_ADAMW = AdamW(learning_rate=1e-3, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the comparison is."""

    model: dict[str, int]
    row_tokens: int
    batch: int  # rows of a step
    held_out: int  # documents


FULL = Size(
    model={"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 2, "head_size": 64}
    | {"mlp_size": 1408, "vocabulary_size": 6400},
    row_tokens=512,
    batch=8,
    held_out=192,
)
QUICK = Size(
    model={"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_size": 64}
    | {"mlp_size": 704, "vocabulary_size": 2048},
    row_tokens=256,
    batch=8,
    held_out=96,
)
# What keeps a GPU busy: 131,072 tokens a step.
ON_GPU = replace(FULL, row_tokens=1024, batch=128)
QUICK_ON_GPU = replace(FULL, batch=64)


def bench_pretrain(
    data: Path | None,
    asked: Asked,
    size: Size,
    console: Console,
    *settings: str,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compare at a constant rate: the peers at PEERS_ADAMW, ours at its recipe's optimizer and at that one too;
    `settings` go over ours alone. save: is handed what there is after every trial. earlier: a result to go on with.

    data: documents; None: functions and classes of Python's standard library, real text of mixed lengths that is on
    every machine. On a GPU where there is one, unless compute.device says otherwise.
    """
    device = _device(settings)
    if device.type != "cpu":
        size = ON_GPU if size is FULL else QUICK_ON_GPU if size is QUICK else size
    threads = asked.threads or hardware.physical_cores()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        texts = list(_standard_library(work) if data is None else _texts(data))
        order = np.random.Generator(np.random.PCG64(1)).permutation(len(texts))
        if len(texts) < 4 * size.held_out:
            raise UserError("too few documents", where=data, got=len(texts), wanted=f"at least {4 * size.held_out}")
        held_out, learned = ([texts[i] for i in part] for part in (order[: size.held_out], order[size.held_out :]))
        tokenizer = train_tokenizer(iter(learned), size.model["vocabulary_size"])
        tokenizer.save(work / "tokenizer")
        run = _run(work, size, asked, threads, device, settings)
        if run.model.architecture != "qwen3":
            raise UserError("the peers train another model", where="model", got=run.model.architecture, wanted="qwen3")
        size = replace(size, row_tokens=run.data.row_tokens, batch=run.batch.rows)
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in learned)
        write_text(work / "text.jsonl", "\n".join(lines) + "\n")
        _write_held_out(work / "held_out.npz", held_out, tokenizer, size.row_tokens)
        _write_rows(work / "rows.npz", learned, tokenizer, size, asked.steps)
        write_text(work / "run.toml", config.to_toml(run))
        spec = RaceSpec(
            kind="path",
            text=str(work / "text.jsonl"),
            tokenizer=str(work / "tokenizer"),
            shape=_stock_shape(run, tokenizer),
            run=str(work / "run.toml"),
            held_out=str(work / "held_out.npz"),
            rows=str(work / "rows.npz"),
            out="",
            threads=threads,
            batch=run.batch.rows,
            row_tokens=run.data.row_tokens,
            seconds=asked.seconds,
            looks=asked.looks,
            steps=asked.steps,
            warmup=asked.warmup,
            device=device.type,
            learning_rate=PEERS_ADAMW.learning_rate,
            clip_norm=run.clip_norm,
            betas=(PEERS_ADAMW.beta1, PEERS_ADAMW.beta2),
            weight_decay=PEERS_ADAMW.weight_decay,
            dtype=run.compute.dtype,
            seed=run.seed,
        )
        asked = replace(asked, dtypes=_peer_dtypes(device))
        count = parameters(run.model).total
        dtype = hardware.compute_dtype(run.compute.dtype, device)
        rate = hardware.peak(device, dtype).flops_per_second or 0.0
        lengths = [len(tokenizer.encode(text)) for text in learned[:500]]
        where = f"{threads} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
        console.print(
            f"pretrain: {count:,} parameters, {spec.batch} rows of {spec.row_tokens} tokens a step, {where}; "
            f"{len(learned):,} documents, {np.median(lengths):.0f} tokens long in the middle",
            highlight=False,
        )
        read = run.steps * spec.batch * spec.row_tokens / (np.mean(lengths) * len(learned))
        if read > MOST_EPOCHS:
            console.print(
                f"  note: whoever is fast reads this text up to some {read:.0f} times and then learns it by heart; "
                "`--data` takes more of it",
                highlight=False,
            )
        flops = training_flops_per_token(run.model, (spec.row_tokens + 1) / 2)
        machine = {
            **hardware.describe(device, dtype),
            "threads": threads,
            "product_flops_per_second": rate,
            "limit_tokens_per_second": rate / flops,
        }
        about = {"parameters": count, "machine": machine, "documents": len(learned), "text": _name(data)}
        return compare(asked, spec, work / "trials", console, save=save, about=about, earlier=earlier)


def _device(settings: tuple[str, ...]) -> torch.device:
    """The first GPU where there is one and none other is asked for, else the CPU."""
    asked = config.parse_overrides(settings).get("compute", {})
    device = local_device(asked.get("device", "auto") if isinstance(asked, dict) else "auto")
    return device if device.type == "cuda" else torch.device("cpu")


def _name(data: Path | None) -> str:
    return "functions and classes of Python's standard library" if data is None else data.name


def _texts(data: Path) -> Iterator[str]:
    return (record.text for record in records.read_documents(records.list_files([data])))


def _standard_library(work: Path) -> Iterator[str]:
    """Each function and class at the top of a module, and what stands between them left out."""
    for record in records.read_documents([catalogue.get("stdlib", work) / "stdlib.jsonl"]):
        lines = record.text.splitlines(keepends=True)
        try:
            nodes = ast.parse(record.text).body
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def _run(work: Path, size: Size, asked: Asked, threads: int, device: torch.device, settings: tuple[str, ...]) -> Run:
    layer: dict[str, Any] = {
        "model": {"architecture": "qwen3", **size.model},  # the peers' stock class
        "data": {"train": [str(work / "text.jsonl")], "row_tokens": size.row_tokens},
        "tokenizer": {"folder": str(work / "tokenizer")},
        "batch": {"rows": size.batch},
        "schedule": {"kind": "constant"},
        "compute": {"device": device.type, "threads": threads},
        "validate": {"rows": 1, "every": 0},
        "save": {"every": 10**9},
        "track": {"every": 10**9},
        "steps": 1,
    }
    run = resolve_run("pretrain", layer, config.parse_overrides(list(settings)))
    dtype_name: Any = run.compute.dtype
    if dtype_name == "auto":  # answered here, once: no trial is to find another answer
        dtype_name = str(hardware.compute_dtype("auto", device)).removeprefix("torch.")
    # As many steps as the seconds allow, about: the rule that decides on compiling and the probe ask for the number.
    dtype = hardware.compute_dtype(dtype_name, device)
    rate = USUAL_SHARE * (hardware.peak(device, dtype).flops_per_second or 1e11)
    flops = training_flops_per_token(run.model, (run.data.row_tokens + 1) / 2) * run.batch.rows * run.data.row_tokens
    run = resolve_run(
        "pretrain",
        {**layer, "steps": max(20, round(asked.seconds * rate / flops))},
        config.parse_overrides(list(settings)),
    )
    return replace(run, compute=replace(run.compute, dtype=dtype_name))


def _peer_dtypes(device: torch.device) -> tuple[str, ...]:
    """What the peers' pilots try: float32, and bfloat16 where the device has units for it."""
    if device.type == "cpu":
        has_units = (getattr(torch.cpu, f"_is_{it}_supported", lambda: False)() for it in ("avx512_bf16", "amx_tile"))
        has_bfloat16 = any(has_units) or hardware.compute_dtype("auto", device) == torch.bfloat16
    else:
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return ("float32", "bfloat16") if has_bfloat16 else ("float32",)


def _stock_shape(run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    shape = hf_config(run.model, tokenizer)
    left_out = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version")
    return {name: value for name, value in shape.items() if name not in left_out}


def _write_held_out(path: Path, texts: list[str], tokenizer: Tokenizer, row_tokens: int) -> None:
    """Each document in a row of its own behind the token that opens a text, cut to the row."""
    ids_BT = np.full((len(texts), row_tokens), tokenizer.end_of_text, dtype=np.int64)
    target_BT = np.full((len(texts), row_tokens), IGNORED, dtype=np.int64)
    num_bytes = 0
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text)[:row_tokens]
        num_bytes += len(tokenizer.decode(ids).encode())
        ids_BT[row, 1 : len(ids)] = ids[:-1]
        target_BT[row, : len(ids)] = ids
    np.savez(path, ids_BT=ids_BT, target_BT=target_BT, num_bytes=num_bytes)


def _write_rows(path: Path, texts: list[str], tokenizer: Tokenizer, size: Size, steps: int) -> None:
    """Full rows of documents end to end, as many as the steps take or the text gives."""
    wanted = steps * size.batch * size.row_tokens + 1
    ids: list[int] = []
    document: list[int] = []
    for number, text in enumerate(texts):
        each = [tokenizer.end_of_text, *tokenizer.encode(text)]
        ids += each
        document += [number] * len(each)
        if len(ids) >= wanted:
            break
    rows = (len(ids) - 1) // size.row_tokens
    starts = np.arange(rows)[:, None] * size.row_tokens
    np.savez(
        path,
        ids_NT=np.array(ids)[starts + np.arange(size.row_tokens + 1)],
        document_NT=np.array(document)[starts + np.arange(size.row_tokens)],
    )
