"""Speed of decoding on one GPU: penjing with CUDA graphs and without, beside `transformers`.

Run: python benchmarks/gpu_decode.py --out results/gpu_decode.json
Try: python benchmarks/gpu_decode.py --device cpu --tiny

The same random weights in bfloat16 for all; greedy; prompts of 128 tokens, 256 new ones. Each contestant is a process
of its own, and they take turns. Measured as in `decode.py`: the time to the first token, and tokens per second while
all sequences decode.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compare.decode import FROM_IDS, DecodeSizes, model_shape, write_model
from compare.decode_measure import measure
from compare.penjing_decode import PenjingEngine
from compare.table import ResultTable, joined, spread, with_range
from compare.trial_process import run_json
from compare.trial_spec import DecodeSpec
from training_step import arguments, settings_of

from penjing import devices
from penjing.base.errors import UserError
from penjing.base.files import write_json
from penjing.base.process_info import peak_resident_bytes
from penjing.infer.engine import Engine
from penjing.infer.torch_forward import TorchForward

ENGINES = ("penjing", "penjing-eager", "transformers", "transformers-compiled")
FULL = DecodeSizes(first_token=(16, 512, 2048), batches=(1, 16, 64, 256))
TINY = DecodeSizes(first_token=(16,), new_tokens=16, prompt_tokens=16, batches=(1, 4), seconds=0.2)


class EagerEngine(PenjingEngine):
    def open(self, sequences: int, tokens: int) -> None:
        forward = TorchForward(self.model, num_slots=sequences, max_tokens=tokens, graphs=False)
        self.engine = Engine(forward, prefill_chunk=devices.of(forward.device).prefill_chunk)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--models", default="26m,104m", help="presets with commas (default: %(default)s)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="with commas (default: all)")
    parser.add_argument("--trials", type=int, default=3, help="processes of each (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="as compute.device (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=240, help="after which a trial is given up")
    parser.add_argument("--tiny", action="store_true", help="one small model: shows that everything runs")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def trial(engine: str, spec: DecodeSpec) -> dict[str, Any]:
    """What the process of one contestant measures."""
    import torch

    from penjing.plan.hardware import environment

    imported, folder = peak_resident_bytes(), Path(spec.models) / spec.setting
    torch.set_num_threads(spec.threads)
    decoder: Any
    if engine.startswith("transformers"):
        from compare.baselines.hf_generate import Generate

        decoder = Generate(str(folder), spec.dtype, compiled=engine.endswith("compiled"), device=spec.device)
    else:
        decoder = {"penjing": PenjingEngine, "penjing-eager": EagerEngine}[engine](folder, spec.dtype, spec.device)
    figures = measure(spec, decoder, imported)["figures"][1]
    memory = torch.cuda.max_memory_allocated() if spec.device == "cuda" else 0
    return {**environment(torch.device(spec.device), torch.bfloat16), "figures": figures, "device_bytes": memory}


def table(result: dict[str, Any], model: str) -> ResultTable:
    """A row per figure, a column per engine."""
    trials: dict[str, list[dict[str, Any]]] = result["models"][model]
    engines = [engine for engine in trials if any("figures" in each for each in trials[engine])]
    names = dict.fromkeys(name for engine in engines for each in trials[engine] for name in each.get("figures", {}))
    rows = []
    for name in names:
        kind, _, size = name.rpartition("_")
        label = {"rate": f"batch {size}, tokens/s", "read": f"{size} prompts read, ms"}.get(
            kind, f"first token after {size}, ms"
        )
        row = [label]
        for engine in engines:
            found = [each["figures"][name] for each in trials[engine] if name in each.get("figures", {})]
            scale = 1 if kind == "rate" else 1000
            digits = ",.0f" if kind == "rate" else ".1f"
            row.append(
                with_range(spread([scale * one for one in found]), lambda one, d=digits: format(one, d))
                if found
                else "-"
            )
        rows.append(row)
    return ResultTable(["", *engines], rows, f"{model}, median (range)")


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/speed.md."""
    return joined({model: table(result, model) for model in result["models"]}).markdown()


def main() -> None:
    asked = parse()
    sizes = TINY if asked.tiny else FULL
    if asked.one:
        values = json.loads(asked.one)
        engine = values.pop("engine")
        spec = DecodeSpec(**{key: tuple(one) if isinstance(one, list) else one for key, one in values.items()})
        print(json.dumps(trial(engine, spec)))
        return
    result: dict[str, Any] = {"settings": settings_of(asked), "sizes": asdict(sizes), "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        for model in ["tiny"] if asked.tiny else asked.models.split(","):
            write_model(Path(folder) / model, model_shape(model, sizes), with_gguf=False)
            trials = result["models"][model] = {engine: [] for engine in asked.engines.split(",")}
            for _ in range(asked.trials):
                for engine, found in trials.items():
                    spec = DecodeSpec(
                        setting=model, out="", threads=asked.threads or 2, steps=2, warmup=1, seconds=sizes.seconds,
                        models=folder, ids=FROM_IDS, first_token=sizes.first_token, new_tokens=sizes.new_tokens,
                        prompt_tokens=sizes.prompt_tokens, batches=sizes.batches, device=asked.device, dtype="bfloat16",
                    )  # fmt: skip
                    order = json.dumps({"engine": engine, **asdict(spec)})
                    try:
                        one = run_json([sys.executable, *sys.argv, "--one", order], where=engine, timeout=asked.seconds)
                        result |= {key: one.pop(key) for key in ("date", "machine", "versions")}
                        found.append(one)
                    except UserError as error:
                        found.append({"failed": str(error)})
                    if asked.out:
                        write_json(asked.out, result)
    print(markdown(result))


if __name__ == "__main__":
    main()
