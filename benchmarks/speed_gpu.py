"""Speed of training steps on one GPU: shapes from 26M to 1B, mixtures beside dense, LoRA beside full tuning.

Run: python benchmarks/speed_gpu.py --out results/speed_gpu.json
Try: python benchmarks/speed_gpu.py --device cpu --tiny

Each case is a process of its own, so that none inherits another's memory or compiled code. Rows are full: documents of
mixed lengths packed end to end, no padding, so every position counts. A step is what training does: forward and
backward passes, clipping, optimizer, metrics left on the device. Printed and written: tokens a second (median and range
over steps, timed in lots between two waits for the device), MFU of both conventions, peak memory, compile seconds, and
which kernels ran.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Any

from compare.table import ResultTable, spread, with_range
from steps.timer import time_steps
from training_step import Case, prepare, settings_of, shape, step_arguments, timed

from penjing.base.errors import UserError
from penjing.base.files import write_json
from penjing.plan.hardware import environment


def cases() -> list[Case]:
    """131,072 tokens a step where memory allows; the 124M shape at 524,288 as others train it."""
    m26, m64 = shape(512, 8, 8, 2, 1408, 6400), shape(768, 8, 8, 4, 2432, 6400)
    m104 = shape(768, 16, 8, 2, 2048, 6400)
    m124 = {**shape(768, 12, 6, 6, 2048, 50304), "tie_word_embeddings": True}
    found = [
        Case(name="26M", model=m26, seq_len=1024, rows=128, goal_tokens_per_second=2.0e6),
        Case(name="64M", model=m64, seq_len=1024, rows=128, goal_tokens_per_second=1.0e6),
        Case(name="104M", model=m104, seq_len=1024, rows=128, goal_tokens_per_second=6e5),
        Case(name="124M GPT-2", model=m124, seq_len=1024, rows=64, passes=8, goal_tokens_per_second=5.6e5),
        Case(name="317M", model=shape(1024, 24, 8, 4, 2816, 32768), seq_len=2048, rows=32, passes=2,
             goal_tokens_per_second=2.08e5),
        Case(name="1B", model=shape(2048, 18, 16, 8, 6144, 32768), seq_len=2048, rows=16, passes=4,
             goal_tokens_per_second=8.2e4),
    ]  # fmt: skip
    for how in ("off", "graphs"):
        found.append(Case(name=f"26M compile={how}", model=m26, seq_len=1024, rows=128, compile=how))
    found.append(Case(name="26M graphs 8 rows", model=m26, seq_len=1024, rows=8, compile="graphs"))
    found.append(Case(name="26M blocks 8 rows", model=m26, seq_len=1024, rows=8))
    found.append(Case(name="64M adamw", model=m64, seq_len=1024, rows=128, optimizer="adamw"))
    found.append(Case(name="64M float16", model=m64, seq_len=1024, rows=128, dtype="float16"))
    found.append(Case(name="1B recomputed", model=shape(2048, 18, 16, 8, 6144, 32768), seq_len=2048, rows=16,
                      passes=4, recompute="block"))  # fmt: skip
    half = {"seq_len": 1024, "rows": 64, "passes": 2}
    for how, said in (("blocks", ""), ("off", " eager")):
        for experts, chosen in ((4, 1), (32, 4)):
            mixture = {**m64, "architecture": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": chosen}
            mixture["moe_intermediate_size"] = 2432 // chosen
            name = f"64M active {chosen} of {experts} experts{said}"
            found.append(Case(name=name, model=mixture, compile=how, **half))
        found.append(Case(name=f"64M dense{said}", model=m64, compile=how, **half))
    found.append(Case(name="1B on 24 GB", model=found[5].model, seq_len=2048, rows=4, passes=16, optimizer="adamw",
                      state="int8", recompute="block"))  # fmt: skip
    found.append(Case(name="317M LoRA rank 16", model=found[4].model, seq_len=2048, rows=32, optimizer="adamw",
                      lora={"rank": 16}, compile="off"))  # fmt: skip
    found.append(Case(name="317M full eager", model=found[4].model, seq_len=2048, rows=32, optimizer="adamw",
                      compile="off"))  # fmt: skip
    return found


def tiny(case: Case) -> Case:
    """The same case as small as can be, to see that it runs."""
    small = {**case.model, **shape(32, 2, 2, 1, 64, 256)}
    if "num_experts" in small:
        small["moe_intermediate_size"] = 32
    how = "off" if case.compile == "graphs" or "num_experts" in small else case.compile  # on a CPU experts are eager
    lora = {"rank": 4} if case.lora else None
    return replace(case, model=small, seq_len=64, rows=2, passes=min(2, case.passes), lora=lora, compile=how)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = step_arguments(__doc__, steps=20, warmup=5)
    parser.add_argument("--cases", default="", help="names with commas; empty: all")
    parser.add_argument("--device", default="cuda", help="as compute.device (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="smallest shapes: shows that everything runs")
    parser.add_argument("--lot", type=int, default=5, help="steps between two waits for the device")
    parser.add_argument("--seconds", type=float, default=240, help="after which a case is given up")
    return parser.parse_args(words)


def measure(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    from penjing import devices
    from penjing.kernels import ops
    from penjing.plan import hardware
    from penjing.plan.flops import mean_keys, parameters, training_flops_per_token
    from penjing.train.compile_policy import compiled_seconds

    ready = prepare(case)
    [first] = time_steps(ready.step, ready.device, steps=1)
    lots = max(1, asked.steps // asked.lot)
    seconds = time_steps(ready.step, ready.device, steps=lots * asked.lot, warmup=asked.warmup, group_size=asked.lot)
    rates = spread([case.tokens / each for each in seconds])
    keys = mean_keys(np.array(ready.lengths), case.seq_len)
    causal = training_flops_per_token(ready.config, keys)
    square = training_flops_per_token(ready.config, case.seq_len)
    peak = hardware.peak(ready.device, ready.dtype)
    return {
        **environment(ready.device, ready.dtype),
        "parameters": parameters(ready.config).total,
        "active": parameters(ready.config).active,
        "tokens_per_step": case.tokens,
        "tokens_per_second": rates,
        "mfu_causal": rates["median"] * causal / peak if peak and not case.lora else None,
        "mfu_full_square": rates["median"] * square / peak if peak and not case.lora else None,
        "mean_keys": keys,
        "first_step_seconds": first,
        "compile_seconds": compiled_seconds() if case.compile != "off" else 0.0,
        "peak_memory_bytes": devices.of(ready.device).peak_memory_bytes(ready.device),
        "summed_loss": float(ready.total),
        "dtype": str(ready.dtype).removeprefix("torch."),
        "backends": {choice.op: choice.backend for choice in ops.report(ready.device, ready.dtype)},
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/speed.md, without cases of an old record that are no longer there."""
    rows, known = [], {case.name for case in cases()}
    for name, one in result["cases"].items():
        if name not in known:
            continue
        if "failed" in one:
            rows.append([name, one["failed"], "", "", ""])
            continue
        rate, goal = one["tokens_per_second"], one["case"]["goal_tokens_per_second"]
        mfu = f"{one['mfu_causal']:.1%}" if one["mfu_causal"] else ""
        of_goal = f"{rate['median'] / goal:.2f}" if goal else ""
        memory = f"{one['peak_memory_bytes'] / 2**30:.1f}"
        rows.append([name, with_range(rate, lambda value: f"{value:,.0f}"), mfu, of_goal, memory])
    return ResultTable(["", "tokens/s, median (range)", "MFU", "fraction of the goal", "GiB"], rows).markdown()


def main() -> None:
    asked = parse()
    if asked.one:
        print(json.dumps(measure(asked.one, asked)))
        return
    chosen = [name.strip() for name in asked.cases.split(",") if name.strip()]
    known = {case.name: case for case in cases()}
    if unknown := [name for name in chosen if name not in known]:
        print(f"speed_gpu: no such case: {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    result: dict[str, Any] = {"settings": settings_of(asked), "cases": {}}
    for name in chosen or known:
        case = replace(tiny(known[name]) if asked.tiny else known[name], device=asked.device)
        try:
            one = {**timed(case, result, timeout=asked.seconds), "case": asdict(case)}
        except UserError as error:
            one = {"failed": str(error)}
        result["cases"][name] = one
        print(markdown({"cases": {name: one}}).splitlines()[-1], flush=True)
        if asked.out:
            write_json(asked.out, result)
    if any("failed" in one for one in result["cases"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
