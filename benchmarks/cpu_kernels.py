"""Training steps on a CPU with kernels of our own (kernels/cpu/ops.py), with torch's operations instead, and compiled.

Run: python benchmarks/cpu_kernels.py --out results/cpu_kernels.json
Try: python benchmarks/cpu_kernels.py --tiny

Each measurement is a process of its own, as the switch is read once; the ways alternate. A step is what training does:
forward and backward passes over packed rows, clipping, AdamW. Printed and written: the median of the rounds' median
steps and their range, and how many times as fast as torch's operations each way is.

After every timed step the same process times a matmul as MFU does (plan/hardware.py: 1024 x 512 x
1024 in the compute dtype, the best of six tries). Divided by the model's FLOPs for a token, attention with the keys
really seen, that rate is the GEMM roofline: the tokens a second of a step that is matmuls alone, each as fast as this
one. A record has the rates (GFLOP/s), FLOPs per token, limit and fraction of it; the table the median rate of all
processes, the limit it implies, and each way's fraction. Older records lack them, and so do their tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from typing import Any

from compare.run import write
from compare.table import ResultTable, spread, with_range
from compare.trial_process import alternate
from steps.timer import time_steps
from training_step import Case, prepare, shape, step_arguments, timed

from penjing.plan.hardware import environment

SHAPES: dict[str, Case] = {
    "26M": Case(name="26M", model=shape(512, 8, 8, 2, 1408, 6400), seq_len=512, rows=4, passes=2),
    "3.5M": Case(name="3.5M", model=shape(256, 4, 4, 2, 704, 6400), seq_len=256, rows=4, passes=2),
    "tiny": Case(name="tiny", model=shape(128, 4, 1, 1, 352, 1536), seq_len=256, rows=4),
}
WAYS = {"kernels": ("on", "off"), "torch": ("off", "off"), "compiled": ("on", "blocks")}  # the switch; compile
LABELS = {"torch": "torch, ms", "kernels": "kernels, ms", "compiled": "compiled with them, ms"}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = step_arguments(__doc__, steps=12, warmup=5)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way (default: %(default)s)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="with commas (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the smallest shape, one round: shows that everything runs")
    return parser.parse_args(words)


def measure(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """One way of one shape, in this process."""
    from penjing.train.load_model import set_threads

    set_threads(asked.threads, 1)
    import numpy as np

    from penjing.kernels.cpu import library
    from penjing.plan import hardware
    from penjing.plan.flops import mean_keys, training_flops_per_token

    ready = prepare(case)
    first = time_steps(ready.step, ready.device, steps=asked.warmup)[0]
    seconds, rates = [], []
    for number in range(asked.steps):
        seconds += time_steps(lambda _, place=number: ready.step(asked.warmup + place), ready.device, steps=1)
        rates.append(hardware.cpu_matmul_rate(ready.dtype) / 1e9)
    flops = training_flops_per_token(ready.config, mean_keys(np.array(ready.lengths), case.seq_len))
    limit = 1e9 * statistics.median(rates) / flops
    return {
        **environment(ready.device, ready.dtype),
        "seconds": seconds,
        "matmul_gigaflops_per_second": rates,
        "flops_per_token": flops,
        "limit_tokens_per_second": limit,
        "share_of_limit": case.tokens / statistics.median(seconds) / limit,
        "first_step_seconds": first,
        "tokens": case.tokens,
        "summed_loss": float(ready.total),
        "without_kernels": library.unavailable_reason(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/speed.md. Records without matmul rates have neither a limit nor fractions of it."""
    named = [way for way in LABELS if any(ways.get(way) for ways in result["cases"].values())]
    heads = ["shape, dtype", *(LABELS[way] for way in named), "kernels are faster by"]
    every = [one for ways in result["cases"].values() for rounds in ways.values() for one in rounds]
    limited = all("matmul_gigaflops_per_second" in one for one in every)
    if limited:
        heads += ["matmul, GFLOP/s", "GEMM roofline, tokens/s", *(f"{way}, fraction of it" for way in named)]
    rows = []
    for name, ways in result["cases"].items():
        steps = {
            way: spread([1e3 * statistics.median(one["seconds"]) for one in rounds])
            for way, rounds in ways.items()
            if rounds
        }
        cells = [with_range(steps[way], lambda value: f"{value:,.0f}") if way in steps else "" for way in named]
        both = {"torch", "kernels"} <= steps.keys()
        cells.append(f"{steps['torch']['median'] / steps['kernels']['median']:.2f} x" if both else "")
        if limited:
            ran = [one for rounds in ways.values() for one in rounds]
            matmul = statistics.median(rate for one in ran for rate in one["matmul_gigaflops_per_second"])
            limit = 1e9 * matmul / ran[0]["flops_per_token"]
            cells += [f"{matmul:,.0f}", f"{limit:,.0f}"]
            rates = {way: 1e3 * ran[0]["tokens"] / one["median"] for way, one in steps.items()}
            cells += [f"{rates[way] / limit:.0%}" if way in rates else "" for way in named]
        rows.append([name, *cells])
    return ResultTable(heads, rows).markdown()


def main() -> None:
    asked = parse()
    if asked.one:
        print(json.dumps(measure(asked.one, asked)))
        return
    result: dict[str, Any] = {"cases": {}}
    for name in ["tiny"] if asked.tiny else SHAPES:
        for dtype in asked.dtypes.split(","):
            ways: dict[str, list[dict[str, Any]]] = {way: [] for way in asked.ways.split(",")}
            result["cases"][f"{name}, {dtype}"] = ways
            for number in range(1 if asked.tiny else asked.rounds):
                for way in alternate(list(ways), number):
                    if way == "compiled" and number:
                        continue  # once: it takes half a minute to compile
                    kernels, how = WAYS[way]
                    case = replace(SHAPES[name], name=f"{name} {dtype} {way}", dtype=dtype, compile=how)
                    case = replace(case, optimizer="adamw", device="cpu")
                    found = timed(case, result, environment={"PENJING_KERNELS": kernels}, timeout=900)
                    ways[way].append(found)
                    rate = found["tokens"] / statistics.median(found["seconds"])
                    share = f"{found['share_of_limit']:.0%} of {found['limit_tokens_per_second']:,.0f}"
                    print(f"{name:5} {dtype:9} {way:9} {rate:9,.0f} tokens/s, {share}", flush=True)
                if asked.out:
                    write(result, asked.out, ["python", "benchmarks/cpu_kernels.py", *sys.argv[1:]])
    print("\n" + markdown(result))


if __name__ == "__main__":
    main()
