"""The size and length of a training on data of one's own: chosen, shown, kept, and compared with the actual ones."""

from collections.abc import Mapping

from rich.console import Console

from penjing.base import formatting as units
from penjing.base.config import Layer
from penjing.base.markup import print_table
from penjing.model.config import ModelConfig
from penjing.plan.little_data import Candidate, Text, candidates, chosen, settings_of, sizes
from penjing.track.run_record import RunRecord
from penjing.train.config import Run
from penjing.train.resolve import decide, with_settings
from penjing.train.shape_timing import StepTimer
from penjing.workflows.stage_log import StageLog


def fit_to_text(run: Run, requested: Layer, seconds: float, log: StageLog, *, has_chats: bool) -> Run:
    """The run with the size and length for the bytes of the data stage and `seconds`, where `requested` does not say
    otherwise. has_chats: SFT follows. A quickstart that goes on keeps what it chose."""
    if "choice" not in log.facts:
        data, timer = log.facts["data"], StepTimer()
        # Chinese needs an id for each common character; conversations have to fit in the context.
        min_vocab_size = 2048 if has_chats or data["han_fraction"] > 0.3 else Text.min_vocab_size
        text = Text(num_bytes=data["bytes"], min_vocab_size=min_vocab_size)

        def time_step(model: ModelConfig) -> tuple[float, float]:
            return timer.time_step(with_settings(run, {"model": model}))

        models = [run.model] if "model" in requested else list(sizes(text))
        found = candidates(text, seconds, run.data.seq_len, time_step, models)
        one = chosen(found)
        summary = f"{units.count(one.parameters)} parameters, {one.epochs:.1f} epochs"
        why = f"for {units.megabytes(text.num_bytes)} and {units.duration(seconds)} here: {summary}"
        print_candidates(found, one, why, log.console)
        figures = {name: getattr(one, name) for name in ("parameters", "steps", "epochs", "seconds")}
        log.record(choice={"why": why, "settings": settings_of(one), "predicted": figures})
    for name, (value, why) in log.facts["choice"]["settings"].items():
        if not _is_requested(requested, name):
            run = decide(run, name, value, why)
    return run


def _is_requested(requested: Layer, name: str) -> bool:
    group, _, field = name.partition(".")
    table = requested.get(group, {})
    if name == "max_steps":
        return bool({"max_steps", "epochs"} & requested.keys())
    if not isinstance(table, Mapping):
        return True
    # Another optimizer has other settings; "" is that of `optimizer=adamw`.
    return bool(table) if group == "model" else not table.keys().isdisjoint((field, "name", ""))


def print_candidates(found: list[Candidate], one: Candidate, title: str, console: Console) -> None:
    rows = []
    for each in found:
        verdict = each.against or "smaller than needed"
        if each is one:
            verdict = f"chosen, the smallest: {one.against}" if one.against else "chosen"
        size, steps = f"  {units.count(each.parameters)}", f"{each.steps:,} x {each.rows}"
        epochs, ratio = f"{each.epochs:.1f}", f"{each.tokens / each.parameters:.1f}"
        rows.append((size, steps, units.duration(each.seconds), epochs, ratio, verdict))
    headings = ("  parameters", "steps x rows>", "time>", "epochs>", "tokens per parameter>", "")
    print_table(console, headings, rows, title=title)


def compare_choice(log: StageLog, record: RunRecord) -> None:
    """Print and record predicted and actual steps, epochs and time, and the delivered model's bits per byte."""
    choice, outcome, plan = log.facts["choice"], record.outcome.raw, record.plan.raw
    predicted = choice["predicted"]
    share = outcome["tokens"] / plan["tokens"]  # less than 1 if held-out loss rose
    rows = [
        ("steps", f"{predicted['steps']:,}", f"{round(share * plan['steps']):,}"),
        ("epochs", f"{predicted['epochs']:.1f}", f"{share * plan['epochs']:.1f}"),
        ("training time", units.duration(predicted["seconds"]), units.duration(outcome["training_seconds"])),
    ]
    if "val_bits_per_byte" in outcome:
        rows.append(("held-out bits per byte", "", f"{outcome['val_bits_per_byte']:.3f}"))
    log.record(choice={**choice, "rows": [{"name": name, "text": f"{was or '?'} → {now}"} for name, was, now in rows]})
    print_table(log.console, ("", "predicted>", "actual>"), [(f"  {name}", *rest) for name, *rest in rows])
