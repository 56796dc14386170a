"""A small model learns to call a calculator, and then to call it well: exact match before and after, three seeds.

Run: python benchmarks/tools.py runs/quickstart --out results/tools.json

SFT on the toy world's tool conversations starts from the quickstart's SFT model and is stopped early, so that calls are
made but often wrong. GRPO then answers held-in questions with the calculator really run between the turns, and is
judged on held-out ones. Both positions of the switch are measured: half of the conversations have thoughts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PENJING = [sys.executable, "-m", "penjing"]
TOOLS = (
    "objective.rollout.tools=calculator",
    "objective.rollout.max_turns=4",
    "objective.rollout.max_new_tokens=240",
    "objective.rewards=exact",
    "data.seq_len=512",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=Path, help="a finished quickstart's folder")
    parser.add_argument("--work", type=Path, default=Path("runs/tools"), help="folder of the runs (%(default)s)")
    parser.add_argument("--seeds", default="1,2,3", help="(default: %(default)s)")
    parser.add_argument("--thinking", default="off,on", help="positions of the switch (default: %(default)s)")
    parser.add_argument("--sft-steps", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="of GRPO (default: %(default)s)")
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
    world, sft = asked.work / "world", asked.work / "sft"
    if not (world / "tools_rl.jsonl").is_file():
        penjing("data", "toyworld", "--out", world, "--documents", 10, "--conversations", 10, "--preferences", 10,
                "--prompts", 10, "--tools", 12_000)  # fmt: skip
    train(
        "tiny_sft", sft, asked.threads, f"init_from={asked.quickstart / 'sft'}", f"data.train={world / 'tools.jsonl'}",
        "data.thinking=switch", "data.seq_len=512", f"max_steps={asked.sft_steps}", "eval.every=0", "sample.every=0",
    )  # fmt: skip
    result: dict[str, Any] = {}
    for switch in asked.thinking.split(","):
        result[switch] = {}
        for seed in asked.seeds.split(","):
            done = train(
                "grpo", asked.work / f"grpo-{switch}-{seed}", asked.threads, f"init_from={sft}", f"seed={seed}",
                f"data.train={world / 'tools_rl.jsonl'}", f"objective.rollout.thinking={switch}", *TOOLS,
                f"max_steps={asked.steps}", "batch.size=16", "eval.sequences=256", "eval.every=0",
            )  # fmt: skip
            before = done["before"]
            figures = {name: {"before": first, "after": done[name]} for name, first in before.items()}
            result[switch][seed] = {"seconds": done["seconds"], **figures}
            shown = "val_exact_match"
            print(f"thinking {switch}, seed {seed}: {before[shown]:.1%} -> {done[shown]:.1%}", flush=True)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
