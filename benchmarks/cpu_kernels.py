"""Training steps on a CPU with kernels of our own (kernels/cpu/ops.py), with torch's operations instead, and compiled.

Run: python benchmarks/cpu_kernels.py --out results/cpu_kernels.json
Try: python benchmarks/cpu_kernels.py --tiny

Each measurement is a process of its own, as the switch is read once; the ways alternate. A step is what training does:
forward and backward passes over packed rows, clipping, AdamW. Printed and written: the median of the rounds' median
steps and their range, and how many times as fast as torch's operations each way is.

After every timed step the same process times the machine's matrix product as MFU does (plan/hardware.py: 1024 x 512 x
1024 in the compute dtype, the best of six tries). Divided by the model's FLOPs for a token, attention with the keys
really seen, that rate is a limit: the tokens a second of a step that is products alone, each as fast as this one. A
record has the rates (GFLOP/s), FLOPs per token, limit and share of it reached; the table the median rate of all
processes, the limit it implies, and each way's share. Older records lack them, and so do their tables.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# width, layers, heads, key heads, MLP; vocabulary; tokens of a row, rows of a pass, passes of a step
SHAPES: dict[str, tuple[tuple[int, ...], int, tuple[int, int, int]]] = {
    "26M": ((512, 8, 8, 2, 1408), 6400, (512, 4, 2)),
    "3.5M": ((256, 4, 4, 2, 704), 6400, (256, 4, 2)),
    "tiny": ((128, 4, 1, 1, 352), 1536, (256, 4, 1)),
}
WAYS = {"kernels": ("on", "off"), "torch": ("off", "off"), "compiled": ("on", "blocks")}  # the switch; compile


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = physical cores")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="with commas (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the smallest shape, one round: shows that everything runs")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write, after every round anew")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def measure(asked: argparse.Namespace) -> None:
    """One way of one shape, in this process; prints JSON."""
    name, dtype, way = asked.one.split(",")
    from penjing.train.load_model import set_threads

    set_threads(asked.threads, 1)
    import numpy as np
    import speed_gpu
    import torch

    from penjing.kernels.cpu import ops as cpu
    from penjing.plan import hardware
    from penjing.plan.flops import mean_keys, training_flops_per_token

    (width, layers, heads, groups, mlp), vocabulary, (row_tokens, rows, passes) = SHAPES[name]
    case = speed_gpu.Case(
        name=name,
        model=speed_gpu.shape(width, layers, heads, groups, mlp, vocabulary),
        row_tokens=row_tokens,
        rows=rows,
        passes=passes,
        optimizer="adamw",
        dtype=dtype,
        compile=WAYS[way][1],
    )
    ready = speed_gpu.prepare(case, argparse.Namespace(device="cpu"))
    seconds, products = [], []
    for number in range(asked.warmup + asked.steps):
        began = time.perf_counter()
        ready.step(number)
        seconds.append(time.perf_counter() - began)
        if number >= asked.warmup:
            products.append(hardware.cpu_product_rate(ready.dtype) / 1e9)
    flops = training_flops_per_token(ready.config, mean_keys(np.array(ready.lengths), row_tokens))
    limit = 1e9 * statistics.median(products) / flops
    found = {
        "seconds": seconds[asked.warmup :],
        "product_gigaflops_per_second": products,
        "flops_per_token": flops,
        "limit_tokens_per_second": limit,
        "share_of_limit": row_tokens * rows * passes / statistics.median(seconds[asked.warmup :]) / limit,
        "first_step_seconds": seconds[0],
        "tokens": row_tokens * rows * passes,
        "summed_loss": float(ready.total),
        "without_kernels": cpu.why_not(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": hardware.describe(ready.device, ready.dtype),
    }
    print(json.dumps(found))


def child(asked: argparse.Namespace, name: str, dtype: str, way: str) -> dict[str, Any]:
    words = ["--one", f"{name},{dtype},{way}", "--threads", str(asked.threads)]
    words += ["--steps", str(asked.steps), "--warmup", str(asked.warmup)]
    environment = {**os.environ, "PENJING_KERNELS": WAYS[way][0]}
    done = subprocess.run(
        [sys.executable, __file__, *words], env=environment, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise SystemExit(f"cpu_kernels: {name} {dtype} {way} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/speed.md. Records without product rates have neither a limit nor shares of it."""
    said = {"torch": "torch, ms", "kernels": "kernels, ms", "compiled": "compiled with them, ms"}
    named = [way for way in said if any(ways.get(way) for ways in result["cases"].values())]
    heads = [*(said[way] for way in named), "kernels are faster by"]
    every = [one for ways in result["cases"].values() for rounds in ways.values() for one in rounds]
    limited = all("product_gigaflops_per_second" in one for one in every)
    if limited:
        heads += ["product, GFLOP/s", "limit, tokens/s", *(f"{way}, share of it" for way in named)]
    lines = [f"| shape, dtype | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name, ways in result["cases"].items():
        steps = {way: [1e3 * statistics.median(one["seconds"]) for one in rounds] for way, rounds in ways.items()}
        cells = []
        for way in named:
            mine = steps.get(way, [])
            span = f" ({min(mine):,.0f}-{max(mine):,.0f})" if len(mine) > 1 else ""
            cells.append(f"{statistics.median(mine):,.0f}{span}" if mine else "")
        both = steps.get("torch") and steps.get("kernels")
        gain = f"{statistics.median(steps['torch']) / statistics.median(steps['kernels']):.2f} x" if both else ""
        cells.append(gain)
        if limited:
            ran = [one for rounds in ways.values() for one in rounds]
            product = statistics.median(rate for one in ran for rate in one["product_gigaflops_per_second"])
            limit = 1e9 * product / ran[0]["flops_per_token"]
            rates = [1e3 * ran[0]["tokens"] / statistics.median(steps[way]) if steps.get(way) else 0 for way in named]
            cells += [f"{product:,.0f}", f"{limit:,.0f}", *(f"{rate / limit:.0%}" if rate else "" for rate in rates)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    asked = parse()
    if asked.one:
        measure(asked)
        return
    names = ["tiny"] if asked.tiny else list(SHAPES)
    rounds = 1 if asked.tiny else asked.rounds
    result: dict[str, Any] = {"command": " ".join(["python benchmarks/cpu_kernels.py", *sys.argv[1:]]), "cases": {}}
    for name in names:
        for dtype in asked.dtypes.split(","):
            ways: dict[str, list[dict[str, Any]]] = {way: [] for way in asked.ways.split(",")}
            result["cases"][f"{name}, {dtype}"] = ways
            for number in range(rounds):
                for way in list(ways)[:: 1 if number % 2 == 0 else -1]:
                    if way == "compiled" and number:
                        continue  # once: it takes half a minute to compile
                    found = child(asked, name, dtype, way)
                    result |= {each: found.pop(each) for each in ("threads", "torch", "machine")}
                    ways[way].append(found)
                    rate = found["tokens"] / statistics.median(found["seconds"])
                    share = f"{found['share_of_limit']:.0%} of {found['limit_tokens_per_second']:,.0f}"
                    print(f"{name:5} {dtype:9} {way:9} {rate:9,.0f} tokens/s, {share}", flush=True)
                if asked.out:
                    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + markdown(result))


if __name__ == "__main__":
    main()
