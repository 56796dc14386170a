"""Files of a pretraining comparison: the same text, tokenizer and shape for all contestants."""

from __future__ import annotations

import ast
import json
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compare.comparison import BenchmarkRequest, Options, Prepared, training_fields
from compare.held_out import IGNORED
from compare.trial_spec import PretrainSpec
from penjing import devices
from penjing.base import config
from penjing.base.config import Layer
from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.convert.hf_config import hf_config
from penjing.data import formats
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.devices.choose import local_device
from penjing.optim.adamw import AdamW
from penjing.plan import hardware
from penjing.plan.flops import parameters, training_flops_per_token
from penjing.plan.hardware import environment
from penjing.train.config import Run

MAX_EPOCHS = 4  # repeated so often, a text is about as good as fresh text (arXiv:2305.16264)
ASSUMED_MFU = 0.5  # to estimate the number of steps in the given seconds
# The baselines' optimizer. A common learning rate, searched only with --search-rates; benchmarks/recipe.py compares
# with AdamW at its best.
ADAMW = AdamW(learning_rate=1e-3, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Size of a comparison."""

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
# Large enough to keep a GPU busy: 131,072 tokens per step.
FULL_ON_GPU = replace(FULL, seq_len=1024, batch=128)
QUICK_ON_GPU = replace(FULL, batch=64)


def prepare(work: Path, request: BenchmarkRequest) -> Prepared:
    """Prepare a comparison at a constant learning rate: the baselines use ADAMW; penjing uses its recipe's optimizer
    and, in a second trial, ADAMW. The user's settings apply to penjing only.

    Without request.data the text is the functions and classes of Python's standard library: real text of mixed lengths
    that every machine has. Runs on a GPU if there is one, unless compute.device is set.
    """
    if request.start is not None:
        raise UserError("pretraining starts from scratch", where="RUN", got=request.start, next_step="Leave it out.")
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
    train_texts, held_out = _texts(request.data, size.held_out)
    tokenizer = train_tokenizer(iter(train_texts), size.model["vocab_size"])
    tokenizer.save(work / "tokenizer")
    run = _run(work, size, options, device, request)
    if run.model.architecture != "qwen3":
        raise UserError("the baselines train another model", where="model", got=run.model.architecture, wanted="qwen3")
    spec = _spec(work, run, options, device, hf_shape(run, tokenizer))
    _write_files(spec, train_texts, held_out, tokenizer)
    write_text(Path(spec.run), config.to_toml(run))
    dtype = devices.of(device).compute_dtype(run.compute.dtype, device)
    rate = hardware.peak(device, dtype) or 0.0
    flops = training_flops_per_token(run.model, (spec.seq_len + 1) / 2)
    limit = {"matmul_flops_per_second": rate, "limit_tokens_per_second": rate / flops}
    about = {
        **environment(device, dtype, threads=options.threads, **limit),
        "parameters": parameters(run.model).total,
        "documents": len(train_texts),
        "text": "functions and classes of Python's standard library" if request.data is None else request.data.name,
    }
    return Prepared(spec=spec, options=options, about=about, lines=[*_lines(run, spec, train_texts, tokenizer, about)])


def _device(overrides: Layer) -> torch.device:
    """The first GPU if there is one and no other device is requested, else the CPU."""
    compute = overrides.get("compute", {})
    device = local_device(compute.get("device", "auto") if isinstance(compute, dict) else "auto")
    return device if device.type == "cuda" else torch.device("cpu")


def _texts(data: Path | None, held_out: int) -> tuple[list[str], list[str]]:
    """(training documents, held-out documents), in a fixed random order."""
    if data is None:
        texts = list(_standard_library())
    else:
        texts = [record.text for record in formats.read_documents(formats.list_files([data]))]
    if len(texts) < 4 * held_out:
        raise UserError("too few documents", where=data, got=len(texts), wanted=f"at least {4 * held_out}")
    order = np.random.Generator(np.random.PCG64(1)).permutation(len(texts))
    return [texts[i] for i in order[held_out:]], [texts[i] for i in order[:held_out]]


# Of the standard library: no tests, no packages of others, no tables.
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "_bundled",
    "pydoc_data",
}
LARGEST_FILE_BYTES = 200_000


def _standard_library() -> Iterator[str]:
    """Each top-level function and class of each module."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        is_part = LEFT_OUT.isdisjoint(folders) and not "".join(folders[:1]).startswith("config-")
        if not is_part or path.stat().st_size > LARGEST_FILE_BYTES:
            continue
        try:
            with tokenize.open(path) as stream:  # honours the file's own coding line
                text = stream.read()
            nodes = ast.parse(text).body
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = text.splitlines(keepends=True)
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
    # `auto` is resolved here, once, so that all trials use the same dtype.
    dtype = devices.of(device).compute_dtype(run.compute.dtype, device)
    name: Any = str(dtype).removeprefix("torch.") if run.compute.dtype == "auto" else run.compute.dtype
    # About as many steps as the seconds allow: the compile policy and the probe need the number.
    rate = ASSUMED_MFU * (hardware.peak(device, dtype) or 1e11)
    flops = training_flops_per_token(run.model, (run.data.seq_len + 1) / 2) * run.batch.size * run.data.seq_len
    run = request.resolve({**layer, "max_steps": max(20, round(options.seconds * rate / flops))})
    return replace(run, compute=replace(run.compute, dtype=name))


def _baseline_dtypes(device: torch.device) -> tuple[str, ...]:
    """Dtypes that the baselines' pilots try: float32, and bfloat16 if the device has units for it."""
    if device.type == "cpu":
        has_units = (getattr(torch.cpu, f"_is_{isa}_supported", lambda: False)() for isa in ("avx512_bf16", "amx_tile"))
        has_bfloat16 = any(has_units) or devices.of(device).compute_dtype("auto", device) == torch.bfloat16
    else:
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return ("float32", "bfloat16") if has_bfloat16 else ("float32",)


def hf_shape(run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """Arguments of transformers.Qwen3Config."""
    excluded = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version")
    return {name: value for name, value in hf_config(run.model, tokenizer).items() if name not in excluded}


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
    run: Run, spec: PretrainSpec, train_texts: list[str], tokenizer: Tokenizer, about: dict[str, Any]
) -> Iterator[str]:
    lengths = [len(tokenizer.encode(text)) for text in train_texts[:500]]
    where = f"{spec.threads} threads" if spec.device == "cpu" else about["machine"]["device"]
    yield (
        f"pretrain: {about['parameters']:,} parameters, {spec.batch} rows of {spec.seq_len} tokens a step, {where}; "
        f"{len(train_texts):,} documents, median length {np.median(lengths):.0f} tokens"
    )
    epochs = run.max_steps * spec.batch * spec.seq_len / (np.mean(lengths) * len(train_texts))
    if epochs > MAX_EPOCHS:
        yield f"note: a fast contestant reads the text some {epochs:.0f} times and memorizes it; `--data` takes more"


def _write_files(spec: PretrainSpec, train_texts: list[str], held_out: list[str], tokenizer: Tokenizer) -> None:
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in train_texts)
    write_text(Path(spec.text), "\n".join(lines) + "\n")
    # Each held-out document gets its own row, after the begin-of-text token, truncated to the row.
    ids_BT = np.full((len(held_out), spec.seq_len), tokenizer.end_of_text, dtype=np.int64)
    target_BT = np.full((len(held_out), spec.seq_len), IGNORED, dtype=np.int64)
    num_bytes = 0
    for row, text in enumerate(held_out):
        ids = tokenizer.encode(text)[: spec.seq_len]
        num_bytes += len(tokenizer.decode(ids).encode())
        ids_BT[row, 1 : len(ids)] = ids[:-1]
        target_BT[row, : len(ids)] = ids
    np.savez(spec.held_out, ids_BT=ids_BT, target_BT=target_BT, num_bytes=num_bytes)
    _write_rows(spec, train_texts, tokenizer)


def _write_rows(spec: PretrainSpec, texts: list[str], tokenizer: Tokenizer) -> None:
    """Full rows of concatenated documents, as many as the steps need or the text gives."""
    num_tokens = spec.steps * spec.batch * spec.seq_len + 1
    ids: list[int] = []
    document_numbers: list[int] = []
    for number, text in enumerate(texts):
        document_ids = [tokenizer.end_of_text, *tokenizer.encode(text)]
        ids += document_ids
        document_numbers += [number] * len(document_ids)
        if len(ids) >= num_tokens:
            break
    starts = np.arange((len(ids) - 1) // spec.seq_len)[:, None] * spec.seq_len
    np.savez(
        spec.rows,
        ids_NT=np.array(ids)[starts + np.arange(spec.seq_len + 1)],
        document_NT=np.array(document_numbers)[starts + np.arange(spec.seq_len)],
    )
