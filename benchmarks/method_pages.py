"""Put what benchmarks/methods.py found into docs/methods: tables from its record, plots from its runs.

Run: python benchmarks/method_pages.py --work runs/methods     (without --work: the tables only)

A page says where a table goes: between <!-- table: NAME --> and <!-- end -->. tests/docs/test_methods.py compares.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compare.table import ResultTable
from steps.standalone_chart import line_chart, standalone

from penjing.base.untrusted import read_lines
from penjing.report.charts import Axis, Series

# A later one's methods take the place of an earlier one's.
RECORDS = (
    Path("results/methods_2-cores_2026-11-21.json"),
    Path("results/methods_dpo_2-cores_2026-11-24.json"),
    Path("results/methods_2-cores_2026-11-24.json"),
)
STEPS = Axis("optimizer steps")


class Plot(NamedTuple):
    """One file. Each curve: name in the legend, run's name without its seed, figure in its metrics.jsonl."""

    name: str
    title: str
    y: Axis
    curves: Sequence[tuple[str, str, str]]


def of_rates(figure: str) -> list[tuple[str, str, str]]:
    labels = {"dpo": "whole model, 5e-5", "dpo_lora": "LoRA, 1e-4", "dpo_fast": "whole model, 3e-4"}
    return [(label, run, figure) for run, label in labels.items()]


def of_teacher(figure: str) -> list[tuple[str, str, str]]:
    return [("logits", "distill-logits", figure), ("top-k", "distill-top_k", figure)]


SHARE, NATS = Axis("share", from_zero=True), Axis("nats", from_zero=True)
PLOTS = (
    Plot("dpo_accuracy", "Held-out pairs whose margin grew", SHARE, of_rates("val_reward_accuracy")),
    Plot(
        "dpo_rewards",
        "Implicit rewards on held-out pairs",
        Axis("reward"),
        (("chosen", "dpo", "val_chosen_reward"), ("rejected", "dpo", "val_rejected_reward")),
    ),
    Plot(
        "dpo_kl",
        "KL to the start on the model's own answers",
        Axis("nats per answer", from_zero=True),
        of_rates("val_kl_per_answer"),
    ),
    Plot(
        "reward_accuracy",
        "Pairs in order",
        SHARE,
        (("learned from", "reward", "reward_accuracy"), ("held out", "reward", "val_reward_accuracy")),
    ),
    Plot(
        "grpo_reward",
        "Counting, from a weak start",
        SHARE,
        (
            ("mean reward", "grpo", "reward"),
            ("equal groups", "grpo", "frac_zero_reward_std"),
            ("held out", "grpo", "val_exact_match"),
        ),
    ),
    Plot("grpo_entropy", "Entropy of the answers", NATS, (("entropy", "grpo", "entropy"),)),
    Plot(
        "ppo_reward",
        "1,000 prompts again and again: learned by heart",
        SHARE,
        (("mean reward", "ppo_few", "reward"), ("held out", "ppo_few", "val_exact_match")),
    ),
    Plot(
        "ppo_new",
        "20,000 prompts: each seen once",
        SHARE,
        (("mean reward", "ppo", "reward"), ("held out", "ppo", "val_exact_match")),
    ),
    Plot(
        "ppo_value",
        "What PPO's value head has learned",
        Axis("squared error", from_zero=True),
        (("value loss", "ppo", "value_loss"),),
    ),
    Plot(
        "distillation_kl", "KL to the teacher, held out", Axis("nats per token", from_zero=True), of_teacher("val_kl")
    ),
    Plot(
        "distillation_agreement",
        "Likeliest token the same as the teacher's, held out",
        SHARE,
        of_teacher("val_agreement"),
    ),
)


def draw(plot: Plot, work: Path) -> str:
    """The SVG, of the first seed's runs, or nothing where none has any of its figures. Points on held-out data, which
    are few, are marked."""
    series = []
    for colour, (name, run, figure) in enumerate(plot.curves):
        points = [
            (line["step"], line[figure]) for line in read_lines(work / f"{run}-1/metrics.jsonl") if figure in line
        ]
        series += [Series(name, points, dots=figure.startswith("val_"), colour=colour)] if points else []
    return str(standalone(line_chart(series, title=plot.title, x=STEPS, y=plot.y), title=plot.title))


# --- tables ----------------------------------------------------------------------------------------------------------

Record = dict[str, Any]
Cell = Callable[[Sequence[Record]], str]  # from a method's seeds
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def percent(value: float) -> str:
    return f"{value * 100:.0f} %"


def number(value: float) -> str:
    return f"{value:.2g}"


def span(values: Iterable[float], form: Callable[[float], str]) -> str:
    """Lowest to highest of the seeds, or the one value."""
    values = list(values)
    shown = [form(value) for value in (min(values), max(values))]
    return shown[0] if shown[0] == shown[1] else " to ".join(shown)


def after(figure: str, form: Callable[[float], str]) -> Cell:
    return lambda seeds: span((seed[figure]["after"] for seed in seeds), form)


def change(figure: str, form: Callable[[float], str]) -> Cell:
    """Before -> after."""
    return lambda seeds: " -> ".join(span((seed[figure][end] for seed in seeds), form) for end in ("before", "after"))


def questions(kind: str) -> Cell:
    """Right before and after, of how many."""

    def cell(seeds: Sequence[Record]) -> str:
        mine = [seed["questions"] for seed in seeds]
        return f"{change(kind, str)(mine)} of {mine[0][kind]['asked']}"

    return cell


def table(first: str, runs: dict[str, str], columns: dict[str, Cell]) -> Callable[[Record], str]:
    """A line for each method that is on record. runs: labels by method."""

    def made(record: Record) -> str:
        body = []
        for method, label in runs.items():
            if seeds := list(record.get(method, {}).values()):
                body.append([label, str(len(seeds)), *(cell(seeds) for cell in columns.values())])
        return ResultTable([first, "seeds", *columns], body).markdown()

    return made


OF_PAIRS = {
    "dpo": "whole model, 5e-5 (the default)",
    "dpo_fast": "whole model, 3e-4",
    "dpo_fast_nll": "the same with `objective.nll_weight=1`",
    "dpo_lora": "LoRA of rank 8, 1e-4 (the default)",
    "dpo_lora_fast": "LoRA of rank 8, 3e-4",
}
PAIR_FIGURES = {
    "held-out pairs whose margin grew": after("val_reward_accuracy", percent),
    "margin": after("val_reward_margin", number),
    "chosen likelier than rejected": change("val_logp_accuracy", percent),
    "KL on its own answers, nats each": after("val_kl_per_answer", number),
    "questions right": questions("all"),
    "tool calls right": questions("tool"),
}
OF_REWARDS = {"reward": "the quickstart's 1,000 pairs", "reward_more": "4,000 pairs"}
REWARD_FIGURES = {
    "held-out pairs in order": change("val_reward_accuracy", percent),
    "loss": change("val_ranking_loss", number),
}
OF_GRPO = {
    "grpo": "counting, from a weak start",
    "grpo_sft": "all kinds, 20,000 prompts",
    "grpo_few": "all kinds, 1,000 prompts",
}
OF_PPO = {
    "ppo": "PPO, 20,000 prompts",
    "ppo_few": "PPO, 1,000 prompts",
    "grpo_sft": "GRPO, 20,000 prompts, as many steps",
}
POLICY_FIGURES = {
    "held-out questions right": change("val_exact_match", percent),
    "of answers drawn as in training": change("val_exact_match_drawn", percent),
}
OF_DISTILLATION = {
    "teacher": "the teacher",
    "student": "the student",
    "control": "as many steps more on the student's own labels",
    "sft": "the teacher's answers (`penjing generate`, `train sft`)",
    "logits": "the teacher's predictions for them (`mode=logits`)",
    "top_k": "its 16 likeliest ids, from disk (`mode=top_k`)",
    "on_policy": "its verdict on the student's own answers, after logits (`mode=on_policy`)",
}


def of_distillation(record: Record) -> str:
    body = []
    for kind, label in OF_DISTILLATION.items():
        mine = [seed for seed in record["distill"].values() if kind in seed["accuracy"]]
        if mine:
            shares = [seed["recovered"][kind] for seed in mine if kind in seed["recovered"]]
            accuracy = span((seed["accuracy"][kind] for seed in mine), percent)
            body.append([label, accuracy, span(shares, percent) if shares else "", str(len(mine))])
    headings = ["what the student learned from", "held-out questions right", "of the gap", "seeds"]
    return ResultTable(headings, body).markdown()


TABLES: dict[str, Callable[[Record], str]] = {
    "dpo": table("what, rate", OF_PAIRS, PAIR_FIGURES),
    "reward": table("what", OF_REWARDS, REWARD_FIGURES),
    "grpo": table("what", OF_GRPO, POLICY_FIGURES),
    "ppo": table("what", OF_PPO, POLICY_FIGURES),
    "distillation": of_distillation,
}


def read_records(folder: Path = Path()) -> Record:
    """What was found, each method's by its newest record."""
    record: Record = {}
    for file in RECORDS:
        record |= json.loads((folder / file).read_text(encoding="utf-8"), object_hook=with_new_names)
    return record


def with_new_names(table: Record) -> Record:
    """Metrics of records that were made before 0.2 under the names that they have now."""
    bare = {"kl_nats_per_answer": "kl_per_answer", "likelihood_accuracy": "logp_accuracy"}
    pairs = ((name.removeprefix("validation_"), name, value) for name, value in table.items())
    return {name if short == name else f"val_{bare.get(short, short)}": value for short, name, value in pairs}


def filled(page: str, record: Record) -> str:
    """The page with its tables as the record has them."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]](record) + found[3], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None, help="folder of the runs; without it no plots are drawn")
    parser.add_argument("--docs", type=Path, default=Path("docs/methods"), help="(default: %(default)s)")
    asked = parser.parse_args()
    record = read_records()
    for page in sorted(asked.docs.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8"), record), encoding="utf-8")
    if asked.work is None:
        return
    plots = asked.docs / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for plot in PLOTS:
        drawing = draw(plot, asked.work)
        if drawing:
            (plots / f"{plot.name}.svg").write_text(drawing + "\n", encoding="utf-8")
        print(f"{plot.name}: {'drawn' if drawing else 'no run has its figures'}")


if __name__ == "__main__":
    main()
