"""The spec of a trial, a JSON file passed to its process: `python -m MODULE SPEC.json [ARGUMENT]...`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """Fields of all trials of a comparison."""

    # A setting of the benchmark. `path`: the trainer's own path from data to a model, for `seconds` after the first
    # step. `pilot`: as path, without evaluations, and at least `steps` steps. All others: `steps` steps.
    setting: str
    out: str  # folder of this trial
    threads: int
    steps: int
    warmup: int  # steps excluded from rates
    seed: int = 1
    dtype: str = "float32"  # of matmuls, never `auto`: the parent process resolves it once
    device: str = "cpu"
    seconds: float = 0.0  # path, pilot: training after the first step
    evaluations: int = 0  # path: on held-out text, evenly spaced


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(TrialSpec):
    """Training trials. Units are what a batch counts: rows, pairs, prompts."""

    run: str  # run.toml of penjing's own run
    batch: int  # units of one optimizer step
    learning_rate: float
    max_grad_norm: float
    betas: tuple[float, float]
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DecodeSpec(TrialSpec):
    """Greedy decoding trials. `seconds`: maximum decoding time of one measurement."""

    models: (
        str  # folder with, for each setting, a Hugging Face directory of that name, NAME-f16.gguf and NAME-q8_0.gguf
    )
    ids: tuple[int, int]  # range of prompt ids, end excluded
    first_token: tuple[int, ...]  # lengths of single prompts
    prompt_tokens: int  # of each sequence of a batch
    new_tokens: int
    batches: tuple[int, ...]  # sequences decoded concurrently


@dataclass(frozen=True, kw_only=True)
class PretrainSpec(TrainingSpec):
    text: str  # JSONL of training documents
    tokenizer: str  # folder, in the format of transformers
    shape: dict[str, Any]  # a transformers configuration of Qwen3
    held_out: str  # .npz, see held_out.py
    rows: str  # .npz of packed rows for the setting `step`: ids and documents
    seq_len: int
    compiled: bool = False  # baselines: torch.compile
    rate_factor: float = 1.0  # multiplies the recipe's learning rates; already included in learning_rate


@dataclass(frozen=True, kw_only=True)
class AlignmentSpec(TrainingSpec):
    method: str  # dpo or grpo
    model: str  # Hugging Face directory of the initial model
    data: str  # JSONL in the order of penjing's steps, for baselines
    micro: int  # units of one forward pass
    beta: float  # dpo: of its loss; grpo: weight of the divergence
    reference: str = "copy"  # dpo: copy or precomputed
    num_generations: int = 0  # grpo: for each prompt
    max_tokens: int = 0  # grpo: of an answer
    temperature: float = 1.0
    match: str = ""  # grpo: whether an answer is one of the reference answers, `module:name`
    checkpointing: bool = False  # baseline: gradient checkpointing


# Fields with file paths, or that differ between the contestants of one comparison.
PER_TRIAL = (
    *("setting", "run", "out", "compiled", "rate_factor", "checkpointing", "match"),
    *("text", "tokenizer", "held_out", "rows", "model", "data", "models"),
)

AnySpec = TypeVar("AnySpec", bound=TrialSpec)


def read_spec(kind: type[AnySpec]) -> AnySpec:
    """The spec in the file named on the command line."""
    values: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return kind(**values | {name: tuple(value) for name, value in values.items() if isinstance(value, list)})
