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
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement."""

    name: str
    model: dict[str, Any]
    row_tokens: int
    rows: int  # of one forward pass
    passes: int = 1  # of one step
    optimizer: str = "muon"
    state: str = "float32"  # of the optimizer
    compile: str = "blocks"
    dtype: str = "auto"
    lora: int = 0
    recompute: str = "none"
    goal_tokens_per_second: float = 0.0  # on one H200
    more: dict[str, Any] = field(default_factory=dict)


def shape(width: int, layers: int, heads: int, kv: int, mlp: int, vocabulary: int, head: int = 0) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv,
        "head_size": head or width // heads,
        "mlp_size": mlp,
        "vocabulary_size": vocabulary,
    }


def cases() -> list[Case]:
    """131,072 tokens a step where memory allows; the 124M shape at 524,288 as its peers train it."""
    m26, m64 = shape(512, 8, 8, 2, 1408, 6400), shape(768, 8, 8, 4, 2432, 6400)
    m104 = shape(768, 16, 8, 2, 2048, 6400)
    m124 = {**shape(768, 12, 6, 6, 2048, 50304), "embeddings": "tied"}
    found = [
        Case(name="26M", model=m26, row_tokens=1024, rows=128, goal_tokens_per_second=2.0e6),
        Case(name="64M", model=m64, row_tokens=1024, rows=128, goal_tokens_per_second=1.0e6),
        Case(name="104M", model=m104, row_tokens=1024, rows=128, goal_tokens_per_second=6e5),
        Case(name="124M GPT-2", model=m124, row_tokens=1024, rows=64, passes=8, goal_tokens_per_second=5.6e5),
        Case(name="317M", model=shape(1024, 24, 8, 4, 2816, 32768), row_tokens=2048, rows=32, passes=2,
             goal_tokens_per_second=2.08e5),
        Case(name="1B", model=shape(2048, 18, 16, 8, 6144, 32768), row_tokens=2048, rows=16, passes=4,
             goal_tokens_per_second=8.2e4),
    ]  # fmt: skip
    for how in ("off", "whole", "graphs"):
        found.append(Case(name=f"26M compile={how}", model=m26, row_tokens=1024, rows=128, compile=how))
    found.append(Case(name="124M GPT-2 compile=whole", model=m124, row_tokens=1024, rows=64, passes=8, compile="whole"))
    found.append(Case(name="26M graphs 8 rows", model=m26, row_tokens=1024, rows=8, compile="graphs"))
    found.append(Case(name="26M blocks 8 rows", model=m26, row_tokens=1024, rows=8))
    found.append(Case(name="64M adamw", model=m64, row_tokens=1024, rows=128, optimizer="adamw"))
    found.append(Case(name="64M float16", model=m64, row_tokens=1024, rows=128, dtype="float16"))
    found.append(Case(name="1B recomputed", model=shape(2048, 18, 16, 8, 6144, 32768), row_tokens=2048, rows=16,
                      passes=4, recompute="block"))  # fmt: skip
    half = {"row_tokens": 1024, "rows": 64, "passes": 2}
    for how, said in (("blocks", ""), ("off", " eager")):
        for experts, chosen in ((4, 1), (32, 4)):
            mixture = {**m64, "architecture": "qwen3_moe", "experts": experts, "experts_per_token": chosen}
            mixture["expert_size"] = 2432 // chosen
            name = f"64M active {chosen} of {experts} experts{said}"
            found.append(Case(name=name, model=mixture, compile=how, **half))
        found.append(Case(name=f"64M dense{said}", model=m64, compile=how, **half))
    found.append(Case(name="1B on 24 GB", model=found[5].model, row_tokens=2048, rows=4, passes=16, optimizer="adamw",
                      state="int8", recompute="block"))  # fmt: skip
    found.append(Case(name="317M LoRA rank 16", model=found[4].model, row_tokens=2048, rows=32, optimizer="adamw",
                      lora=16, compile="off"))  # fmt: skip
    found.append(Case(name="317M full eager", model=found[4].model, row_tokens=2048, rows=32, optimizer="adamw",
                      compile="off"))  # fmt: skip
    return found


def tiny(case: Case) -> Case:
    """The same case as small as can be, to see that it runs."""
    small = {**case.model, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_size": 16}
    small |= {"mlp_size": 64, "vocabulary_size": 256}
    if "experts" in small:
        small["expert_size"] = 32
    how = "off" if case.compile == "graphs" or "experts" in small else case.compile  # on a CPU experts are eager
    values = {**asdict(case), "model": small, "row_tokens": 64, "rows": 2, "passes": min(2, case.passes)}
    return Case(**{**values, "lora": min(4, case.lora), "compile": how})


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="names with commas; empty: all")
    parser.add_argument("--device", default="cuda", help="as compute.device (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="smallest shapes: shows that everything runs")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default: %(default)s)")
    parser.add_argument("--lot", type=int, default=5, help="steps between two waits for the device")
    parser.add_argument("--warmup", type=int, default=5, help="steps before (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=240, help="after which a case is given up")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write, after every case anew")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N longest kernels instead")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args(words)


@dataclass
class Ready:
    """A case built: `step` takes one step, and what it needs to be judged."""

    step: Callable[[int], None]
    device: Any
    dtype: Any
    config: Any
    lengths: list[int]  # of the documents
    total: Any  # of all losses so far
    flash: str

    def wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def prepare(case: Case, asked: argparse.Namespace) -> Ready:
    import torch

    from penjing.loader.batch import Batch
    from penjing.model.config import ModelConfig
    from penjing.model.init import initialise
    from penjing.model.kernel_selection import activate_flash
    from penjing.model.linear import set_compute_dtype
    from penjing.model.lora import Lora, adapt, keep_base_in
    from penjing.model.transformer import Transformer, recompute_activations
    from penjing.objective.next_token import NextToken
    from penjing.optim.adamw import AdamW
    from penjing.optim.muon import Muon
    from penjing.optim.router_bias_update import RouterBalance
    from penjing.parallel.base import local_device
    from penjing.parallel.grad_scaler import LossScaler
    from penjing.parallel.single import Single
    from penjing.plan import hardware
    from penjing.train.compile_policy import compile_model, compile_optimizers

    device = local_device(asked.device)
    dtype = hardware.compute_dtype(case.dtype, device)
    config = ModelConfig(**case.model)
    model = Transformer(config)
    initialise(model, 1)
    if case.lora:
        adapt(model, Lora(rank=case.lora), seed=1)
        keep_base_in(model, dtype)
    recompute_activations(model, case.recompute)  # type: ignore[arg-type]
    model.to(device)
    set_compute_dtype(model, None if dtype == torch.float32 else dtype)
    strategy, objective = Single(device), NextToken()
    if dtype == torch.float16:
        strategy.scaler = LossScaler(device)
    strategy.wrap(model)
    made = (Muon if case.optimizer == "muon" else AdamW)(state=case.state)  # type: ignore[arg-type]
    optimizers: list[Any] = list(made.build(model))
    if config.is_mixture:
        optimizers.append(RouterBalance(model, 0.0, lambda value: value))
    flash = activate_flash(model, device, dtype)
    if case.compile != "off":
        compile_model(model, case.compile)  # type: ignore[arg-type]
        compile_optimizers(optimizers, device)
    generator = torch.Generator().manual_seed(1)
    tokens = case.rows * case.row_tokens

    def batch() -> Batch:
        ids_BT = torch.randint(config.vocabulary_size, (case.rows, case.row_tokens + 1), generator=generator)
        cuts_BT = torch.rand(case.rows, case.row_tokens, generator=generator) < 1 / 300
        return Batch(
            ids_BT=ids_BT[:, :-1].contiguous(),
            document_BT=cuts_BT.long().cumsum(1),
            scored_N=None,
            target_N=ids_BT[:, 1:].flatten(),
            weight_N=torch.ones(tokens),
            num_tokens=tokens,
        )

    ready = [batch() for _ in range(4)]
    lengths: list[int] = []
    for each in ready:
        for row in each.document_BT:
            lengths += torch.unique_consecutive(row, return_counts=True)[1].tolist()
    batches = [each.to(device) for each in ready]
    total = torch.zeros((), device=device)

    def step(number: int) -> None:
        for index in range(case.passes):
            loss = objective(model, batches[(number * case.passes + index) % len(batches)])
            strategy.backward(loss.total / (tokens * case.passes))
            total.add_(loss.total.detach())
        strategy.clip(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Ready(step, device, dtype, config, lengths, total, flash)


def measure(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    import numpy as np
    import torch
    from penjing.kernels.document_attention import has_varlen

    from penjing.plan import hardware
    from penjing.plan.flops import mean_keys, parameters, training_flops_per_token
    from penjing.train.compile_policy import compiled_seconds

    ready = prepare(case, asked)
    step, wait, device, dtype, config = ready.step, ready.wait, ready.device, ready.dtype, ready.config
    tokens = case.rows * case.row_tokens
    began = time.perf_counter()
    step(0)
    wait()
    first = time.perf_counter() - began
    for number in range(asked.warmup):
        step(number)
    wait()
    rates = []
    for lot in range(max(1, asked.steps // asked.lot)):
        began = time.perf_counter()
        for number in range(asked.lot):
            step(lot * asked.lot + number)
        wait()
        rates.append(asked.lot * tokens * case.passes / (time.perf_counter() - began))
    keys = mean_keys(np.array(ready.lengths), case.row_tokens)
    causal = training_flops_per_token(config, keys)
    square = training_flops_per_token(config, case.row_tokens)
    peak = hardware.peak(device, dtype).flops_per_second
    rate = statistics.median(rates)
    return {
        "parameters": parameters(config).total,
        "active": parameters(config).active,
        "tokens_per_step": tokens * case.passes,
        "tokens_per_second": {"median": rate, "low": min(rates), "high": max(rates)},
        "mfu_causal": rate * causal / peak if peak and not case.lora else None,
        "mfu_full_square": rate * square / peak if peak and not case.lora else None,
        "mean_keys": keys,
        "first_step_seconds": first,
        "compile_seconds": compiled_seconds() if case.compile != "off" else 0.0,
        "peak_memory_bytes": hardware.peak_memory_bytes(device),
        "summed_loss": float(ready.total),
        "dtype": str(dtype).removeprefix("torch."),
        "variable_length_kernel": has_varlen(device, dtype, config.head_size),
        "flash": ready.flash,
        "machine": hardware.describe(device, dtype),
        "torch": torch.__version__,
    }


def profile(case: Case, asked: argparse.Namespace) -> None:
    """Print where the device's time of one step goes, kernel by kernel."""
    import torch
    from torch.profiler import ProfilerActivity

    ready = prepare(case, asked)
    for number in range(asked.warmup):
        ready.step(number)
    ready.wait()
    began = time.perf_counter()
    for number in range(asked.steps):
        ready.step(number)
    ready.wait()
    seconds = (time.perf_counter() - began) / asked.steps
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if ready.device.type == "cuda" else [])
    steps = min(3, asked.steps)
    with torch.profiler.profile(activities=kinds) as seen:
        for number in range(steps):
            ready.step(number)
        ready.wait()
    kernels = [
        (event.self_device_time_total / steps / 1e3, event.count / steps, event.key)
        for event in seen.key_averages()
        if str(event.device_type).endswith("CUDA")
    ]
    busy = sum(each[0] for each in kernels)
    launches = sum(each[1] for each in kernels)
    print(f"{case.name}: {seconds * 1e3:.1f} ms a step, kernels {busy:.1f} ms in {launches:.0f} launches")
    for milliseconds, count, name in sorted(kernels, reverse=True)[: asked.profile]:
        print(f"{milliseconds:9.2f} ms {count:7.0f} x  {name[:110]}")


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/speed.md."""
    lines = ["| | tokens/s, median (range) | MFU | of the goal | GiB |", "|---|---:|---:|---:|---:|"]
    for name, one in result["cases"].items():
        name = name.replace("350M", "317M")  # what records of 2026-11 call the shape of 317M parameters
        if "failed" in one:
            lines.append(f"| {name} | {one['failed']} | | | |")
            continue
        rate, goal = one["tokens_per_second"], one["case"]["goal_tokens_per_second"]
        mfu = f"{one['mfu_causal']:.1%}" if one["mfu_causal"] else ""
        said = f"{rate['median'] / goal:.2f}" if goal else ""
        lines.append(
            f"| {name} | {rate['median']:,.0f} ({rate['low']:,.0f}-{rate['high']:,.0f}) | {mfu} | {said} "
            f"| {one['peak_memory_bytes'] / 2**30:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    asked = parse()
    chosen = [name.strip() for name in asked.cases.split(",") if name.strip()]
    names = [case.name for case in cases()]
    if unknown := [name for name in chosen if name not in names]:
        print(f"speed_gpu: no such case: {', '.join(unknown)}; there are: {', '.join(names)}", file=sys.stderr)
        sys.exit(2)
    every = sorted(
        (case for case in cases() if not chosen or case.name in chosen),
        key=lambda case: chosen.index(case.name) if chosen else 0,
    )
    if asked.one:
        [case] = [case for case in cases() if case.name == asked.one]
        case = tiny(case) if asked.tiny else case
        if asked.profile:
            profile(case, asked)
        else:
            print(json.dumps(measure(case, asked)))
        return
    found: dict[str, Any] = {}
    for case in every:
        words = ["--device", asked.device, "--steps", asked.steps, "--lot", asked.lot, "--warmup", asked.warmup]
        command = [sys.executable, __file__, *map(str, words), *(["--tiny"] if asked.tiny else []), "--one", case.name]
        if asked.profile:
            subprocess.run([*command, "--profile", str(asked.profile)], timeout=asked.seconds)
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=asked.seconds)
        except subprocess.TimeoutExpired:
            found[case.name] = {"failed": f"not done after {asked.seconds:.0f} s"}
            print(f"{case.name:<36} {found[case.name]['failed']}", flush=True)
            continue
        if done.returncode:
            found[case.name] = {"failed": (done.stderr.strip() or "no word").splitlines()[-1]}
            print(f"{case.name:<36} {found[case.name]['failed'][:120]}", flush=True)
        else:
            one = {**json.loads(done.stdout.strip().splitlines()[-1]), "case": asdict(case)}
            found[case.name] = one
            rate, goal = one["tokens_per_second"]["median"], case.goal_tokens_per_second
            mfu = f"{one['mfu_causal']:.1%}" if one["mfu_causal"] else "-"
            said = f", {rate / goal:.2f} of the goal" if goal and not asked.tiny else ""
            memory = one["peak_memory_bytes"] / 2**30
            print(f"{case.name:<36} {rate:>12,.0f} tokens/s  MFU {mfu}  {memory:.1f} GiB{said}", flush=True)
        if asked.out:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            settings = {name: value for name, value in vars(asked).items() if name not in ("out", "one")}
            asked.out.write_text(json.dumps({"settings": settings, "cases": found}, indent=2) + "\n", encoding="utf-8")
    if any("failed" in one for one in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
