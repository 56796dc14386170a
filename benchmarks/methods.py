"""What each method after SFT teaches the quickstart's model: before and after, on held-out pairs and questions.

Run: python benchmarks/methods.py runs/quickstart --out results/methods.json            (everything, three seeds each)
     python benchmarks/methods.py runs/quickstart --only dpo,reward --seeds 1 --out ...  (adds to what the file holds)

dpo, dpo_lora, reward: the quickstart's SFT model on its own pairs; dpo_fast, dpo_fast_nll, dpo_lora_fast: at rates
that are too high. grpo: a weak SFT (700 steps from the pretrained model) on the toy world's counting questions.
grpo_sft, ppo: the SFT model on 20,000 prompts of all kinds; grpo_few, ppo_few: on the first 1,000 of the quickstart's.
distill: the SFT model is the teacher; the student is the same pretrained model after SFT on 300 labelled
conversations. 3,072 further conversations have questions only, which the teacher answers. As many further steps are
taken on the student's own labels (the control), on the teacher's answers (sft), on its predictions for them (logits,
top_k), and on its verdict on what the student writes (on_policy).

Runs that are there already are not made again. `benchmarks/method_pages.py` puts them into docs/methods.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PENJING = [sys.executable, "-m", "penjing"]
QUIET = ("eval.every=0", "sample.every=0")
# Conversations of the quickstart's SFT data: the first so many with their answers, and so many of which only the
# questions are taken.
LABELLED, FIRST_ASKED, ASKED = 300, 1_000, 3_072
STUDENT_STEPS, DISTILL_STEPS, OWN_STEPS = 500, 1_200, 300
# The quickstart's own SFT settings, for a recipe that is made for larger models.
TINY = (
    "data.seq_len=256",
    "batch.size=4",
    "optimizer.name=muon",
    "optimizer.learning_rate=0.02",
    "optimizer.adamw_learning_rate=0.01",
    "schedule.name=wsd",
    "schedule.warmup_ratio=0.02",
    "schedule.decay_ratio=0.4",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=Path, help="a finished quickstart's folder")
    parser.add_argument("--work", type=Path, default=Path("runs/methods"), help="folder of the runs (%(default)s)")
    parser.add_argument("--only", default="", help="some of the methods, with commas between them (default: all)")
    parser.add_argument("--kinds", default="", help="of distill: control,sft,logits,top_k,on_policy (default: all)")
    parser.add_argument("--seeds", default="1,2,3", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = physical cores")
    parser.add_argument("--shared", action="store_true", help="other work runs beside it: its seconds mean nothing")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write; what else it holds is kept")
    return parser.parse_args()


class Bench:
    """Where runs lie and how they are made."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.quickstart: Path = asked.quickstart
        self.work: Path = asked.work
        self.data = self.quickstart / "data"
        self.work.mkdir(parents=True, exist_ok=True)

    def penjing(self, *words: object) -> None:
        subprocess.run([*PENJING, *map(str, words)], check=True, stdout=subprocess.DEVNULL)

    def train(self, recipe: str, name: str, *settings: object) -> dict[str, Any]:
        """The outcome of a run."""
        out = self.work / name
        self.penjing("train", recipe, f"out={out}", f"compute.threads={self.asked.threads}", *settings)
        return dict(json.loads((out / "outcome.json").read_text(encoding="utf-8")))

    def accuracy(self, run: Path) -> float:
        """Share of the quickstart's held-out questions that a run's model answers exactly right."""
        from penjing.eval import questions
        from penjing.train.load_model import load_trained, set_threads

        set_threads(self.asked.threads, 1)
        known = run / "accuracy.json"
        if not known.is_file():
            trained = load_trained(run)
            asked = questions.read_questions(self.data / "eval.jsonl")
            answered = questions.ask(trained.model, trained.tokenizer, asked)
            known.write_text(json.dumps(questions.accuracy(answered)), encoding="utf-8")
        return float(json.loads(known.read_text(encoding="utf-8")))

    # --- preferences and rewards -------------------------------------------------------------------------------------

    def pairs(self, recipe: str, name: str, seed: str, *settings: object) -> dict[str, Any]:
        start, data = f"init_from={self.quickstart / 'sft'}", f"data.train={self.data / 'dpo.jsonl'}"
        return judged(self.train(recipe, f"{name}-{seed}", start, data, self.known, f"seed={seed}", *settings))

    @property
    def known(self) -> str:
        """The quickstart's held-out questions, asked before and after."""
        return f"eval.questions={self.data / 'eval.jsonl'}"

    def dpo(self, seed: str) -> dict[str, Any]:
        return self.pairs("dpo", "dpo", seed)

    def dpo_fast(self, seed: str) -> dict[str, Any]:
        """At six times the recipe's rate."""
        return self.pairs("dpo", "dpo_fast", seed, "optimizer.learning_rate=3e-4")

    def dpo_fast_nll(self, seed: str) -> dict[str, Any]:
        return self.pairs("dpo", "dpo_fast_nll", seed, "optimizer.learning_rate=3e-4", "objective.nll_weight=1")

    def dpo_lora(self, seed: str) -> dict[str, Any]:
        return self.pairs("dpo", "dpo_lora", seed, "lora.rank=8")

    def dpo_lora_fast(self, seed: str) -> dict[str, Any]:
        return self.pairs("dpo", "dpo_lora_fast", seed, "lora.rank=8", "optimizer.learning_rate=3e-4")

    def reward(self, seed: str) -> dict[str, Any]:
        return self.pairs("reward", "reward", seed)

    def reward_more(self, seed: str) -> dict[str, Any]:
        """With four times as many pairs, of another seed's world."""
        world = self.work / "pairs"
        if not world.is_dir():
            self.penjing("data", "toyworld", "--out", world, "--documents", 10, "--conversations", 10,
                         "--preferences", 4_000, "--prompts", 10, "--seed", 7)  # fmt: skip
        return self.pairs("reward", "reward_more", seed, f"data.train={world / 'dpo.jsonl'}", "eval.sequences=400")

    # --- reinforcement learning --------------------------------------------------------------------------------------

    def world(self) -> Path:
        """Prompts of all kinds, more than the quickstart makes."""
        file = self.work / "world" / "rl.jsonl"
        if not file.is_file():
            self.penjing("data", "toyworld", "--out", file.parent, "--documents", 10, "--conversations", 10,
                         "--preferences", 10, "--prompts", 20_000, "--seed", 5)  # fmt: skip
        return file

    def grpo(self, seed: str) -> dict[str, Any]:
        counting = self.work / "counting.jsonl"
        if not counting.is_file():
            lines = self.world().read_text(encoding="utf-8").splitlines(keepends=True)
            counts = [line for line in lines if json.loads(line)["kind"] == "count"]
            counting.write_text("".join(counts), encoding="utf-8")
        start, chats = f"init_from={self.quickstart / 'pretrain'}", f"data.train={self.data / 'sft.jsonl'}"
        self.train("tiny_sft", "weak", start, chats, "max_steps=700", *QUIET)
        weak = f"init_from={self.work / 'weak'}"
        settings = (weak, f"data.train={counting}", "max_steps=250", "eval.every=50", self.known)
        return judged(self.train("grpo", f"grpo-{seed}", f"seed={seed}", *settings))

    def grpo_sft(self, seed: str) -> dict[str, Any]:
        return self.prompts("grpo", "grpo_sft", seed, self.world())

    def ppo(self, seed: str) -> dict[str, Any]:
        return self.prompts("ppo", "ppo", seed, self.world())

    def grpo_few(self, seed: str) -> dict[str, Any]:
        """The same on a thousand of the quickstart's prompts, which come again and again."""
        return self.prompts("grpo", "grpo_few", seed, self.few())

    def ppo_few(self, seed: str) -> dict[str, Any]:
        return self.prompts("ppo", "ppo_few", seed, self.few())

    def few(self) -> Path:
        """The first thousand of the quickstart's prompts."""
        file = self.work / "few.jsonl"
        lines = (self.data / "rl.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(lines[:1_000]), encoding="utf-8")
        return file

    def prompts(self, recipe: str, name: str, seed: str, data: Path) -> dict[str, Any]:
        start = f"init_from={self.quickstart / 'sft'}"
        settings = (start, f"data.train={data}", "max_steps=150", "eval.every=50", self.known)
        return judged(self.train(recipe, f"{name}-{seed}", f"seed={seed}", *settings))

    # --- distillation ------------------------------------------------------------------------------------------------

    def distill(self, seed: str) -> dict[str, Any]:
        labelled, answers = self.distillation_data()
        base = f"init_from={self.quickstart / 'pretrain'}"
        words = (f"seed={seed}", *QUIET)
        self.train("tiny_sft", f"student-{seed}", base, f"data.train={labelled}", f"max_steps={STUDENT_STEPS}", *words)
        student, steps = f"init_from={self.work / f'student-{seed}'}", f"max_steps={DISTILL_STEPS}"
        teacher = (f"objective.teacher={self.quickstart / 'sft'}", "objective.ce_weight=0", "data.format=chats")
        taught = (student, f"data.train={answers}", f"seed={seed}", "eval.every=100", *teacher, *TINY)
        kinds: dict[str, tuple[str, tuple[object, ...]]] = {
            "control": ("tiny_sft", (student, f"data.train={labelled}", steps, *words)),
            "sft": ("tiny_sft", (student, f"data.train={answers}", steps, *words)),
            "logits": ("distill", (*taught, steps)),
            "top_k": ("distill", (*taught, steps, "objective.mode=top_k")),
            "on_policy": (
                "distill",
                # From where the logits have brought it: a student that goes astray writes nothing worth a verdict.
                (f"init_from={self.work / f'distill-logits-{seed}'}", *taught[1:], "objective.mode=on_policy",
                 "objective.max_new_tokens=48", f"max_steps={OWN_STEPS}", "batch.size=16",
                 "optimizer.learning_rate=0.002",
                 "optimizer.adamw_learning_rate=0.001"),
            ),
        }  # fmt: skip
        found: dict[str, Any] = {
            "teacher": self.accuracy(self.quickstart / "sft"),
            "student": self.accuracy(self.work / f"student-{seed}"),
        }
        wanted = self.asked.kinds.split(",") if self.asked.kinds else list(kinds)
        for kind, (recipe, settings) in kinds.items():
            name = f"distill-{kind}-{seed}"
            if kind in wanted:
                self.train(recipe, name, *settings)
            if kind in wanted or (self.work / name / "accuracy.json").is_file():
                found[kind] = self.accuracy(self.work / name)
        return recovered(found)

    def distillation_data(self) -> tuple[Path, Path]:
        """(labelled conversations, conversations in which the teacher has given every answer)."""
        labelled, asked, answers = (self.work / f"{name}.jsonl" for name in ("labelled", "asked", "answers"))
        if not asked.is_file():
            lines = (self.data / "sft.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            labelled.write_text("".join(lines[:LABELLED]), encoding="utf-8")
            asked.write_text("".join(lines[FIRST_ASKED : FIRST_ASKED + ASKED]), encoding="utf-8")
        words = ("--prompts", asked, "--out", answers, "--every-turn", "--max-tokens", 48)
        self.penjing("generate", self.quickstart / "sft", *words)
        return labelled, answers


def judged(done: dict[str, Any]) -> dict[str, Any]:
    """Of an outcome, the seconds, every held-out figure and the questions by kind, before and after."""
    from penjing.eval.changes import changes

    figures = {name: {"before": first, "after": done[name]} for name, first in done["before"].items()}
    found: dict[str, Any] = {"seconds": done["seconds"], **figures}
    if "questions" in done:
        asked = done["questions"]
        found["questions"] = {
            each.name: {"asked": each.asked, "before": each.before, "after": each.after, "lost": each.is_lost}
            for each in changes(asked["before"], asked["after"])
        }
    return found


def recovered(found: dict[str, float]) -> dict[str, Any]:
    """Accuracies, and which share of the way from the control to the teacher each kind has gone."""
    gap = found["teacher"] - found.get("control", float("nan"))
    kinds = [name for name in found if name not in ("teacher", "student", "control")]
    shares = {name: (found[name] - found["control"]) / gap for name in kinds} if gap > 0 else {}
    return {"accuracy": found, "recovered": shares}


METHODS = (
    "dpo",
    "dpo_fast",
    "dpo_fast_nll",
    "dpo_lora",
    "dpo_lora_fast",
    "reward",
    "reward_more",
    "grpo",
    "grpo_sft",
    "grpo_few",
    "ppo",
    "ppo_few",
    "distill",
)
SHOWN = ("val_exact_match", "val_reward_accuracy")


def summary(figures: dict[str, Any]) -> str:
    if "accuracy" in figures:
        return ", ".join(f"{name} {share:.1%}" for name, share in figures["accuracy"].items())
    name = next(name for name in SHOWN if name in figures)
    return f"{figures[name]['before']:.1%} -> {figures[name]['after']:.1%}"


def about(asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    from penjing import __version__
    from penjing.plan import hardware

    device = torch.device("cpu")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "penjing": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": hardware.describe(device, hardware.compute_dtype("auto", device)),
        "threads": asked.threads or os.cpu_count(),
        "seconds_are_comparable": not asked.shared,
    }


def write(path: Path, found: dict[str, Any], facts: dict[str, Any]) -> None:
    """Put figures beside those that the file holds already."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known["about"] = facts
    for method, seeds in found.items():
        known[method] = {**known.get(method, {}), **seeds}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def main(chosen: Sequence[str] = METHODS) -> None:
    asked = parse()
    bench = Bench(asked)
    for method in asked.only.split(",") if asked.only else chosen:
        for seed in asked.seeds.split(","):
            figures = getattr(bench, method)(seed)
            print(f"{method} {seed}: {summary(figures)}", flush=True)
            if asked.out:
                write(asked.out, {method: {seed: figures}}, about(asked))


if __name__ == "__main__":
    main()
