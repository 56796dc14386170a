"""Sizes of exports of one model with random weights, and the seconds that each takes, its check included.

Run: python benchmarks/export.py --out results/export.json
Try: python benchmarks/export.py --model tiny

The check of GGUF asks llama.cpp where llama-cpp-python is installed; the record says whether it was. ONNX needs
onnxruntime. Each export is a single run, one after the other in this process, on `--threads` threads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from compare.table import ResultTable
from training_step import arguments

from penjing.base.files import write_json
from penjing.plan.hardware import environment

WAYS = ("HF f32", "GGUF f16", "GGUF q8_0", "GGUF q4_0", "ONNX f32", "ONNX int8")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="64m", help="a preset of `penjing show models` (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas (default: %(default)s)")
    parser.set_defaults(threads=1)
    return parser.parse_args(words)


def build(preset: str, folder: Path) -> tuple[Any, Any]:
    """A model of the preset's shape with random weights, and a tokenizer trained on toy text."""
    from penjing.base import config
    from penjing.data import synthetic as toyworld
    from penjing.data.tokenizer.train import train_tokenizer
    from penjing.model.config import ModelConfig
    from penjing.model.init import initialise
    from penjing.model.transformer import Transformer

    shape = config.resolve(ModelConfig, {"preset": preset})
    toyworld.write(folder, seed=3, documents=2000, conversations=1, preferences=1, prompts=1, questions_per_kind=1)
    texts = [json.loads(line)["text"] for line in (folder / "pretrain.jsonl").read_text(encoding="utf-8").splitlines()]
    model = Transformer(shape)
    initialise(model, 1)
    return model.eval(), train_tokenizer(iter(texts), shape.vocab_size)


def written(way: str, model: Any, tokenizer: Any, folder: Path) -> Path:
    """Export one way; the file or folder it made."""
    from penjing.export import gguf, hf, onnx

    door, _, kind = way.partition(" ")
    place = folder / way.replace(" ", "-").lower()
    if door == "HF":
        hf.export(model, tokenizer, place, card="")
    elif door == "GGUF":
        place = place.with_suffix(".gguf")
        gguf.export(model, tokenizer, place, kind=kind)
    else:
        onnx.export(model, tokenizer, place, kind=kind)
    return place


def size_of(place: Path) -> int:
    return sum(file.stat().st_size for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file())


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/export.md."""
    rows = [[it, f"{one['bytes'] / 1e6:.1f}", f"{one['seconds']:.1f}"] for it, one in result["exports"].items()]
    return ResultTable(["what", "MB", "seconds"], rows).markdown()


def main() -> None:
    asked = parse()
    import torch

    torch.set_num_threads(asked.threads)
    exports: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        model, tokenizer = build(asked.model, Path(place))
        for way in asked.ways.split(","):
            began = time.perf_counter()
            made = written(way, model, tokenizer, Path(place))
            exports[way] = {"seconds": time.perf_counter() - began, "bytes": size_of(made)}
            print(f"{way}: {exports[way]['bytes'] / 1e6:.1f} MB, {exports[way]['seconds']:.1f} s", flush=True)
    result = {
        "model": asked.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **environment(torch.device("cpu"), torch.float32),
        "load_average": os.getloadavg()[0],
        "llama_cpp": importlib.util.find_spec("llama_cpp") is not None,
        "exports": exports,
    }
    if asked.out:
        write_json(asked.out, result)
    print(markdown(result))


if __name__ == "__main__":
    main()
