"""Time of a mixture-of-experts step beside the dense step of the same active size, on one machine.

Run: python benchmarks/moe_step.py --out results/moe_step.json

The models stand in one process and take steps in turn, so that whatever slows the machine slows all of them. A step is
what training does: forward and backward passes, clipping, AdamW, the routers' balance, over rows of random ids. The
dense model's MLP is F wide; of the mixtures each token goes through k experts of F/k. Printed and written: median and
range of each, and the median over the rounds of each mixture's time over the dense one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="of the residual stream (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--mlp", type=int, default=1408, help="F, the dense MLP's inner width (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step (default: %(default)s)")
    parser.add_argument("--micro-rows", type=int, default=8, help="rows of a forward pass (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each model (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=20, help="steps before: each size of product is compiled once")
    parser.add_argument("--experts", default="4:1,32:4", help="E:k of each mixture, with commas (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="as compute.device (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="as compute.dtype")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = physical cores")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser.parse_args(words)


class Subject:
    """One model with what it takes to train it."""

    def __init__(self, asked: argparse.Namespace, experts: int, chosen: int, device: Any, dtype: Any) -> None:
        import torch

        from penjing.model.config import ModelConfig
        from penjing.model.init import initialise
        from penjing.model.linear import set_compute_dtype
        from penjing.model.transformer import Transformer
        from penjing.objective.next_token import NextToken
        from penjing.optim.adamw import AdamW
        from penjing.optim.router_bias_update import RouterBalance
        from penjing.parallel.single import Single
        from penjing.plan.flops import parameters

        heads = asked.width // 64
        more: dict[str, Any] = {}
        if experts:
            more = {"architecture": "qwen3_moe", "experts": experts, "experts_per_token": chosen}
            more["expert_size"] = asked.mlp // chosen
        shape = ModelConfig(
            hidden_size=asked.width,
            num_layers=asked.layers,
            num_heads=heads,
            num_kv_heads=max(1, heads // 4),
            mlp_size=asked.mlp,
            **more,
        )
        self.name = f"{experts} experts, {chosen} a token" if experts else "dense"
        self.model = Transformer(shape)
        initialise(self.model, 1)
        self.model.to(device)
        set_compute_dtype(self.model, None if dtype == torch.float32 else dtype)
        self.strategy, self.objective = Single(device), NextToken()
        self.strategy.wrap(self.model)
        self.optimizers: list[Any] = list(AdamW(learning_rate=1e-3).build(self.model))
        if experts:
            self.optimizers.append(RouterBalance(self.model, 0.0, lambda value: value))
        self.parameters = parameters(shape)

    def step(self, batches: list[Any]) -> None:
        num_tokens = sum(batch.num_tokens for batch in batches)
        for batch in batches:
            self.strategy.backward(self.objective(self.model, batch).total / num_tokens)
        self.strategy.clip(1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def main() -> None:
    asked = parse()
    import torch

    from penjing.loader.batch import Batch
    from penjing.parallel.base import local_device
    from penjing.plan import hardware
    from penjing.train.run_dir import set_threads

    set_threads(asked.threads, 1)
    device = local_device(asked.device)
    dtype = hardware.compute_dtype(asked.dtype, device)
    mixtures = [tuple(map(int, word.split(":"))) for word in asked.experts.split(",")]
    subjects = [Subject(asked, experts, chosen, device, dtype) for experts, chosen in [(0, 0), *mixtures]]
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        ids_BT = torch.randint(6400, (asked.micro_rows, asked.row_tokens + 1), generator=generator)
        inputs_BT = ids_BT[:, :-1].contiguous()
        return Batch(
            ids_BT=inputs_BT,
            document_BT=torch.zeros_like(inputs_BT),
            scored_N=None,
            target_N=ids_BT[:, 1:].flatten(),
            weight_N=torch.ones(inputs_BT.numel()),
            num_tokens=inputs_BT.numel(),
        ).to(device)

    seconds: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for number in range(asked.rounds + asked.warmup):
        batches = [batch() for _ in range(max(1, asked.rows // asked.micro_rows))]
        for subject in subjects if number % 2 == 0 else subjects[::-1]:
            began = time.perf_counter()
            subject.step(batches)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= asked.warmup:
                seconds[subject.name].append(time.perf_counter() - began)
    dense = seconds["dense"]
    result: dict[str, Any] = {
        "settings": {name: value for name, value in vars(asked).items() if name != "out"},
        "machine": hardware.describe(device, dtype),
        "models": {},
    }
    for subject in subjects:
        mine = seconds[subject.name]
        ratios = [own / other for own, other in zip(mine, dense, strict=True)]
        result["models"][subject.name] = {
            "parameters": subject.parameters.total,
            "active": subject.parameters.active,
            "step_seconds": {"median": statistics.median(mine), "low": min(mine), "high": max(mine)},
            "ratio": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
        }
        line = f"{subject.parameters.total / 1e6:7.1f} M, {subject.parameters.active / 1e6:5.1f} M active"
        line += f"  {statistics.median(mine):7.3f} s ({min(mine):.3f}-{max(mine):.3f})"
        print(
            f"{subject.name:<22} {line}  {statistics.median(ratios):.2f} x dense ({min(ratios):.2f}-{max(ratios):.2f})"
        )
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
