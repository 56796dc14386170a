"""A trial of penjing's engine: `python -m compare.penjing_decode SPEC.json bfloat16|float32|int8`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from compare.decode_measure import Decoder, OnTokens, finish
from compare.trial_spec import DecodeSpec, read_spec
from penjing.base.process_info import peak_resident_bytes
from penjing.infer.forward import Weights
from penjing.infer.generate import make_engine
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling
from penjing.train.load_model import load_trained, set_threads, use_device


class PenjingEngine(Decoder):
    def __init__(self, folder: Path, kind: str, device: str) -> None:
        self.model = load_trained(folder).model
        self.weights: Weights = "int8" if kind == "int8" else "auto"
        use_device(self.model, device, "float32" if kind == "int8" else kind)
        self.options = [kind]

    def open(self, sequences: int, tokens: int) -> None:
        self.engine = make_engine(self.model, slots=sequences, max_tokens=tokens, weights=self.weights)
        self.options = [self.options[0], type(self.engine.forward).__name__]

    def write(self, prompts: Sequence[Sequence[int]], new_tokens: int, on_tokens: OnTokens) -> None:
        indices = {
            self.engine.submit(Request(prompt=prompt, max_new_tokens=new_tokens, sampling=Sampling())): index
            for index, prompt in enumerate(prompts)
        }
        done = False
        while not self.engine.idle and not done:
            done = on_tokens([indices[event.request_id] for event in self.engine.step() if event.token is not None])
        for request_id in indices:
            self.engine.cancel(request_id)


def main() -> None:
    imported = peak_resident_bytes()
    spec = read_spec(DecodeSpec)
    set_threads(spec.threads, 1)
    finish(spec, PenjingEngine(Path(spec.models) / spec.setting, sys.argv[2], spec.device), imported)


if __name__ == "__main__":
    main()
