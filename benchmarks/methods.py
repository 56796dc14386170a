"""What each method after SFT teaches the quickstart's model: before and after, on held-out pairs and questions.

Run: python benchmarks/methods.py runs/quickstart --out results/methods.json            (everything, three seeds each)
     python benchmarks/methods.py runs/quickstart --only dpo,reward --seeds 1 --out ...  (adds to what the file holds)

dpo, dpo_lora, reward: the quickstart's SFT model on its own pairs; dpo_fast, dpo_fast_nll, dpo_lora_fast: at rates
that are too high; reward_more: on four times as many pairs, of another seed's world. grpo: a weak SFT (700 steps from
the pretrained model) on the toy world's counting questions. grpo_sft, ppo: the SFT model on 20,000 prompts of all
kinds; grpo_few, ppo_few: on the first 1,000 of the quickstart's, which come again and again.
distill: the SFT model is the teacher; the student is the same pretrained model after SFT on 300 labelled
conversations. 3,072 further conversations have questions only, which the teacher answers. As many further steps are
taken on the student's own labels (the control), on the teacher's answers (sft), on its predictions for them (logits,
top_k), and on its verdict on what the student writes (on_policy).
tools_off, tools_on: SFT on the toy world's tool conversations, half of them with thoughts, is stopped early, so that
calls are made but often wrong; GRPO then answers held-in questions, with or without thoughts and with the calculator
really run between the turns, and is judged on held-out ones.

Runs that are there already are not made again. `benchmarks/method_pages.py` puts them into docs/methods.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from training_step import arguments

from penjing.base.files import read_json, write_json

PENJING = [sys.executable, "-m", "penjing"]
QUIET = ("eval.every=0", "sample.every=0")
FAST = "optimizer.learning_rate=3e-4"  # six times the recipe's rate
# Recipe and settings, by method.
PAIRS = {
    "dpo": ("dpo",),
    "dpo_fast": ("dpo", FAST),
    "dpo_fast_nll": ("dpo", FAST, "objective.nll_weight=1"),
    "dpo_lora": ("dpo", "lora.rank=8"),
    "dpo_lora_fast": ("dpo", "lora.rank=8", FAST),
    "reward": ("reward",),
    "reward_more": ("reward", "eval.sequences=400"),
}
PROMPTS = {"grpo_sft": "grpo", "grpo_few": "grpo", "ppo": "ppo", "ppo_few": "ppo"}
TOOLS = (
    "objective.rollout.tools=calculator",
    "objective.rollout.max_turns=4",
    "objective.rollout.max_new_tokens=240",
    "objective.rewards=exact",
    "data.seq_len=512",
    "eval.sequences=256",
)
METHODS = (*PAIRS, "grpo", *PROMPTS, "distill", "tools_off", "tools_on")
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
    parser = arguments(__doc__)
    parser.add_argument("quickstart", type=Path, help="a finished quickstart's folder")
    parser.add_argument("--work", type=Path, default=Path("runs/methods"), help="folder of the runs (%(default)s)")
    parser.add_argument("--only", default=",".join(METHODS), help="some of the methods (default: all)")
    parser.add_argument("--kinds", default="", help="of distill: control,sft,logits,top_k,on_policy (default: all)")
    parser.add_argument("--seeds", default="1,2,3", help="(default: %(default)s)")
    parser.add_argument("--shared", action="store_true", help="other work runs beside it: its seconds mean nothing")
    return parser.parse_args()


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


class Bench:
    """Where runs lie and how they are made."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.quickstart: Path = asked.quickstart
        self.work: Path = asked.work
        self.data = self.quickstart / "data"
        self.tuned = f"init_from={self.quickstart / 'sft'}"
        self.pretrained = f"init_from={self.quickstart / 'pretrain'}"
        self.known = f"eval.questions={self.data / 'eval.jsonl'}"  # held out, asked before and after
        self.work.mkdir(parents=True, exist_ok=True)

    def figures(self, method: str, seed: str) -> dict[str, Any]:
        """What a method came to."""
        if method == "distill":
            return self.distill(seed)
        name, same_seed = f"{method}-{seed}", f"seed={seed}"
        if method in PAIRS:
            recipe, *more = PAIRS[method]
            data = self.data / "dpo.jsonl"
            if method == "reward_more":
                data = self.toy("pairs", 7, "dpo.jsonl", preferences=4_000)
            settings = [self.tuned, f"data.train={data}", self.known, *more]
        elif method in PROMPTS:
            recipe, data = PROMPTS[method], self.few() if method.endswith("_few") else self.prompts()
            settings = [self.tuned, f"data.train={data}", "max_steps=150", "eval.every=50", self.known]
        elif method == "grpo":
            recipe, settings = "grpo", self.counting()
        else:
            recipe, settings = "grpo", self.tools(thinking=method.removeprefix("tools_"))
        return judged(self.train(recipe, name, same_seed, *settings))

    def penjing(self, *words: object) -> None:
        subprocess.run([*PENJING, *map(str, words)], check=True, stdout=subprocess.DEVNULL)

    def train(self, recipe: str, name: str, *settings: object) -> dict[str, Any]:
        """The outcome of a run."""
        out = self.work / name
        self.penjing("train", recipe, f"out={out}", f"compute.threads={self.asked.threads}", *settings)
        return dict(read_json(out / "outcome.json"))

    def toy(self, name: str, seed: int, file: str, **sizes: int) -> Path:
        """A file of a toy world of its own, made once."""
        path = self.work / name / file
        if not path.is_file():
            sizes = {"documents": 10, "conversations": 10, "preferences": 10, "prompts": 10, "seed": seed, **sizes}
            words = chain.from_iterable((f"--{option}", size) for option, size in sizes.items())
            self.penjing("data", "toyworld", "--out", path.parent, *words)
        return path

    def prompts(self) -> Path:
        """Prompts of all kinds, more than the quickstart makes."""
        return self.toy("world", 5, "rl.jsonl", prompts=20_000)

    def few(self) -> Path:
        """The first thousand of the quickstart's prompts."""
        file = self.work / "few.jsonl"
        file.write_text("".join(lines_of(self.data / "rl.jsonl")[:1_000]), encoding="utf-8")
        return file

    def counting(self) -> list[str]:
        """A weak model on questions of one kind."""
        file = self.work / "counting.jsonl"
        if not file.is_file():
            counts = [line for line in lines_of(self.prompts()) if json.loads(line)["kind"] == "count"]
            file.write_text("".join(counts), encoding="utf-8")
        chats = f"data.train={self.data / 'sft.jsonl'}"
        self.train("tiny_sft", "weak", self.pretrained, chats, "max_steps=700", *QUIET)
        weak = f"init_from={self.work / 'weak'}"
        return [weak, f"data.train={file}", "max_steps=250", "eval.every=50", self.known]

    def tools(self, *, thinking: str) -> list[str]:
        """A model that calls a calculator, but often wrongly."""
        chats = self.toy("tools_world", 1, "tools.jsonl", tools=12_000)
        settings = (f"data.train={chats}", "data.thinking=switch", "data.seq_len=512", "max_steps=200")
        self.train("tiny_sft", "tools_sft", self.tuned, *settings, *QUIET)
        data, start = f"data.train={chats.with_name('tools_rl.jsonl')}", f"init_from={self.work / 'tools_sft'}"
        return [start, data, f"objective.rollout.thinking={thinking}", *TOOLS, "max_steps=150", "eval.every=0"]

    def accuracy(self, run: Path) -> float:
        """Share of the quickstart's held-out questions that a run's model answers exactly right."""
        from penjing.eval.questions import Questions
        from penjing.eval.scorer import accuracy, grade
        from penjing.train.load_model import load_trained, set_threads

        set_threads(self.asked.threads, 1)
        known = run / "accuracy.json"
        if not known.is_file():
            trained = load_trained(run)
            asked = Questions(self.data / "eval.jsonl")
            write_json(known, accuracy(grade(asked, asked.requests(), trained.model, trained.tokenizer)))
        return float(read_json(known))

    def distill(self, seed: str) -> dict[str, Any]:
        labelled, answers = self.distillation_data()
        words = (f"seed={seed}", *QUIET)
        start = (self.pretrained, f"data.train={labelled}", f"max_steps={STUDENT_STEPS}")
        self.train("tiny_sft", f"student-{seed}", *start, *words)
        student, steps = f"init_from={self.work / f'student-{seed}'}", f"max_steps={DISTILL_STEPS}"
        teacher = (f"objective.teacher={self.quickstart / 'sft'}", "objective.ce_weight=0", "data.format=chats")
        taught = (f"data.train={answers}", f"seed={seed}", "eval.every=100", *teacher, *TINY)
        kinds: dict[str, tuple[str, tuple[str, ...]]] = {
            "control": ("tiny_sft", (student, f"data.train={labelled}", steps, *words)),
            "sft": ("tiny_sft", (student, f"data.train={answers}", steps, *words)),
            "logits": ("distill", (student, *taught, steps)),
            "top_k": ("distill", (student, *taught, steps, "objective.mode=top_k")),
            "on_policy": (
                "distill",
                # From where the logits have brought it: a student that goes astray writes nothing worth a verdict.
                (f"init_from={self.work / f'distill-logits-{seed}'}", *taught, "objective.mode=on_policy",
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
            lines = lines_of(self.data / "sft.jsonl")
            labelled.write_text("".join(lines[:LABELLED]), encoding="utf-8")
            asked.write_text("".join(lines[FIRST_ASKED : FIRST_ASKED + ASKED]), encoding="utf-8")
        words = ("--prompts", asked, "--out", answers, "--every-turn", "--max-tokens", 48)
        self.penjing("generate", self.quickstart / "sft", *words)
        return labelled, answers


def judged(done: dict[str, Any]) -> dict[str, Any]:
    """Of an outcome, the seconds, every held-out figure and the questions by kind, before and after."""
    from penjing.base.accuracy import change_lines, scores_from_rows

    figures = {name: {"before": first, "after": done[name]} for name, first in done["before"].items()}
    found: dict[str, Any] = {"seconds": done["seconds"], **figures}
    if "questions" in done:
        asked = done["questions"]
        found["questions"] = {
            line.name: {
                "asked": line.before.total,
                "before": line.before.correct,
                "after": line.after.correct,
                "lost": line.is_regression,
            }
            for line in change_lines(scores_from_rows(asked["before"], asked["after"]))
        }
    return found


def recovered(found: dict[str, float]) -> dict[str, Any]:
    """Accuracies, and which share of the way from the control to the teacher each kind has gone."""
    gap = found["teacher"] - found.get("control", float("nan"))
    kinds = [name for name in found if name not in ("teacher", "student", "control")]
    shares = {name: (found[name] - found["control"]) / gap for name in kinds} if gap > 0 else {}
    return {"accuracy": found, "recovered": shares}


def summary(figures: dict[str, Any]) -> str:
    if "accuracy" in figures:
        return ", ".join(f"{name} {share:.1%}" for name, share in figures["accuracy"].items())
    name = next(name for name in ("val_exact_match", "val_reward_accuracy") if name in figures)
    return f"{figures[name]['before']:.1%} -> {figures[name]['after']:.1%}"


def about(asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    from penjing import devices
    from penjing.plan.hardware import environment

    device = torch.device("cpu")
    dtype = devices.of(device).compute_dtype("auto", device)
    found = environment(device, dtype, threads=asked.threads or os.cpu_count())
    return {**found, "seconds_are_comparable": not asked.shared}


def main() -> None:
    asked = parse()
    bench = Bench(asked)
    for method in asked.only.split(","):
        for seed in asked.seeds.split(","):
            figures = bench.figures(method, seed)
            print(f"{method} {seed}: {summary(figures)}", flush=True)
            if asked.out:  # beside what the file holds already
                known = read_json(asked.out) if asked.out.is_file() else {}
                write_json(
                    asked.out, {**known, "about": about(asked), method: {**known.get(method, {}), seed: figures}}
                )


if __name__ == "__main__":
    main()
