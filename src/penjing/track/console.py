"""The terminal: a progress bar with the main figures, and a line for each validation."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from penjing.base import formatting as units


class ConsoleTracker:
    """A live bar on a terminal; a plain line for each logged step where the output is a file or a pipe."""

    def __init__(self, console: Console, *, name: str, num_steps: int, start_step: int) -> None:
        self.console, self.name, self.num_steps = console, name, num_steps
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self._live,
        )
        self._task = self._progress.add_task(name, total=num_steps, completed=start_step, figures="")
        self._progress.start()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        text = describe(figures)
        if any(name.startswith("val_") for name in figures):
            self._say(f"  {self.name} step {step}/{self.num_steps}: {text}")
            return
        self._progress.update(self._task, completed=step, figures=text)
        if not self._live:
            left = figures.get("seconds_left")
            ending = f", {units.duration(left)} left" if left is not None else ""
            self._say(f"  {self.name} step {step}/{self.num_steps}: {text}{ending}")

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()


LATE = 0.08  # fraction over a step's planned time above which a line names the cause
# Shown of a step, in this order; validation figures have the prefix `val_`. The rest is in metrics.jsonl.
SHOWN = (
    ("loss", "loss {:.3f}"),
    ("bits_per_byte", "{:.3f} bits/byte"),
    ("kl", "KL {:.3f}"),
    ("preference_loss", "loss {:.3f}"),
    ("reward_loss", "loss {:.3f}"),
    ("reward_accuracy", "accuracy {:.1%}"),
    ("reward_margin", "margin {:.2f}"),
    ("exact_match", "exact match {:.1%}"),
    ("reward", "reward {:.3f}"),
    ("entropy", "entropy {:.2f}"),
    ("frac_zero_reward_std", "zero reward std {:.0%}"),
    ("answer_tokens", "{:.0f} tokens per answer"),
    ("mean_expert_load_ratio", "expert load {:.2f} x mean"),
)


def describe(figures: Mapping[str, float]) -> str:
    """The figures of one step in one short line; absent ones are left out."""
    is_validation = any(name.startswith("val_") for name in figures)
    before = "val_" if is_validation else ""
    parts = [form.format(figures[before + name]) for name, form in SHOWN if before + name in figures]
    if is_validation and parts:
        parts[0] = f"validation {parts[0]}"
    if "learning_rate" in figures:
        parts.append(f"lr {figures['learning_rate']:.1e}")
    if "tokens_per_second" in figures:
        parts.append(f"{units.count(figures['tokens_per_second'])} tok/s")
    if figures.get("mfu"):
        parts.append(f"MFU {figures['mfu']:.0%} causal")
    if "memory_bytes" in figures:
        parts.append(units.gibibytes(figures["memory_bytes"]))
    over = figures.get("seconds_over_plan", 1.0) - 1
    if over > LATE:
        waits = figures.get("wait_over_plan", 0.0) > over / 2
        parts.append(f"{over:.0%} slower than planned: {'waits for data' if waits else 'computation'}")
    return "  ".join(parts)
