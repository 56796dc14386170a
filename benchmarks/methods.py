"""What preference tuning and reinforcement learning teach the quickstart's model: before and after, three seeds each.

Run: python benchmarks/methods.py runs/quickstart --out results/methods.json

DPO starts from the quickstart's SFT model, on its own pairs. GRPO starts from a weak SFT (700 steps from the pretrained
model), on the toy world's counting questions. Both are judged on held-out pairs and questions, before and after.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PENJING = [sys.executable, "-m", "penjing"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=Path, help="a finished quickstart's folder")
    parser.add_argument("--work", type=Path, default=Path("runs/methods"), help="folder of the runs (%(default)s)")
    parser.add_argument("--seeds", default="1,2,3", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = physical cores")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser.parse_args()


def penjing(*words: object) -> None:
    subprocess.run([*PENJING, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def train(recipe: str, out: Path, threads: int, *settings: str) -> dict[str, Any]:
    """The outcome of a run; one that is there already is not made again."""
    penjing("train", recipe, f"out={out}", f"compute.threads={threads}", *settings)
    return dict(json.loads((out / "outcome.json").read_text(encoding="utf-8")))


def main() -> None:
    asked = parse()
    asked.work.mkdir(parents=True, exist_ok=True)
    world, counting, weak = asked.work / "world", asked.work / "counting.jsonl", asked.work / "weak"
    if not counting.is_file():
        penjing("data", "toyworld", "--out", world, "--documents", 10, "--conversations", 10, "--preferences", 10,
                "--prompts", 20_000, "--seed", 5)  # fmt: skip
        lines = (world / "rl.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        counting.write_text("".join(line for line in lines if json.loads(line)["kind"] == "count"), encoding="utf-8")
    quiet = ("validate.every=0", "sample.every=0")
    sft = (f"start={asked.quickstart / 'pretrain'}", f"data.train={asked.quickstart / 'data/sft.jsonl'}", "steps=700")
    train("tiny_sft", weak, asked.threads, *sft, *quiet)
    methods = {
        "dpo": (f"start={asked.quickstart / 'sft'}", f"data.train={asked.quickstart / 'data/dpo.jsonl'}"),
        "grpo": (f"start={weak}", f"data.train={counting}", "steps=250", "validate.every=125"),
    }
    result: dict[str, Any] = {}
    for method, settings in methods.items():
        result[method] = {}
        for seed in asked.seeds.split(","):
            done = train(method, asked.work / f"{method}-{seed}", asked.threads, f"seed={seed}", *settings)
            before = done["before"]
            figures = {name: {"before": first, "after": done[name]} for name, first in before.items()}
            result[method][seed] = {"seconds": done["seconds"], **figures}
            shown = "validation_reward_accuracy" if method == "dpo" else "validation_exact_match"
            print(f"{method} {seed}: {before[shown]:.1%} -> {done[shown]:.1%}, {done['seconds']:.0f} s", flush=True)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
