"""Run a GGUF file in llama.cpp: the second half of the check, if llama-cpp-python is installed.

It runs in a child process: llama.cpp calls `abort` on a file it rejects, which would end this process.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penjing.base.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

CANNOT_LOAD = 3  # exit code of the child: llama-cpp-python is installed but does not load


@dataclass(frozen=True, slots=True)
class LlamaOutput:
    logits: list[Tensor]  # logits_TV of each row
    ids: list[list[int]]  # of each text, read as plain text without control tokens
    greedy: list[int]  # after the prompt, without the stop id


def is_installed() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def run_llama_cpp(
    path: Path,
    rows: Sequence[Sequence[int]],
    texts: Sequence[str],
    *,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Collection[int],
) -> LlamaOutput | None:
    """Logits of each row of ids, ids of each text, and up to `max_new_tokens` greedy ids after `prompt`. None if
    llama-cpp-python is not installed or does not load. Raises UserError if llama.cpp rejects the file."""
    if not is_installed():
        return None
    import torch

    from penjing.kernels.cpu import spinning

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request = {
            "path": str(path.absolute()),
            "rows": [list(row) for row in rows],
            "texts": list(texts),
            "prompt": list(prompt),
            "longest": max_new_tokens,
            "stop": sorted(stop),
            # As many as torch uses: llama.cpp's threads spin while waiting; two on one busy core are 10 times slower.
            "threads": torch.get_num_threads(),
        }
        (folder / "question.json").write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "penjing.export.llama_cpp", str(folder)]
        spinning.use_every_cpu()
        child = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if child.returncode == CANNOT_LOAD:
            return None
        if child.returncode:
            last_line = (child.stderr.strip().splitlines() or [f"no reason given, exit status {child.returncode}"])[-1]
            raise UserError("llama.cpp cannot run this file", where=path, got=last_line)
        response = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        with np.load(folder / "logits.npz") as arrays:
            logits = [torch.from_numpy(arrays[f"arr_{row}"]) for row in range(len(rows))]
    return LlamaOutput(logits, response["ids"], response["greedy"])


def _disable_weight_repacking(api: Any) -> None:
    """Do not repack weights for the CPU: llama.cpp's AMX kernels crash with 8-bit weights (ggml-org/llama.cpp, issue
    20824). `Llama` has no option for it."""
    default_params = api.llama_model_default_params

    def params_without_repacking() -> Any:
        params = default_params()
        params.use_extra_bufts = False
        return params

    api.llama_model_default_params = params_without_repacking


def _child_main(folder: Path) -> None:
    """The child process: read question.json, write logits.npz and answer.json."""
    request = json.loads((folder / "question.json").read_text(encoding="utf-8"))
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError):
        sys.exit(CANNOT_LOAD)
    _disable_weight_repacking(llama_cpp.llama_cpp)
    rows, prompt, max_new_tokens = request["rows"], request["prompt"], request["longest"]
    context = max(*map(len, rows), len(prompt) + max_new_tokens)
    llama: Any = llama_cpp.Llama(
        request["path"],
        n_ctx=context,
        n_batch=context,
        n_ubatch=context,
        n_threads=request["threads"],
        n_threads_batch=request["threads"],
        logits_all=True,
        verbose=False,
    )

    def last_logits(ids: Sequence[int]) -> np.ndarray[Any, Any]:
        llama.eval(ids)
        return np.asarray(llama.scores[llama.n_tokens - 1])

    logits = []
    for row in rows:
        llama.reset()
        llama.eval(row)
        logits.append(np.array(llama.scores[: len(row)], dtype=np.float32))
    np.savez(folder / "logits.npz", *logits)
    llama.reset()
    greedy: list[int] = []
    next_logits = last_logits(prompt)
    while len(greedy) < max_new_tokens and (index := int(next_logits.argmax())) not in request["stop"]:
        greedy.append(index)
        if len(greedy) < max_new_tokens:
            next_logits = last_logits([index])
    ids = [llama.tokenize(text.encode(), add_bos=False, special=False) for text in request["texts"]]
    (folder / "answer.json").write_text(json.dumps({"ids": ids, "greedy": greedy}), encoding="utf-8")


if __name__ == "__main__":
    _child_main(Path(sys.argv[1]))
