"""Files of a pretraining comparison: the same text, tokenizer and shape for everyone."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penjing.base import config
from penjing.base.config import Layer
from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.bench.comparison import BenchmarkRequest, Options, Prepared, training_fields
from penjing.bench.held_out import IGNORED
from penjing.bench.record import facts
from penjing.bench.trial_spec import PretrainSpec
from penjing.convert.hf_config import hf_config
from penjing.data import formats
from penjing.data.catalog import registry
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.optim.adamw import AdamW
from penjing.parallel.base import local_device
from penjing.plan import hardware
from penjing.plan.flops import parameters, training_flops_per_token
from penjing.train.config import Run

MOST_EPOCHS = 4  # through a text that are about as good as fresh text (arXiv:2305.16264)
USUAL_MFU = 0.5  # to say about how many steps the given seconds are
# What the baselines learn with. A usual rate, searched for only with --search-rates; benchmarks/recipe.py compares with
# AdamW at its best.
ADAMW = AdamW(learning_rate=1e-3, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """How large a comparison is."""

    model: dict[str, int]
    seq_len: int
    batch: int  # rows of a step
    held_out: int  # documents


def _shape(width: int, layers: int, heads: int, mlp: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
    }


FULL = DataSize(model=_shape(512, 8, 8, 1408, 6400), seq_len=512, batch=8, held_out=192)
QUICK = DataSize(model=_shape(256, 4, 4, 704, 2048), seq_len=256, batch=8, held_out=96)
# What keeps a GPU busy: 131,072 tokens a step.
FULL_ON_GPU = replace(FULL, seq_len=1024, batch=128)
QUICK_ON_GPU = replace(FULL, batch=64)


def prepare(work: Path, request: BenchmarkRequest) -> Prepared:
    """At a constant rate: the baselines with ADAMW, penjing with its recipe's optimizer and with that one too. The
    user's settings are for penjing alone.

    Without request.data the text is the functions and classes of Python's standard library, real text of mixed lengths
    that is on every machine. On a GPU where there is one, unless compute.device says otherwise.
    """
    if request.start is not None:
        raise UserError("pretraining starts from nothing", where="RUN", got=request.start, next_step="Leave it out.")
    device = _device(request.overrides)
    size = (
        (QUICK if request.quick else FULL) if device.type == "cpu" else (QUICK_ON_GPU if request.quick else FULL_ON_GPU)
    )
    options = replace(
        request.options,
        dtypes=_baseline_dtypes(device),
        evaluations=5 if request.quick else request.options.evaluations,
    )
    torch.set_num_threads(options.threads)
    learned, held_out = _texts(request.data, work, size.held_out)
    tokenizer = train_tokenizer(iter(learned), size.model["vocab_size"])
    tokenizer.save(work / "tokenizer")
    run = _run(work, size, options, device, request)
    if run.model.architecture != "qwen3":
        raise UserError("the baselines train another model", where="model", got=run.model.architecture, wanted="qwen3")
    spec = _spec(work, run, options, device, hf_shape(run, tokenizer))
    _write_files(spec, learned, held_out, tokenizer)
    write_text(Path(spec.run), config.to_toml(run))
    dtype = hardware.compute_dtype(run.compute.dtype, device)
    rate = hardware.peak(device, dtype).flops_per_second or 0.0
    flops = training_flops_per_token(run.model, (spec.seq_len + 1) / 2)
    limit = {"matmul_flops_per_second": rate, "limit_tokens_per_second": rate / flops}
    about = {
        **facts(device, dtype, threads=options.threads, **limit),
        "parameters": parameters(run.model).total,
        "documents": len(learned),
        "text": "functions and classes of Python's standard library" if request.data is None else request.data.name,
    }
    return Prepared(spec=spec, options=options, about=about, lines=[*_lines(run, spec, learned, tokenizer, about)])


def _device(overrides: Layer) -> torch.device:
    """The first GPU where there is one and no other device is asked for, else the CPU."""
    compute = overrides.get("compute", {})
    device = local_device(compute.get("device", "auto") if isinstance(compute, dict) else "auto")
    return device if device.type == "cuda" else torch.device("cpu")


def _texts(data: Path | None, work: Path, held_out: int) -> tuple[list[str], list[str]]:
    """(documents to learn from, held-out documents), in an order drawn once."""
    if data is None:
        texts = list(_standard_library(work))
    else:
        texts = [record.text for record in formats.read_documents(formats.list_files([data]))]
    if len(texts) < 4 * held_out:
        raise UserError("too few documents", where=data, got=len(texts), wanted=f"at least {4 * held_out}")
    order = np.random.Generator(np.random.PCG64(1)).permutation(len(texts))
    return [texts[i] for i in order[held_out:]], [texts[i] for i in order[:held_out]]


def _standard_library(work: Path) -> Iterator[str]:
    """Each function and class at the top of a module, without what stands between them."""
    for record in formats.read_documents([registry.get("stdlib", work) / "stdlib.jsonl"]):
        lines = record.text.splitlines(keepends=True)
        try:
            nodes = ast.parse(record.text).body
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def _run(work: Path, size: DataSize, options: Options, device: torch.device, request: BenchmarkRequest) -> Run:
    layer: dict[str, Any] = {
        "model": {"architecture": "qwen3", **size.model},  # the baselines' stock class
        "data": {"train": [str(work / "text.jsonl")], "seq_len": size.seq_len},
        "tokenizer": {"path": str(work / "tokenizer")},
        "batch": {"size": size.batch},
        "schedule": {"name": "constant"},
        "compute": {"device": device.type, "threads": options.threads},
        "eval": {"sequences": 1, "every": 0},
        "checkpoint": {"every": 10**9},
        "log": {"every": 10**9},
        "max_steps": 1,
    }
    run = request.resolve(layer)
    # `auto` is answered here, once: no trial is to find another answer.
    dtype = hardware.compute_dtype(run.compute.dtype, device)
    name: Any = str(dtype).removeprefix("torch.") if run.compute.dtype == "auto" else run.compute.dtype
    # About as many steps as the seconds allow: the rule that decides on compiling, and the probe, ask for the number.
    rate = USUAL_MFU * (hardware.peak(device, dtype).flops_per_second or 1e11)
    flops = training_flops_per_token(run.model, (run.data.seq_len + 1) / 2) * run.batch.size * run.data.seq_len
    run = request.resolve({**layer, "max_steps": max(20, round(options.seconds * rate / flops))})
    return replace(run, compute=replace(run.compute, dtype=name))


def _baseline_dtypes(device: torch.device) -> tuple[str, ...]:
    """What the baselines' pilots try: float32, and bfloat16 where the device has units for it."""
    if device.type == "cpu":
        has_units = (getattr(torch.cpu, f"_is_{it}_supported", lambda: False)() for it in ("avx512_bf16", "amx_tile"))
        has_bfloat16 = any(has_units) or hardware.compute_dtype("auto", device) == torch.bfloat16
    else:
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return ("float32", "bfloat16") if has_bfloat16 else ("float32",)


def hf_shape(run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """Arguments of transformers.Qwen3Config."""
    left_out = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version")
    return {name: value for name, value in hf_config(run.model, tokenizer).items() if name not in left_out}


def _spec(work: Path, run: Run, options: Options, device: torch.device, shape: dict[str, Any]) -> PretrainSpec:
    return PretrainSpec(
        setting="path",
        text=str(work / "text.jsonl"),
        tokenizer=str(work / "tokenizer"),
        shape=shape,
        run=str(work / "run.toml"),
        held_out=str(work / "held_out.npz"),
        rows=str(work / "rows.npz"),
        seq_len=run.data.seq_len,
        seconds=options.seconds,
        evaluations=options.evaluations,
        device=device.type,
        **training_fields(run, options, ADAMW),
    )


def _lines(
    run: Run, spec: PretrainSpec, learned: list[str], tokenizer: Tokenizer, about: dict[str, Any]
) -> Iterator[str]:
    lengths = [len(tokenizer.encode(text)) for text in learned[:500]]
    where = f"{spec.threads} threads" if spec.device == "cpu" else about["machine"]["device"]
    yield (
        f"pretrain: {about['parameters']:,} parameters, {spec.batch} rows of {spec.seq_len} tokens a step, {where}; "
        f"{len(learned):,} documents, median length {np.median(lengths):.0f} tokens"
    )
    epochs = run.max_steps * spec.batch * spec.seq_len / (np.mean(lengths) * len(learned))
    if epochs > MOST_EPOCHS:
        yield f"note: a fast contestant reads the text some {epochs:.0f} times and memorizes it; `--data` takes more"


def _write_files(spec: PretrainSpec, learned: list[str], held_out: list[str], tokenizer: Tokenizer) -> None:
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in learned)
    write_text(Path(spec.text), "\n".join(lines) + "\n")
    # Each held-out document in a row of its own behind the token that opens a text, cut to the row.
    ids_BT = np.full((len(held_out), spec.seq_len), tokenizer.end_of_text, dtype=np.int64)
    target_BT = np.full((len(held_out), spec.seq_len), IGNORED, dtype=np.int64)
    num_bytes = 0
    for row, text in enumerate(held_out):
        ids = tokenizer.encode(text)[: spec.seq_len]
        num_bytes += len(tokenizer.decode(ids).encode())
        ids_BT[row, 1 : len(ids)] = ids[:-1]
        target_BT[row, : len(ids)] = ids
    np.savez(spec.held_out, ids_BT=ids_BT, target_BT=target_BT, num_bytes=num_bytes)
    _write_rows(spec, learned, tokenizer)


def _write_rows(spec: PretrainSpec, texts: list[str], tokenizer: Tokenizer) -> None:
    """Full rows of documents end to end, as many as the steps take or the text gives."""
    wanted = spec.steps * spec.batch * spec.seq_len + 1
    ids: list[int] = []
    document: list[int] = []
    for number, text in enumerate(texts):
        each = [tokenizer.end_of_text, *tokenizer.encode(text)]
        ids += each
        document += [number] * len(each)
        if len(ids) >= wanted:
            break
    starts = np.arange((len(ids) - 1) // spec.seq_len)[:, None] * spec.seq_len
    np.savez(
        spec.rows,
        ids_NT=np.array(ids)[starts + np.arange(spec.seq_len + 1)],
        document_NT=np.array(document)[starts + np.arange(spec.seq_len)],
    )
