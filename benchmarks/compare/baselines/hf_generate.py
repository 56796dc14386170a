"""`transformers`' generate: `python -m compare.baselines.hf_generate SPEC.json bfloat16|float32 [compiled]`.

compiled: static cache and compiled one-token forward pass, for batch 1 only, because compiling takes long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from compare.decode_measure import Decoder, OnTokens, finish
from compare.trial_spec import DecodeSpec, read_spec
from penjing.base.process_info import peak_resident_bytes

COMPILED_BATCHES = (1,)


class TokenCallback(transformers.StoppingCriteria):  # type: ignore[misc]  # untyped
    """Called after each token."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self.on_tokens = on_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **generate_options: Any) -> torch.Tensor:
        rows = len(input_ids)
        return torch.full((rows,), self.on_tokens(range(rows)), device=input_ids.device)


class Generate(Decoder):
    def __init__(self, folder: str, dtype: str, *, compiled: bool, device: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
        self.model.eval()
        self.model.generation_config.eos_token_id = None
        self.device = device
        self.generate_options: dict[str, Any] = {}
        self.options = [dtype, f"attention {self.model.config._attn_implementation}"]
        if compiled:
            self.batches = COMPILED_BATCHES
            config = transformers.CompileConfig(mode="default")
            config._compile_all_devices = True  # else it compiles on GPUs only
            self.generate_options = {"cache_implementation": "static", "compile_config": config}
            self.options = [*self.options, "static cache", "torch.compile"]

    @torch.no_grad()
    def write(self, prompts: Sequence[Sequence[int]], new_tokens: int, on_tokens: OnTokens) -> None:
        ids_BT = torch.tensor(prompts, device=self.device)
        self.model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[TokenCallback(on_tokens)],
            **self.generate_options,
        )


def main() -> None:
    spec = read_spec(DecodeSpec)
    # Compiling takes most of a minute and is not measured: share the cache between all trials.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{spec.models}/compiled-{spec.setting}"
    torch.set_num_threads(spec.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    imported = peak_resident_bytes()
    folder = f"{spec.models}/{spec.setting}"
    finish(spec, Generate(folder, sys.argv[2], compiled="compiled" in sys.argv[3:], device=spec.device), imported)


if __name__ == "__main__":
    main()
