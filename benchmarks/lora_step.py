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
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KINDS = ("full", "lora")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="104m", help="a preset of `penjing show models` (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="rows of one step (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, default=512, help="tokens of one row (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    parser.add_argument("--kind", choices=("lora", "dora"), default="lora", help="(default: %(default)s)")
    parser.add_argument("--targets", default="*_proj", help="layers, as lora.targets takes them (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=5, help="processes of each kind, alternating (default: 5)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of one trial (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="as compute.device (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="as compute.dtype")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = physical cores")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--trial", choices=KINDS, default=None, help=argparse.SUPPRESS)  # what a child process does
    return parser.parse_args(words)


def trial(asked: argparse.Namespace) -> dict[str, Any]:
    """One process: build, take the steps, say what they took."""
    import torch

    from penjing.base import config
    from penjing.base.process_info import peak_resident_bytes
    from penjing.loader.batch import Batch
    from penjing.model.config import ModelConfig
    from penjing.model.init import initialise
    from penjing.model.linear import set_compute_dtype
    from penjing.model.lora import Lora, adapt, keep_base_in
    from penjing.model.transformer import Transformer
    from penjing.objective.next_token import NextToken
    from penjing.optim.adamw import AdamW
    from penjing.parallel.base import local_device
    from penjing.parallel.single import Single
    from penjing.plan import hardware
    from penjing.train.run_dir import set_threads

    set_threads(asked.threads, 1)
    device = local_device(asked.device)
    dtype = hardware.compute_dtype(asked.dtype, device)
    shape = config.resolve(ModelConfig, {"preset": asked.model})
    imported = peak_resident_bytes()
    model = Transformer(shape)
    initialise(model, 1)
    if asked.trial == "lora":
        adapt(model, Lora(rank=asked.rank, kind=asked.kind, targets=tuple(asked.targets.split(","))))
        keep_base_in(model, dtype)
    model.to(device)
    set_compute_dtype(model, None if dtype == torch.float32 else dtype)
    strategy, objective = Single(device), NextToken()
    strategy.wrap(model)
    [optimizer] = AdamW(learning_rate=1e-3).build(model)
    generator = torch.Generator().manual_seed(1)
    seconds = []
    for step in range(asked.warmup + asked.steps):
        ids_BT = torch.randint(shape.vocabulary_size, (asked.rows, asked.row_tokens + 1), generator=generator)
        inputs_BT = ids_BT[:, :-1].contiguous()
        batch = Batch(
            ids_BT=inputs_BT,
            document_BT=torch.zeros_like(inputs_BT),
            scored_N=None,
            target_N=ids_BT[:, 1:].flatten(),
            weight_N=torch.ones(inputs_BT.numel()),
            num_tokens=inputs_BT.numel(),
        ).to(device)
        began = time.perf_counter()
        loss = objective(model, batch)
        strategy.backward(loss.total / batch.num_tokens)
        strategy.clip(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.total.detach())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if step >= asked.warmup:
            seconds.append(time.perf_counter() - began)
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "kind": asked.trial,
        "step_seconds": seconds,
        "peak_bytes": on_device or peak_resident_bytes(),
        "peak_bytes_after_imports": 0 if on_device else imported,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trainable": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "machine": hardware.describe(device, dtype),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    asked = parse()
    if asked.trial:
        print(json.dumps(trial(asked)))
        return
    trials: list[dict[str, Any]] = []
    environment = {**os.environ}
    for number in range(asked.trials):
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--trial", kind],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env=environment,
            )
            trials.append(json.loads(done.stdout.strip().splitlines()[-1]))
            seconds = statistics.median(trials[-1]["step_seconds"])
            print(f"trial {number + 1} {kind}: {seconds:.3f} s, {trials[-1]['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    by_kind = {kind: [each for each in trials if each["kind"] == kind] for kind in KINDS}
    result: dict[str, Any] = {
        "settings": {name: value for name, value in vars(asked).items() if name not in ("out", "trial")},
        "machine": trials[0]["machine"],
        "penjing_trials": trials,
    }
    for kind, each in by_kind.items():
        result[kind] = {
            "parameters": each[0]["parameters"],
            "trainable": each[0]["trainable"],
            "step_seconds": spread([statistics.median(one["step_seconds"]) for one in each]),
            "peak_bytes": spread([float(one["peak_bytes"]) for one in each]),
        }
    for figure in ("step_seconds", "peak_bytes"):
        result[f"{figure}_ratio"] = result["lora"][figure]["median"] / result["full"][figure]["median"]
    time_ratio, memory_ratio = result["step_seconds_ratio"], result["peak_bytes_ratio"]
    print(f"LoRA over full: {time_ratio:.2f} x the time, {memory_ratio:.2f} x the memory")
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
