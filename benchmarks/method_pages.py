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

from markupsafe import Markup, escape

from penjing.report.charts import CSS, DARK, LIGHT, Axis, Series, line_chart

# A later one's methods take the place of an earlier one's.
RECORDS = (  # of what stands in several, the last counts
    Path("results/methods_2-cores_2026-11-21.json"),
    Path("results/methods_dpo_2-cores_2026-11-24.json"),
    Path("results/methods_2-cores_2026-11-24.json"),
)
SEEDS = ("1", "2", "3")
STEPS = Axis("optimizer steps")


class Plot(NamedTuple):
    """One file. Each curve: name in the legend, run's name without its seed, figure in its metrics.jsonl."""

    name: str
    title: str
    y: Axis
    curves: Sequence[tuple[str, str, str]]
    dots: bool = True  # each point is marked: of figures on held-out data there are few
    seeds: Sequence[str] = SEEDS[:1]


SHARE, NATS = Axis("share", from_zero=True), Axis("nats", from_zero=True)
PLOTS = (
    Plot(
        "dpo_accuracy",
        "Held-out pairs whose margin grew",
        SHARE,
        (
            ("whole model, 5e-5", "dpo", "val_reward_accuracy"),
            ("LoRA, 1e-4", "dpo_lora", "val_reward_accuracy"),
            ("whole model, 3e-4", "dpo_fast", "val_reward_accuracy"),
        ),
    ),
    Plot(
        "dpo_rewards",
        "Implicit rewards on held-out pairs",
        Axis("reward"),
        (
            ("chosen", "dpo", "val_chosen_reward"),
            ("rejected", "dpo", "val_rejected_reward"),
        ),
    ),
    Plot(
        "dpo_kl",
        "KL to the start on the model's own answers",
        Axis("nats per answer", from_zero=True),
        (
            ("whole model, 5e-5", "dpo", "val_kl_per_answer"),
            ("LoRA, 1e-4", "dpo_lora", "val_kl_per_answer"),
            ("whole model, 3e-4", "dpo_fast", "val_kl_per_answer"),
        ),
    ),
    Plot(
        "reward_accuracy",
        "Pairs in order",
        SHARE,
        (
            ("learned from", "reward", "reward_accuracy"),
            ("held out", "reward", "val_reward_accuracy"),
        ),
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
        dots=False,
    ),
    Plot("grpo_entropy", "Entropy of the answers", NATS, (("entropy", "grpo", "entropy"),), dots=False),
    Plot(
        "ppo_reward",
        "1,000 prompts again and again: learned by heart",
        SHARE,
        (("mean reward", "ppo_few", "reward"), ("held out", "ppo_few", "val_exact_match")),
        dots=False,
    ),
    Plot(
        "ppo_new",
        "20,000 prompts: each seen once",
        SHARE,
        (("mean reward", "ppo", "reward"), ("held out", "ppo", "val_exact_match")),
        dots=False,
    ),
    Plot(
        "ppo_value",
        "What PPO's value head has learned",
        Axis("squared error", from_zero=True),
        (("value loss", "ppo", "value_loss"),),
        dots=False,
    ),
    Plot(
        "distillation_kl",
        "KL to the teacher, held out",
        Axis("nats per token", from_zero=True),
        (
            ("logits", "distill-logits", "val_kl"),
            ("top-k", "distill-top_k", "val_kl"),
        ),
    ),
    Plot(
        "distillation_agreement",
        "Likeliest token the same as the teacher's, held out",
        SHARE,
        (
            ("logits", "distill-logits", "val_agreement"),
            ("top-k", "distill-top_k", "val_agreement"),
        ),
    ),
)


def read(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def draw(plot: Plot, work: Path) -> str:
    """The SVG, or nothing where no run has any of its figures."""
    series = []
    for colour, (name, run, figure) in enumerate(plot.curves):
        for seed in plot.seeds:
            lines = read(work / f"{run}-{seed}")
            points = [(line["step"], line[figure]) for line in lines if figure in line]
            dots = plot.dots or figure.startswith("val_")
            series += [Series(name, points, dots=dots, colour=colour)] if points else []
    return str(standalone(line_chart(series, title=plot.title, x=STEPS, y=plot.y), title=plot.title))


_ALONE = f"""
svg {{ --card: #ffffff; --ink: #26251f; --soft: #6b695f; --hair: #e3e0d6; {LIGHT}
  font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; background: var(--card); }}
@media (prefers-color-scheme: dark) {{ svg {{ --card: #1e211d; --ink: #e6e4da; --soft: #a09e92; --hair: #34372f;
  {DARK} }} }}
text {{ fill: var(--soft); }} text.label, text.name {{ fill: var(--ink); }}
{CSS}
"""


def standalone(chart: Markup, *, title: str) -> Markup:
    """A chart as a file of its own: with its colours for light and dark, and its title above it.

    Without points it is empty, as the chart is.
    """
    if not chart:
        return Markup()
    head, _, body = str(chart).partition(">")
    width, height = (int(number) for number in head.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    margin, above = 10, 30
    size = f'viewBox="{-margin} {-above} {width + 2 * margin} {height + above + margin}" width="{width + 2 * margin}"'
    named = f'<text x="2.0" y="-12.0" text-anchor="start" class="label">{escape(title)}</text>'
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
        f"<style>{_ALONE}</style>{named}{body}"
    )


# --- tables ----------------------------------------------------------------------------------------------------------

Record = dict[str, Any]
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


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def changes(record: Record, runs: Sequence[tuple[str, str]], figures: Sequence[tuple[str, str, Any]]) -> str:
    """A line for each method that is on record: each figure before and after, over its seeds."""
    body = []
    for label, method in runs:
        seeds = list(record.get(method, {}).values())
        if not seeds:
            continue
        cells = []
        for _, figure, form in figures:
            ends = [span((seed[figure][end] for seed in seeds), form) for end in ("before", "after")]
            cells.append(ends[1] if ends[0] == ends[1] else " -> ".join(ends))
        body.append([label, str(len(seeds)), *cells])
    return rows(["what", "seeds", *(title for title, _, _ in figures)], body)


OF_PAIRS = (
    ("whole model, 5e-5 (the default)", "dpo"),
    ("whole model, 3e-4", "dpo_fast"),
    ("the same with `objective.nll_weight=1`", "dpo_fast_nll"),
    ("LoRA of rank 8, 1e-4 (the default)", "dpo_lora"),
    ("LoRA of rank 8, 3e-4", "dpo_lora_fast"),
)


def of_pairs(record: Record) -> str:
    head = (
        "what, rate", "seeds", "held-out pairs whose margin grew", "margin", "chosen likelier than rejected",
        "KL on its own answers, nats each", "questions right", "tool calls right",
    )  # fmt: skip
    body = []
    for label, method in OF_PAIRS:
        seeds = list(record.get(method, {}).values())
        if seeds:
            after = [
                {
                    name: figure["after"]
                    for name, figure in seed.items()
                    if isinstance(figure, dict) and "after" in figure
                }
                for seed in seeds
            ]
            cells = [
                span((seed["val_reward_accuracy"] for seed in after), percent),
                span((seed["val_reward_margin"] for seed in after), number),
                of_likelihood(seeds),
                span((seed["val_kl_per_answer"] for seed in after), number),
                *(of_questions(seeds, kind) for kind in ("all", "tool")),
            ]
            body.append([label, str(len(seeds)), *cells])
    return rows(head, body)


def of_likelihood(seeds: Sequence[Record]) -> str:
    ends = (span((seed["val_logp_accuracy"][end] for seed in seeds), percent) for end in ("before", "after"))
    return " -> ".join(ends)


def of_questions(seeds: Sequence[Record], kind: str) -> str:
    """Right before and after, of how many, over the seeds."""
    asked = {seed["questions"][kind]["asked"] for seed in seeds}
    ends = (span((seed["questions"][kind][end] for seed in seeds), str) for end in ("before", "after"))
    return f"{' -> '.join(ends)} of {asked.pop()}"


def of_rewards(record: Record) -> str:
    return changes(
        record,
        (("the quickstart's 1,000 pairs", "reward"), ("4,000 pairs", "reward_more")),
        (
            ("held-out pairs in order", "val_reward_accuracy", percent),
            ("loss", "val_ranking_loss", number),
        ),
    )


def of_policies(*runs: tuple[str, str]) -> Callable[[Record], str]:
    def table(record: Record) -> str:
        figures = (
            ("held-out questions right", "val_exact_match", percent),
            ("of answers drawn as in training", "val_exact_match_drawn", percent),
        )
        return changes(record, runs, figures)

    return table


KINDS = {
    "control": "as many steps more on the student's own labels",
    "sft": "the teacher's answers (`penjing generate`, `train sft`)",
    "logits": "the teacher's predictions for them (`mode=logits`)",
    "top_k": "its 16 likeliest ids, from disk (`mode=top_k`)",
    "on_policy": "its verdict on the student's own answers, after logits (`mode=on_policy`)",
}


def of_distillation(record: Record) -> str:
    seeds = list(record["distill"].values())
    body = [["the teacher", span((seed["accuracy"]["teacher"] for seed in seeds), percent), "", str(len(seeds))]]
    body.append(["the student", span((seed["accuracy"]["student"] for seed in seeds), percent), "", str(len(seeds))])
    for kind, label in KINDS.items():
        mine = [seed for seed in seeds if kind in seed["accuracy"]]
        if mine:
            accuracy = span((seed["accuracy"][kind] for seed in mine), percent)
            shares = [seed["recovered"][kind] for seed in mine if kind in seed["recovered"]]
            body.append([label, accuracy, span(shares, percent) if shares else "", str(len(mine))])
    return rows(["what the student learned from", "held-out questions right", "of the gap", "seeds"], body)


TABLES: dict[str, Callable[[Record], str]] = {
    "dpo": of_pairs,
    "reward": of_rewards,
    "grpo": of_policies(
        ("counting, from a weak start", "grpo"),
        ("all kinds, 20,000 prompts", "grpo_sft"),
        ("all kinds, 1,000 prompts", "grpo_few"),
    ),
    "ppo": of_policies(
        ("PPO, 20,000 prompts", "ppo"),
        ("PPO, 1,000 prompts", "ppo_few"),
        ("GRPO, 20,000 prompts, as many steps", "grpo_sft"),
    ),
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
