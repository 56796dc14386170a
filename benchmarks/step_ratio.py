"""Time and memory of a step with LoRA beside the full step, or of mixtures of experts beside the dense step of the same
active size.

Run: python benchmarks/step_ratio.py lora --model 104m --out results/lora_step.json
     python benchmarks/step_ratio.py experts --rows 8 --passes 2 --warmup 20 --out results/moe_step.json

Each trial is a process of its own, all in turn, so that none inherits another's memory or a warmer machine. A step is
what training does: forward and backward passes, clipping, AdamW, a mixture's balance, over rows of random ids. The
dense model's MLP is F wide; of a mixture each token goes through k experts of F/k. Printed: medians and ranges over
the trials of each trial's median step and of the largest resident memory (of the device on CUDA), and both over the
first's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from compare.table import ResultTable, spread, with_range
from compare.trial_process import alternate
from steps.timer import time_steps
from training_step import Case, prepare, settings_of, step_arguments, timed

from penjing.base import config
from penjing.base.files import write_json
from penjing.model.config import ModelConfig
from penjing.plan.hardware import environment


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = step_arguments(__doc__, steps=6, warmup=2)
    parser.add_argument("what", choices=("lora", "experts"))
    parser.add_argument("--model", default="26m", help="a preset of `penjing show models` (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="rows of a forward pass (default: %(default)s)")
    parser.add_argument("--passes", type=int, default=1, help="of a step (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    parser.add_argument("--dora", action="store_true", help="DoRA instead of LoRA")
    parser.add_argument("--targets", default="*_proj", help="as lora.target_modules (default: %(default)s)")
    parser.add_argument("--experts", default="4:1,32:4", help="E:k of each mixture, with commas (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=5, help="processes of each (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="as compute.device (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="as compute.dtype")
    return parser.parse_args(words)


def cases(asked: argparse.Namespace) -> list[Case]:
    """The others are compared with the first."""
    model = asdict(config.resolve(ModelConfig, {"preset": asked.model}))
    step = {"seq_len": asked.seq_len, "rows": asked.rows, "passes": asked.passes, "optimizer": "adamw"}
    how = {"compile": "off", "dtype": asked.dtype, "device": asked.device}
    plain = Case(name="full" if asked.what == "lora" else "dense", model=model, **step, **how)
    if asked.what == "lora":
        lora = {"rank": asked.rank, "use_dora": asked.dora, "target_modules": asked.targets.split(",")}
        return [plain, replace(plain, name="dora" if asked.dora else "lora", lora=lora)]
    found = [plain]
    for experts, chosen in (map(int, word.split(":")) for word in asked.experts.split(",")):
        mixture = {"architecture": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": chosen}
        mixture["moe_intermediate_size"] = model["intermediate_size"] // chosen
        found.append(replace(plain, name=f"{experts} experts, {chosen} a token", model={**model, **mixture}))
    return found


def measure(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """In this process: build, take the steps, say what they took."""
    from penjing import devices
    from penjing.plan.flops import parameters
    from penjing.train.load_model import set_threads

    set_threads(asked.threads, 1)
    ready = prepare(case)
    seconds = time_steps(ready.step, ready.device, steps=asked.steps, warmup=asked.warmup)
    return {
        **environment(ready.device, ready.dtype),
        "step_seconds": seconds,
        "peak_bytes": devices.of(ready.device).peak_memory_bytes(ready.device),
        "parameters": sum(parameter.numel() for parameter in ready.model.parameters()),
        "active": parameters(ready.config).active,
        "trainable": sum(parameter.numel() for parameter in ready.model.parameters() if parameter.requires_grad),
    }


def markdown(result: dict[str, Any]) -> str:
    def figures(trials: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
        medians = [statistics.median(one["step_seconds"]) for one in trials]
        return spread(medians), spread([one["peak_bytes"] / 2**30 for one in trials])

    rows, first = [], figures(next(iter(result["trials"].values())))
    for name, trials in result["trials"].items():
        sizes = [f"{trials[0][size] / 1e6:.1f}" for size in ("parameters", "active", "trainable")]
        row = [name, *sizes]
        for one, other, form in zip(figures(trials), first, ("{:.3f}", "{:.2f}"), strict=True):
            row += [with_range(one, form.format), f"{one['median'] / other['median']:.2f} x"]
        rows.append(row)
    headings = ["", "parameters, M", "active, M", "trainable, M", "step, s", "ratio", "peak memory, GiB", "ratio"]
    return ResultTable(headings, rows).markdown()


def main() -> None:
    asked = parse()
    if asked.one:
        print(json.dumps(measure(asked.one, asked)))
        return
    chosen = cases(asked)
    result: dict[str, Any] = {"settings": settings_of(asked), "trials": {case.name: [] for case in chosen}}
    for number in range(asked.trials):
        for case in alternate(chosen, number):
            one = timed(case, result)
            result["trials"][case.name].append(one)
            seconds = statistics.median(one["step_seconds"])
            print(f"trial {number + 1} {case.name}: {seconds:.3f} s, {one['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    print(markdown(result))
    if asked.out:
        write_json(asked.out, result)


if __name__ == "__main__":
    main()
