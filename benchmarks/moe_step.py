"""Time of a mixture-of-experts step beside the dense step of the same active size, on one machine.

Run: python benchmarks/moe_step.py --out results/moe_step.json

The models stand in one process and take steps in turn, so that whatever slows the machine slows all of them. A step is
what training does: forward and backward passes, clipping, AdamW, the routers' balance, over rows of random ids. The
dense model's MLP is F wide; of the mixtures each token goes through k experts of F/k. Printed and written: median and
range of each, and the median over the rounds of each mixture's time over the dense one's.
"""

from __future__ import annotations

import argparse
from typing import Any

import training_step
from training_step import Case, Ready, prepare, shape

from penjing.base.files import write_json
from penjing.bench.record import facts
from penjing.bench.table import ResultTable, spread, with_range
from penjing.bench.timer import time_steps
from penjing.bench.trial_process import in_turn


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = training_step.arguments(__doc__)
    parser.add_argument("--width", type=int, default=512, help="of the residual stream (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--mlp", type=int, default=1408, help="F, the dense MLP's inner width (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step (default: %(default)s)")
    parser.add_argument("--micro-rows", type=int, default=8, help="rows of a forward pass (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each model (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=20, help="steps before: each GEMM shape is compiled once")
    parser.add_argument("--experts", default="4:1,32:4", help="E:k of each mixture, with commas (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="as compute.device (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="as compute.dtype")
    return parser.parse_args(words)


def case(asked: argparse.Namespace, experts: int, chosen: int) -> Case:
    heads = asked.width // 64
    model = shape(asked.width, asked.layers, heads, max(1, heads // 4), asked.mlp, 6400)
    if experts:
        model |= {"architecture": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": chosen}
        model["moe_intermediate_size"] = asked.mlp // chosen
    name = f"{experts} experts, {chosen} a token" if experts else "dense"
    passes = max(1, asked.rows // asked.micro_size)
    step = {"seq_len": asked.seq_len, "rows": asked.micro_size, "passes": passes}
    how = {"optimizer": "adamw", "compile": "off", "dtype": asked.dtype, "device": asked.device}
    return Case(name=name, model=model, **step, **how)


def main() -> None:
    asked = parse()
    from penjing.plan.flops import parameters
    from penjing.train.load_model import set_threads

    set_threads(asked.threads, 1)
    mixtures = [tuple(map(int, word.split(":"))) for word in asked.experts.split(",")]
    cases = [case(asked, experts, chosen) for experts, chosen in [(0, 0), *mixtures]]
    ready: dict[str, Ready] = {each.name: prepare(each) for each in cases}
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(asked.rounds + asked.warmup):
        for name in in_turn(list(ready), number):
            one = ready[name]
            taken = time_steps(lambda _, one=one, number=number: one.step(number), one.device, steps=1)
            seconds[name] += taken if number >= asked.warmup else []
    device, dtype = ready["dense"].device, ready["dense"].dtype
    settings = {name: value for name, value in vars(asked).items() if name != "out"}
    result: dict[str, Any] = {**facts(device, dtype), "settings": settings, "models": {}}
    for name, mine in seconds.items():
        counted = parameters(ready[name].config)
        result["models"][name] = {
            "parameters": counted.total,
            "active": counted.active,
            "step_seconds": spread(mine),
            "ratio": spread([own / other for own, other in zip(mine, seconds["dense"], strict=True)]),
        }
    print(markdown(result))
    if asked.out:
        write_json(asked.out, result)


def markdown(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            *(f"{one[figure] / 1e6:.1f}" for figure in ("parameters", "active")),
            with_range(one["step_seconds"], "{:.3f}".format),
            with_range(one["ratio"], "{:.2f} x".format),
        ]
        for name, one in result["models"].items()
    ]
    return ResultTable(["", "parameters, M", "active, M", "step, s", "of the dense step"], rows).markdown()


if __name__ == "__main__":
    main()
