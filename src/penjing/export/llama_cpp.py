"""Ask the real llama.cpp what it makes of a GGUF file: the second half of the check, where llama-cpp-python is there.

It runs in a process of its own: a file that llama.cpp does not like ends in an `abort`, which would take us with it.
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
    """What llama.cpp computed."""

    logits: list[Tensor]  # logits_TV of each row
    ids: list[list[int]]  # of each text, as plain text: control tokens in it are not meant
    greedy: list[int]  # after the prompt, without the stop id


def is_installed() -> bool:
    """Whether there is a llama.cpp to ask."""
    return importlib.util.find_spec("llama_cpp") is not None


def ask(
    path: Path,
    rows: Sequence[Sequence[int]],
    texts: Sequence[str],
    *,
    prompt: Sequence[int],
    longest: int,
    stop: Collection[int],
) -> LlamaOutput | None:
    """Logits of each row of ids, ids of each text, and up to `longest` greedy ids after `prompt`.

    None where llama-cpp-python is not installed or does not load. Raises UserError if llama.cpp refuses the file.
    """
    if not is_installed():
        return None
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        question = {
            "path": str(path.absolute()),
            "rows": [list(row) for row in rows],
            "texts": list(texts),
            "prompt": list(prompt),
            "longest": longest,
            "stop": sorted(stop),
            # As many as torch uses: llama.cpp's wait by spinning, and two on one busy core take 10 times as long.
            "threads": torch.get_num_threads(),
        }
        (folder / "question.json").write_text(json.dumps(question), encoding="utf-8")
        command = [sys.executable, "-m", "penjing.export.llama_cpp", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode == CANNOT_LOAD:
            return None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"no reason given, exit status {done.returncode}"])[-1]
            raise UserError("llama.cpp cannot run this file", where=path, got=last)
        result = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        with np.load(folder / "logits.npz") as arrays:
            logits = [torch.from_numpy(arrays[f"arr_{row}"]) for row in range(len(rows))]
    return LlamaOutput(logits, result["ids"], result["greedy"])


def _keep_weights_as_they_are(api: Any) -> None:
    """Have no weights packed anew for the CPU at hand: llama.cpp's kernels for AMX crash with weights of 8 bits
    (ggml-org/llama.cpp, issue 20824). `Llama` has no word for it."""
    usual = api.llama_model_default_params

    def plain() -> Any:
        params = usual()
        params.use_extra_bufts = False
        return params

    api.llama_model_default_params = plain


def _answer(folder: Path) -> None:
    """The child's side: read question.json, write logits.npz and answer.json."""
    question = json.loads((folder / "question.json").read_text(encoding="utf-8"))
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError):
        sys.exit(CANNOT_LOAD)
    _keep_weights_as_they_are(llama_cpp.llama_cpp)
    rows, prompt, longest = question["rows"], question["prompt"], question["longest"]
    context = max(*map(len, rows), len(prompt) + longest)
    engine: Any = llama_cpp.Llama(
        question["path"],
        n_ctx=context,
        n_batch=context,
        n_ubatch=context,
        n_threads=question["threads"],
        n_threads_batch=question["threads"],
        logits_all=True,
        verbose=False,
    )

    def last_logits(ids: Sequence[int]) -> np.ndarray[Any, Any]:
        engine.eval(ids)
        return np.asarray(engine.scores[engine.n_tokens - 1])

    logits = []
    for row in rows:
        engine.reset()
        engine.eval(row)
        logits.append(np.array(engine.scores[: len(row)], dtype=np.float32))
    np.savez(folder / "logits.npz", *logits)
    engine.reset()
    greedy: list[int] = []
    following = last_logits(prompt)
    while len(greedy) < longest and (index := int(following.argmax())) not in question["stop"]:
        greedy.append(index)
        if len(greedy) < longest:
            following = last_logits([index])
    ids = [engine.tokenize(text.encode(), add_bos=False, special=False) for text in question["texts"]]
    (folder / "answer.json").write_text(json.dumps({"ids": ids, "greedy": greedy}), encoding="utf-8")


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
