"""The plan beside what benchmarks/speed_gpu.py measured: tokens a second from the card's data sheet, memory traced.

Run: python benchmarks/plan_gpu.py results/speed_gpu_H200_DATE.json --gpu H200 --out results/plan_gpu_H200_DATE.json

Needs no GPU. Each case of the record is planned as its user would ask: `penjing plan run pretrain ... --json`.
Planned documents are as long as a row, measured ones 300 tokens on average. Memory is compared without the context.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from compare.table import ResultTable
from speed_gpu import cases

from penjing.base.files import write_json


def planned(case: dict[str, Any], gpu: str) -> dict[str, Any]:
    words = [f"model.{name}={value}" for name, value in case["model"].items()]
    words += [f"data.seq_len={case['seq_len']}", f"batch.size={case['rows'] * case['passes']}"]
    words += [f"batch.micro_size={case['rows']}", f"compute.compile={case['compile']}", "max_steps=250"]
    words += [f"compute.activation_checkpointing={case['recompute']}", f"compute.dtype={case['dtype']}"]
    command = [sys.executable, "-m", "penjing", "plan", "run", "pretrain", *words, "--gpu", gpu, "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def compare(record: dict[str, Any], gpu: str) -> dict[str, Any]:
    cases = {}
    for name, one in record["cases"].items():
        if "failed" in one or one["case"]["optimizer"] != "muon" or one["case"]["lora"]:
            continue
        plan = planned(one["case"], gpu)
        cases[name] = {
            "tokens_per_second": one["tokens_per_second"]["median"],
            "planned_tokens_per_second": plan["tokens_per_second"],
            "memory_bytes": one["peak_memory_bytes"],
            "planned_memory_bytes": plan["peak_memory_bytes"] - plan["waterfall"]["context"],
        }
        print(name, cases[name], flush=True)
    return {"gpu": gpu, "cases": cases}


def markdown(result: dict[str, Any]) -> str:
    rows, known = [], {case.name for case in cases()}
    for name, one in result["cases"].items():
        if name not in known:
            continue
        memory, speed = (
            [one[f"planned_{what}"], one[what], one[f"planned_{what}"] / one[what] - 1]
            for what in ("memory_bytes", "tokens_per_second")
        )
        held = [f"{memory[0] / 2**30:.2f}", f"{memory[1] / 2**30:.2f}", f"{memory[2]:+.1%}"]
        rows.append([name, *held, f"{speed[0]:,.0f}", f"{speed[1]:,.0f}", f"{speed[2]:+.0%}"])
    return ResultTable(["", "GiB, planned", "held", "", "tokens/s, planned", "measured", ""], rows).markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--gpu", default="H200", help="as `penjing plan --gpu` has it (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if not asked.record.is_file():
        parser.error(f"no such record: {asked.record}")
    result = {"record": asked.record.name, **compare(json.loads(asked.record.read_text(encoding="utf-8")), asked.gpu)}
    write_json(asked.out, result)
    print(markdown(result))


if __name__ == "__main__":
    main()
