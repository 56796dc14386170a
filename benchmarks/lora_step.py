"""Time and memory of a LoRA step beside the full step, at one shape on one machine.

Run: python benchmarks/lora_step.py --model 104m --rows 1 --row-tokens 512 --out results/lora_step.json

Each trial is a process of its own, full and LoRA in turn, so that neither inherits the other's memory or a warmer
machine. A step is what training does: forward pass, backward pass, clipping, AdamW, over rows of random ids. Printed
and written: median and range over the trials of each trial's median step, the largest resident memory of the process
(of the device on CUDA), and the two ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from typing import Any

import training_step
from training_step import Case, prepare

from penjing.base import config
from penjing.base.files import write_json
from penjing.base.process_info import peak_resident_bytes
from penjing.bench.record import facts
from penjing.bench.table import ResultTable, spread, with_range
from penjing.bench.timer import time_steps
from penjing.bench.trial_process import in_turn, run_json
from penjing.model.config import ModelConfig

KINDS = ("full", "lora")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = training_step.arguments(__doc__)
    parser.add_argument("--model", default="104m", help="a preset of `penjing show models` (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="rows of one step (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, default=512, help="tokens of one row (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    parser.add_argument("--kind", choices=("lora", "dora"), default="lora", help="(default: %(default)s)")
    parser.add_argument(
        "--targets", default="*_proj", help="layers, as lora.target_modules takes them (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, default=5, help="processes of each kind, alternating (default: 5)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of one trial (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="as compute.device (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="as compute.dtype")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def measure(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """One process: build, take the steps, say what they took."""
    import torch

    from penjing.train.load_model import set_threads

    set_threads(asked.threads, 1)
    imported = peak_resident_bytes()
    ready = prepare(case)
    seconds = time_steps(ready.step, ready.device, steps=asked.steps, warmup=asked.warmup)
    on_device = torch.cuda.max_memory_allocated(ready.device) if ready.device.type == "cuda" else 0
    return {
        **facts(ready.device, ready.dtype),
        "step_seconds": seconds,
        "peak_bytes": on_device or peak_resident_bytes(),
        "peak_bytes_after_imports": 0 if on_device else imported,
        "parameters": sum(parameter.numel() for parameter in ready.model.parameters()),
        "trainable": sum(parameter.numel() for parameter in ready.model.parameters() if parameter.requires_grad),
    }


def main() -> None:
    asked = parse()
    if asked.one:
        print(json.dumps(measure(Case(**json.loads(asked.one)), asked)))
        return
    settings = {name: value for name, value in vars(asked).items() if name not in ("out", "one")}
    result: dict[str, Any] = {"settings": settings, "trials": {kind: [] for kind in KINDS}}
    lora = {"rank": asked.rank, "kind": asked.kind, "targets": tuple(asked.targets.split(","))}
    model = asdict(config.resolve(ModelConfig, {"preset": asked.model}))
    step = {"seq_len": asked.seq_len, "rows": asked.rows, "optimizer": "adamw", "compile": "off"}
    words = ["--threads", asked.threads, "--steps", asked.steps, "--warmup", asked.warmup]
    for number in range(asked.trials):
        for kind in in_turn(KINDS, number):
            how = {"lora": lora if kind == "lora" else None, "dtype": asked.dtype, "device": asked.device}
            case = Case(name=kind, model=model, **step, **how)
            one = run_json(training_step.command(__file__, case, *words), where=kind)
            result |= {key: one.pop(key) for key in ("date", "machine", "versions")}
            result["trials"][kind].append(one)
            seconds = statistics.median(one["step_seconds"])
            print(f"trial {number + 1} {kind}: {seconds:.3f} s, {one['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    for kind, trials in result["trials"].items():
        result[kind] = {
            **{name: trials[0][name] for name in ("parameters", "trainable")},
            "step_seconds": spread([statistics.median(one["step_seconds"]) for one in trials]),
            "peak_bytes": spread([float(one["peak_bytes"]) for one in trials]),
        }
    print(markdown(result))
    if asked.out:
        write_json(asked.out, result)


def markdown(result: dict[str, Any]) -> str:
    """Full beside LoRA, and the ratio."""
    rows = []
    for label, figure, show in (
        ("step, s", "step_seconds", "{:.3f}".format),
        ("peak memory, GiB", "peak_bytes", lambda value: f"{value / 2**30:.2f}"),
    ):
        full, lora = (result[kind][figure] for kind in KINDS)
        rows.append([label, with_range(full, show), with_range(lora, show), f"{lora['median'] / full['median']:.2f} x"])
    return ResultTable(["", *KINDS, "ratio"], rows).markdown()


if __name__ == "__main__":
    main()
