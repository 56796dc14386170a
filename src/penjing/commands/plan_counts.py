"""penjing plan tokens and plan estimate: answers that need a model's size only, and no torch."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console

from penjing.base import config
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.markup import escape_markup, print_table
from penjing.model.config import ModelConfig
from penjing.plan import compute_optimal as tokens
from penjing.plan import cost
from penjing.plan.device_model import LEVELS, MARGINS, Machine, machine_of_card
from penjing.plan.gpu_specs import CARDS, Card, find_card
from penjing.plan.profile import gpu_called
from penjing.plan.shape import Shape, shape_of
from penjing.plan.step_time import interval, step_time
from penjing.plan.step_workload import Workload


def model_of(count: int) -> ModelConfig:
    """A model of ours with about so many parameters: the nearest rung of the ladder, which ends at 3B."""
    count = min(count, 3_000_000_000)
    size = f"{max(1, round(count / 1e6))}m" if count >= 1e6 else f"{max(500, round(count / 1e3))}k"
    return config.resolve(ModelConfig, {"preset": f"ladder-{size}"})


def print_tokens(size: str, unique: str, hours: str, gpu: str, gpus: int, console: Console) -> None:
    """How many tokens a model of this size wants, what repeating is worth, and what a time allows."""
    count = cost.read_count(size, "--params")
    shape, law = shape_of(model_of(count)), tokens.LAWS["corrected"]
    best = tokens.advise(count, round(count * shape.matrices / shape.parameters))
    console.print(
        f"{units.count(count)} parameters, all counted: compute-optimal is {units.count(best.tokens)} tokens "
        f"({units.count(best.low)} to {units.count(best.high)}, four of five refits; arXiv:2404.10102), "
        f"{best.tokens / count:.1f} a parameter"
    )
    console.print(
        f"  counting matrices and head alone, {tokens.MATRICES_RATIO} a parameter: {units.count(best.by_matrices)}"
    )
    base = law.loss(count, best.tokens)
    for ratio in tokens.RATIOS:
        gain = law.loss(count, ratio * count) - base
        console.print(f"  {ratio:>4} a parameter = {units.count(ratio * count)}: {gain:+.3f} nats")
    if unique:
        there = cost.read_count(unique, "--unique")
        rows = [
            (
                epochs,
                units.count(there * epochs),
                units.count(round(tokens.repeated_tokens(there, epochs))),
                f"{tokens.repeat_worth(epochs):.0%}",
            )
            for epochs in (1, 2, 4, 8, 16, 40)
        ]
        print_table(console, ("epochs>", "tokens>", "worth in unique tokens>", "each>"), rows)
        for line in tokens.small_data_advice(count, there):
            console.print(f"  {line}")
    if hours:
        _print_tokens_in(hours, count, shape, gpu, gpus, console)


def _print_tokens_in(hours: str, count: int, shape: Shape, gpu: str, gpus: int, console: Console) -> None:
    """How many tokens a time allows on so many GPUs, or on this machine."""
    budget = cost.read_budget(hours if not hours.replace(".", "").isdigit() else f"{hours}h", "--hours")
    if not budget.seconds:
        raise UserError("not a time", where="--hours", got=repr(hours), wanted="such as 2, 2h or 90min")
    machine, notes = (gpu_called(gpu), []) if gpu else _this_machine()
    work = Workload(shape=shape, tokens=16384, seq_len=512, keys=256.5, dtype=machine.fastest_dtype)
    rate = work.tokens * gpus / step_time(work, machine).seconds
    done = rate * budget.seconds * shape.parameters / count
    low, high = interval(done, MARGINS[machine.level])
    console.print(
        f"  {units.duration(budget.seconds)} on {gpus} x {machine.name} ({machine.level}, "
        f"{LEVELS[machine.level]}) is {units.count(round(done))} tokens ({units.count(round(low))} to "
        f"{units.count(round(high))}), {done / count:.0f} a parameter"
    )
    best_size = tokens.LAWS["corrected"].parameters_for(done)
    console.print(f"  compute-optimal for so many tokens: {units.count(round(best_size))} parameters")
    for note in notes:
        console.print(escape_markup("note", note))


def _this_machine() -> tuple[Machine, list[str]]:
    from penjing.commands.plan_run import PlanOptions, find_machine  # imports torch
    from penjing.train.config import Run

    machine, _, notes = find_machine(PlanOptions(), Run())
    return machine, notes


def print_estimate(size: str, amount: str, tflops: float, gpu: str, console: Console) -> None:
    """6 N D / peak as everybody has it, beside what we would say for a model of ours of that size."""
    count, total = cost.read_count(size, "--params"), cost.read_count(amount, "--tokens")
    if not tflops and not gpu:
        raise UserError("no speed", where="--tflops", next_step='Give --tflops 75, or --gpu "RTX 3090".')
    card = find_card(gpu) if gpu else nearest_card(tflops)
    peak = tflops or card.half
    plain = 6 * count * total / (peak * 1e12)
    machine = machine_of_card(card)
    shape = shape_of(model_of(count))
    seconds, flops = own_estimate(shape, count, total, machine)
    low, high = interval(seconds, MARGINS["L0"])
    console.print(
        f"textbook: 6 x {units.count(count)} x {units.count(total)} / {peak:g} TFLOPS = {units.duration(plain)} "
        f"({plain / 60:.0f} min), at a utilisation nobody reaches"
    )
    console.print(
        f"ours: {units.duration(seconds)} ({units.duration(low)} to {units.duration(high)}; L0, {card.name}), "
        f"{plain / seconds * peak / card.half:.0%} of the card's {card.half:g} TFLOPS by the same formula"
    )
    for name, share in flops.items():
        console.print(f"  {name:<12} {share:.0%}")
    weights = 4 * count / 1e9  # and as much for gradients, and for each of Adam's two moments
    console.print(
        f"memory, textbook: weights {weights:.3g} GB + gradients {weights:.3g} GB + Adam {2 * weights:.3g} GB = "
        f"{4 * weights:.3g} GB in float32; activations and logits come on top: see `penjing plan memory`"
    )


def nearest_card(tflops: float) -> Card:
    """The consumer GPU whose specified rate is nearest."""
    own = [card for card in CARDS.values() if card.generation == "consumer"]
    return min(own, key=lambda card: abs(card.half - tflops))


def own_estimate(shape: Shape, count: int, total: int, machine: Machine) -> tuple[float, dict[str, float]]:
    """Seconds for `total` tokens of a model of this shape, scaled to `count` parameters; shares of the step."""
    work = Workload(
        shape=shape,
        tokens=32 * 512,
        seq_len=512,
        keys=256.5,
        dtype=machine.fastest_dtype,
        fused_optimizer=True,
        compiled=True,
    )
    step = step_time(work, machine)
    seconds = step.seconds / work.tokens * total * count / shape.parameters
    shares = {name: value / step.seconds for name, value in asdict(step).items() if value > 0}
    return seconds, dict(sorted(shares.items(), key=lambda pair: -pair[1]))
