"""llama.cpp through its C API: `python -m compare.baselines.llama_cpp SPEC.json f16|q8_0`.

Sequences of a batch are decoded together, as in llama.cpp's server; all prompts are prefilled in one call.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np

from compare.decode_measure import Decoder, OnTokens, finish
from compare.trial_spec import DecodeSpec, read_spec
from penjing.base.process_info import peak_resident_bytes

MICRO_BATCH = 512  # tokens of one pass, its default


@api.llama_log_callback  # type: ignore[misc]  # untyped
def _silent(level: int, text: bytes, data: Any) -> None:
    pass


class LlamaCpp(Decoder):
    def __init__(self, path: str, threads: int) -> None:
        api.llama_log_set(_silent, ctypes.c_void_p())
        params = api.llama_model_default_params()
        # Its AMX kernels crash with 8-bit weights (ggml-org/llama.cpp, issue 20824).
        params.use_extra_bufts = "amx_int8" not in Path("/proc/cpuinfo").read_text()
        self.model = api.llama_model_load_from_file(path.encode(), params)
        assert self.model, f"llama.cpp cannot load {path}"
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.threads = threads
        self.context: Any = None
        self.batch: Any = None
        self.options = [
            f"weights in {Path(path).stem.rpartition('-')[2]}",
            "keys and values in f16",
            "flash attention: auto",
        ]

    def open(self, sequences: int, tokens: int) -> None:
        self.close()
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * tokens, sequences
        params.n_batch, params.n_ubatch = sequences * tokens, MICRO_BATCH
        params.n_threads = params.n_threads_batch = self.threads
        self.context = api.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp is out of memory"
        self.batch = api.llama_batch_init(sequences * tokens, 0, 1)

    def write(self, prompts: Sequence[Sequence[int]], new_tokens: int, on_tokens: OnTokens) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        last = self._pass([(ids, 0) for ids in prompts])
        lengths, sequences = [len(ids) for ids in prompts], range(len(prompts))
        for number in range(new_tokens):
            if on_tokens(sequences) or number + 1 == new_tokens:
                return
            last = self._pass([([id], length + number) for id, length in zip(last, lengths, strict=True)])

    def _pass(self, parts: Sequence[tuple[Sequence[int], int]]) -> list[int]:
        """Process tokens of each sequence, starting at a position; returns the most likely next token of each."""
        batch, row, ends = self.batch, 0, []
        for sequence, (ids, position) in enumerate(parts):
            for number, id in enumerate(ids):
                batch.token[row], batch.pos[row] = id, position + number
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                batch.logits[row] = number + 1 == len(ids)
                row += 1
            ends.append(row - 1)
        batch.n_tokens = row
        failed = api.llama_decode(self.context, batch)
        assert not failed, f"llama_decode: {failed}"
        return [self._likeliest(row) for row in ends]

    def _likeliest(self, row: int) -> int:
        logits = api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def close(self) -> None:
        if self.context is not None:
            api.llama_batch_free(self.batch)
            api.llama_free(self.context)
            self.context = None


def main() -> None:
    imported = peak_resident_bytes()
    spec = read_spec(DecodeSpec)
    finish(spec, LlamaCpp(f"{spec.models}/{spec.setting}-{sys.argv[2]}.gguf", spec.threads), imported)


if __name__ == "__main__":
    main()
