"""Writes the toy world's five files, and where they are asked for two more with tools."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penjing.base.files import atomic_write
from penjing.data.synthetic import dataset_rows as rows
from penjing.data.synthetic import tools as tool_rows

Progress = Callable[[str, int, int], None]
_REPORT_EVERY = 1000


def write(
    folder: str | Path,
    *,
    seed: int,
    documents: int,
    conversations: int,
    preferences: int,
    prompts: int,
    questions_per_kind: int,
    tools: int = 0,
    progress: Progress | None = None,
) -> dict[str, dict[str, float]]:
    """Writes pretrain, sft, dpo, rl and eval (.jsonl) to `folder`; returns rows, bytes and seconds of each.

    tools: conversations with tools, and a quarter as many prompts, in tools.jsonl and tools_rl.jsonl; 0 = no such file.

    Each file appears whole or not at all. `progress(file, rows_done, rows_in_all)` is called now and then; the total of
    the evaluation file is 0, because it is known only at the end.
    """
    plan: dict[str, tuple[int, Iterator[Any]]] = {
        "pretrain.jsonl": (documents, ({"text": text} for text in rows.pretrain_documents(seed, documents))),
        "sft.jsonl": (conversations, rows.conversations(seed, conversations)),
        "dpo.jsonl": (preferences, rows.preferences(seed, preferences)),
        "rl.jsonl": (prompts, rows.prompts(seed, prompts)),
        "eval.jsonl": (0, rows.evaluation(seed, questions_per_kind)),
    }
    if tools:
        plan["tools.jsonl"] = (tools, tool_rows.tool_conversations(seed, tools))
        plan["tools_rl.jsonl"] = (-(-tools // 4), tool_rows.tool_prompts(seed, -(-tools // 4)))
    return {name: _write_file(Path(folder) / name, total, lines, progress) for name, (total, lines) in plan.items()}


def _write_file(path: Path, total: int, rows: Iterator[Any], progress: Progress | None) -> dict[str, float]:
    begin, count, size = time.perf_counter(), 0, 0
    with atomic_write(path) as stream:
        for row in rows:
            size += stream.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")
            count += 1
            if progress and count % _REPORT_EVERY == 0:
                progress(path.name, count, total)
    if progress:
        progress(path.name, count, total)
    return {"rows": count, "bytes": size, "seconds": time.perf_counter() - begin}
