"""A quickstart folder made up for the tests: plausible figures, and texts that would do harm if not escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script></svg></style><script>alert(1)</script><img src=x onerror=\"alert('2')\"> \"'&amp; 🙂 \u202e{{ 7*7 }}"
)
PARTS = (
    "quickstart.json",
    "evaluation.json",
    "compression.json",
    *(f"{stage}/{name}" for stage in ("pretrain", "sft") for name in ("plan.json", "outcome.json", "metrics.jsonl")),
    "pretrain/samples.jsonl",
    "sft/samples.jsonl",
)


def put(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def put_lines(path: Path, values: Iterable[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def quickstart(bad: str) -> dict[str, Any]:
    times = {"data": 4.2, "tokenizer": 11, "shards": 6, "plan": 21, "pretrain": 1010, "sft": 260, "evaluate": 95}
    stages = [{"name": name, "state": "done", "seconds": seconds, "note": ""} for name, seconds in times.items()]
    stages[0] |= {"state": "skipped", "note": "made by an earlier run" + bad}
    stages.append({"name": "export", "state": "done", "seconds": 3.5, "note": ""})
    return {
        "title": "A bilingual toy model" + bad,
        "created": "2025-03-01T14:05:00+00:00",
        "command": "make quickstart" + bad,
        "penjing": "0.1.0",
        "torch": "2.8.0+cpu",
        "machine": {
            "cpu": "Example Processor 3000" + bad,
            "cores": 8,
            "threads": 2,
            "memory_bytes": 16 * 2**30,
            "device": "cpu",
            "compute_dtype": "bfloat16",
        },
        "stages": stages,
        "data": {
            "source": "synthetic sums, counting and stories" + bad,
            "documents": 41_200,
            "bytes": 28_400_000,
            "tokens": 16_400_000,
            "validation_tokens": 164_000,
            "bytes_per_token": 2.62,
            "han_fraction": 0.46,
            "warnings": ["3 documents were longer than a row and were cut." + bad],
        },
        "tokenizer": {"vocabulary": 4096, "kind": "byte pairs" + bad, "fallback": "bytes"},
        "export": {
            "path": "runs/quickstart/export",
            "verified": True,
            "largest_logit_difference": 3.1e-06,
            "note": bad,
        },
        "next": "penjing chat runs/quickstart",
    }


def plan(tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "parameters": 5_240_000,
        "parameters_without_embedding": 4_190_000,
        "tokens": tokens,
        "steps": tokens // 16384,
        "flops": 5.1e14,
        "flops_per_token": 3.1e7,
        "predicted_seconds": seconds,
        "predicted_seconds_low": seconds * 0.9,
        "predicted_seconds_high": seconds * 1.2,
        "predicted_peak_memory_bytes": 1.9e9,
        "tokens_per_second": tokens / seconds,
        "level": "L2",
        "tokens_per_step": 16384,
        "epochs": 1.02,
    }


def outcome(tokens: int, seconds: float, resumed: int) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "training_seconds": seconds * 0.92,
        "validation_seconds": seconds * 0.05,
        "checkpoint_seconds": seconds * 0.02,
        "other_seconds": seconds * 0.01,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "mfu": 0.31,
        "peak_memory_bytes": 2.02e9,
        "final_loss": 1.93,
        "val_loss": 1.97,
        "val_bits_per_byte": 0.91,
        "resumed": resumed,
        "weights_sha256": "3f" * 32,
    }


def metrics(steps: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1, 4):
        loss = 1.9 + 6.2 * math.exp(-step / 60) + 0.08 * math.sin(step * 1.7)
        lines.append(
            {
                "step": step,
                "tokens": step * 16384,
                "seconds": step * 0.8,
                "loss": loss,
                "learning_rate": 0.003 * min(step / 50, 1) * (1 - step / (steps + 1)),
                "grad_norm": 0.4 + 3 / step + 0.1 * math.cos(step),
                "tokens_per_second": 20400 + 600 * math.sin(step),
                "mfu": 0.31,
            }
        )
        if step % 100 == 1:
            lines.append(
                {
                    "step": step,
                    "tokens": step * 16384,
                    "val_loss": loss + 0.05,
                    "val_bits_per_byte": loss * 0.46,
                }
            )
    return lines


def samples(bad: str) -> list[dict[str, Any]]:
    prompts = {"Once there was a small pine": "en", "从前有一棵小松树": "zh", "12 + 7 =" + bad: "en"}
    texts = (
        "the the of a the" + bad,
        " that stood in a bowl, and the bowl" + bad,
        " that stood in a bowl by the window. " * 40,
    )
    chinese = ("的的了一的", "，它站在一只碗里，碗", "，它站在窗边的一只碗里。春天来了，小松树长出了新芽。")
    return [
        {"step": step, "prompt": prompt, "text": (chinese if language == "zh" else texts)[index], "language": language}
        for index, step in enumerate((100, 400, 1000))
        for prompt, language in prompts.items()
    ] + [{"step": 1000, "prompt": "long", "text": "<b>" + "x" * 10_000, "language": "en"}]


def evaluation(bad: str) -> dict[str, Any]:
    right = {
        "addition": (9, 41, 0.1),
        "counting": (12, 33, 0.25),
        "copy": (3, 49, 0.02),
        "opposites" + bad: (13, 14, 0.25),
    }
    rows = [
        {
            "stage": stage,
            "kind": kind,
            "language": language,
            "asked": 50,
            "right": hits - (language == "zh"),
            "chance": chance,
        }
        for kind, (before, after, chance) in right.items()
        for language in ("en", "zh")
        for stage, hits in (("pretrain", before), ("sft", after))
    ]
    examples = [
        {
            "kind": "addition",
            "language": "en",
            "question": "What is 12 + 7?",
            "answer": "19",
            "pretrain": "12 12",
            "sft": "19.",
            "pretrain_right": False,
            "sft_right": True,
        },
        {
            "kind": "counting",
            "language": "zh",
            "question": "数一数：松松松",
            "answer": "3",
            "pretrain": "松",
            "sft": "4",
            "pretrain_right": False,
            "sft_right": False,
        },
        {"kind": "copy", "language": "en", "question": "Say " + bad, "answer": bad, "pretrain": "", "sft": bad},
        {
            "kind": "opposites",
            "language": "zh",
            "question": "大的反义词是？",
            "answer": "小",
            "pretrain": "大大",
            "sft": "小。",
        },
    ]
    told = [
        {"prompt": "Use the words: pine, bowl", "text": "A pine lived in a bowl." + bad, "language": "en"},
        {"prompt": "用上这些词：松树、月亮", "text": "月亮照着小松树。", "language": "zh"},
    ]
    stories = {"asked": 40, "with_required_words": 31, "examples": told}
    return {"questions": 400, "rows": rows, "stories": stories, "examples": examples}


def write_folder(folder: Path, bad: str = HOSTILE) -> Path:
    """A whole run under `folder`; `bad` is added to most texts."""
    put(folder / "quickstart.json", quickstart(bad))
    put(folder / "evaluation.json", evaluation(bad))
    figures = {"validation_bytes": 284_000, "zstd_19_bits_per_byte": 1.92, "model_bits_per_byte": 0.91}
    put(folder / "compression.json", figures | {"note": "0.910 bits per byte, 1.010 below zstd -19" + bad})
    for stage, tokens, steps in (("pretrain", 16_400_000, 1001), ("sft", 3_300_000, 201)):
        put(folder / stage / "plan.json", plan(tokens, tokens / 17_000))
        put(folder / stage / "outcome.json", outcome(tokens, tokens / 16_250, resumed=2 if stage == "sft" else 0))
        put_lines(folder / stage / "metrics.jsonl", metrics(steps))
        put_lines(folder / stage / "samples.jsonl", samples(bad))
    return folder


FIGURES: dict[str, dict[str, float]] = {
    "documents": {"loss": 2.0, "val_bits_per_byte": 0.9, "max_expert_load_ratio": 1.4},
    "chats": {"loss": 1.0, "val_loss": 1.1},
    "distill": {"kl": 0.3, "agreement": 0.7, "val_agreement": 0.6},
    "preference": {"preference_loss": 0.5, "reward_margin": 1.0, "val_reward_accuracy": 0.8},
    "reward": {"ranking_loss": 0.4, "val_reward_accuracy": 0.7},
    "policy": {"reward": 0.6, "reward_std": 0.3, "truncated_fraction": 0.1, "kl": 0.02, "new_figure": 3.0},
}


def write_run(folder: Path, task: str, *, scale: float = 1.0, done: bool = True, rate: str = "0.001") -> Path:
    """A run of any task: its figures fall from twice their last value, times `scale`."""
    kind = task if task not in ("documents", "chats") else "next_token"
    data = task if kind == "next_token" else "preferences"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(
        f'stage = "x"\nout = "{folder}"\n[data]\nformat = "{data}"\n[objective]\nname = "{kind}"\n'
        f"[optimizer]\nlearning_rate = {rate}\n"
    )
    shared = {"learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_second": 900.0}
    put(folder / "plan.json", plan(20 * 16384, 20.0))
    put_lines(
        folder / "metrics.jsonl",
        [
            {"step": step, "tokens": step * 16384, **shared}
            | {name: value * scale * (2 - step / 20) for name, value in FIGURES[task].items()}
            for step in range(2, 21, 2)
        ],
    )
    if done:
        last = {name: value * scale for name, value in FIGURES[task].items() if name.startswith("val_")}
        put(folder / "outcome.json", outcome(20 * 16384, 21.0, resumed=1) | last)
    return folder
