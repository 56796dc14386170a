"""A toy world: short stories in English and Chinese from a small simulation, with checkable questions.

It is the corpus of the quickstart: generated on the spot, the same bytes everywhere, learnable by about a million
parameters, and split so that evaluation asks only about combinations that training never shows.

`lexicon` holds the words. `world` and `tasks.plots` simulate stories. `surface_realization` writes the text, from the
phrases of english.toml and chinese.toml. `questions`, `tasks.drills` and `tools` make the questions. `dataset_rows`
mixes them, and `write` writes the files.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penjing.base.files import remove_unfinished
from penjing.data.formats.write import write_jsonl
from penjing.data.synthetic import dataset_rows as rows
from penjing.data.synthetic import tools as tool_rows


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
) -> dict[str, dict[str, float]]:
    """Writes pretrain, sft, dpo, rl and eval (.jsonl) to `folder`; returns rows, bytes and seconds of each.

    tools: conversations with tools, and a quarter as many prompts, in tools.jsonl and tools_rl.jsonl; 0 = no such file.

    Each file is written atomically.
    """
    plan: dict[str, Iterable[dict[str, Any]]] = {
        "pretrain.jsonl": ({"text": text} for text in rows.pretrain_documents(seed, documents)),
        "sft.jsonl": rows.conversations(seed, conversations),
        "dpo.jsonl": rows.preferences(seed, preferences),
        "rl.jsonl": rows.prompts(seed, prompts),
        "eval.jsonl": rows.evaluation(seed, questions_per_kind),
    }
    if tools:
        plan["tools.jsonl"] = tool_rows.tool_conversations(seed, tools)
        plan["tools_rl.jsonl"] = tool_rows.tool_prompts(seed, -(-tools // 4))
    written = dict[str, dict[str, float]]()
    remove_unfinished(Path(folder))
    for name, lines in plan.items():
        begin, path = time.perf_counter(), Path(folder) / name
        rows_written = write_jsonl(path, lines)
        written[name] = dict(rows=rows_written, bytes=path.stat().st_size, seconds=time.perf_counter() - begin)
    return written
