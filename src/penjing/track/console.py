"""The terminal: a progress bar with the main metrics, and a line for each validation."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from penjing.base import formatting as units
from penjing.track.base import Tracker


class ConsoleTracker(Tracker):
    """A progress bar on a terminal; one line for each logged step if the output is a file or a pipe."""

    def __init__(self, console: Console, *, name: str, num_steps: int, start_step: int) -> None:
        self.console, self.name, self.num_steps = console, name, num_steps
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self._live,
        )
        self._task = self._progress.add_task(name, total=num_steps, completed=start_step, metrics="")
        self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        text = describe(metrics)
        if any(name.startswith("val_") for name in metrics):
            self._print(f"  {self.name} step {step}/{self.num_steps}: {text}")
            return
        self._progress.update(self._task, completed=step, metrics=text)
        if not self._live:
            left = metrics.get("seconds_left")
            ending = f", {units.duration(left)} left" if left is not None else ""
            self._print(f"  {self.name} step {step}/{self.num_steps}: {text}{ending}")

    def incident(self, incident: Mapping[str, Any]) -> None:
        if note := incident.get("note"):
            self._print(f"  {self.name} step {incident['step']}: {note}")

    def rewind(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False)

    def end(self) -> None:
        self._progress.stop()


LATE = 0.08  # fraction over a step's planned time above which a line names the cause
# Metrics shown for a step, in this order; validation metrics have the prefix `val_`. All are in metrics.jsonl.
SHOWN = (
    ("loss", "loss {:.3f}"),
    ("bits_per_byte", "{:.3f} bits per byte"),
    ("kl", "KL {:.3f}"),
    ("preference_loss", "loss {:.3f}"),
    ("ranking_loss", "loss {:.3f}"),
    ("reward_accuracy", "accuracy {:.1%}"),
    ("reward_margin", "margin {:.2f}"),
    ("exact_match", "exact match {:.1%}"),
    ("reward", "reward {:.3f}"),
    ("entropy", "entropy {:.2f}"),
    ("frac_zero_reward_std", "zero reward std {:.0%}"),
    ("answer_tokens", "{:.0f} tokens per answer"),
    ("mean_expert_load_ratio", "expert load {:.2f} x mean"),
    ("skipped_steps", "skipped steps {:.0f} (NaN or Inf)"),
)


BY_SOURCE = ("val_bits_per_byte_", "val_loss_")  # prefixes of what is measured for each source of the data
BY_TASK = "val_acc_"  # prefix of what is measured for each of `eval.tasks`


def describe(metrics: Mapping[str, float]) -> str:
    """The metrics of one step in one short line, without those that are absent."""
    is_validation = any(name.startswith("val_") for name in metrics)
    prefix = "val_" if is_validation else ""
    parts = [template.format(metrics[prefix + name]) for name, template in SHOWN if prefix + name in metrics]
    if is_validation and parts:
        parts[0] = f"held-out {parts[0]}"
    by_source = [
        f"{name.removeprefix(kind)} {value:.3f}"
        for kind in BY_SOURCE
        for name, value in metrics.items()
        if name.startswith(kind)
    ]
    if by_source:
        parts.append(f"({', '.join(by_source)})")
    parts += [
        f"{name.removeprefix(BY_TASK)} {value:.1%}" for name, value in metrics.items() if name.startswith(BY_TASK)
    ]
    if "learning_rate" in metrics:
        parts.append(f"lr {metrics['learning_rate']:.1e}")
    if "tokens_per_second" in metrics:
        parts.append(f"{units.count(metrics['tokens_per_second'])} tok/s")
    if metrics.get("mfu"):
        parts.append(f"MFU {metrics['mfu']:.0%} causal")
    if "memory_bytes" in metrics:
        parts.append(units.gibibytes(metrics["memory_bytes"]))
    over = metrics.get("seconds_over_plan", 1.0) - 1
    if over > LATE:
        waits = metrics.get("wait_over_plan", 0.0) > over / 2
        parts.append(f"{over:.0%} slower than planned: {'waits for data' if waits else 'computation'}")
    return "  ".join(parts)
