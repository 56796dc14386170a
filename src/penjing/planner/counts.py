"""penjing plan tokens and plan estimate: they need only the model's size, and no torch."""

from dataclasses import asdict, replace

from rich.console import Console

from penjing.base import config
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.markup import escape_markup, print_table
from penjing.model.config import ModelConfig
from penjing.plan import compute_optimal as tokens
from penjing.plan import cost
from penjing.plan.device_model import LEVELS, MARGINS, Machine, machine_from_spec
from penjing.plan.gpu_specs import GPU_SPECS, GpuSpec, find_gpu_spec
from penjing.plan.layout import NODE_RANKS, Layout
from penjing.plan.profile import gpu_machine
from penjing.plan.shape import Shape, shape_of
from penjing.plan.step_time import interval, step_time
from penjing.plan.step_workload import Workload


def model_of(count: int) -> ModelConfig:
    """A Penjing model with about `count` parameters: the nearest size of the ladder, which ends at 3B."""
    count = min(count, 3_000_000_000)
    size = f"{max(1, round(count / 1e6))}m" if count >= 1e6 else f"{max(500, round(count / 1e3))}k"
    return config.resolve(ModelConfig, {"preset": f"ladder-{size}"})


def print_tokens(size: str, unique: str, hours: str, gpu: str, gpus: int, console: Console) -> None:
    """Print compute-optimal tokens for a model size, the value of repeated epochs, and the tokens a time allows."""
    count = cost.read_count(size, "--params")
    shape, law = shape_of(model_of(count)), tokens.LAWS["corrected"]
    best = tokens.advise(count, round(count * shape.matrices / shape.parameters))
    console.print(
        f"{units.count(count)} parameters in total: compute-optimal is {units.count(best.tokens)} tokens "
        f"({units.count(best.low)} to {units.count(best.high)}, 80 % of refits; arXiv:2404.10102), "
        f"{best.tokens / count:.1f} per parameter"
    )
    console.print(
        f"  counting matrices and head only, {tokens.MATRIX_RATIO} per parameter: {units.count(best.by_matrices)}"
    )
    base = law.loss(count, best.tokens)
    for ratio in tokens.TOKEN_RATIOS:
        gain = law.loss(count, ratio * count) - base
        console.print(f"  {ratio:>4} per parameter = {units.count(ratio * count)}: {gain:+.3f} nats")
    if unique:
        unique_tokens = cost.read_count(unique, "--unique")
        rows = []
        for epochs in (1, 2, 4, 8, 16, 40):
            counts = unique_tokens * epochs, round(tokens.repeated_tokens(unique_tokens, epochs))
            rows.append((epochs, *map(units.count, counts), f"{tokens.repeat_worth(epochs):.0%}"))
        print_table(console, ("epochs>", "tokens>", "worth in unique tokens>", "each>"), rows)
        for line in tokens.small_data_advice(count, unique_tokens):
            console.print(f"  {line}")
    if hours:
        _print_tokens_in(hours, count, shape, gpu, gpus, console)


def _print_tokens_in(hours: str, count: int, shape: Shape, gpu: str, gpus: int, console: Console) -> None:
    """Print the tokens that a time allows on the GPUs, or on this machine."""
    seconds, notes = cost.read_seconds(hours, "--hours", "h"), list[str]()
    if gpu:
        machine = gpu_machine(gpu)
    else:
        from penjing.planner.inputs import PlanOptions, find_machine  # imports torch
        from penjing.train.config import Run

        machine, _, notes = find_machine(PlanOptions(), Run())
    work = replace(_usual_work(shape, machine), layout=Layout(strategy="ddp", ranks=gpus, nodes=-(-gpus // NODE_RANKS)))
    rate = work.tokens * gpus / step_time(work, machine).seconds
    trained_tokens = rate * seconds * shape.parameters / count
    low, high = interval(trained_tokens, MARGINS[machine.level])
    console.print(
        f"  {units.duration(seconds)} on {gpus} x {machine.name} ({machine.level}, "
        f"{LEVELS[machine.level]}) is {units.count(round(trained_tokens))} tokens ({units.count(round(low))} to "
        f"{units.count(round(high))}), {trained_tokens / count:.1f} a parameter"
    )
    best_size = tokens.LAWS["corrected"].optimal_parameters(trained_tokens)
    console.print(f"  compute-optimal for so many tokens: {units.count(round(best_size))} parameters")
    for note in notes:
        console.print(escape_markup("note", note))


def _usual_work(shape: Shape, machine: Machine) -> Workload:
    return Workload(
        shape=shape,
        tokens=32 * 512,
        seq_len=512,
        keys=256.5,
        dtype=machine.fastest_dtype,
        fused_optimizer=True,
        compiled=not machine.on_host,
    )


def print_estimate(size: str, amount: str, tflops: float, gpu: str, console: Console) -> None:
    """Print the textbook formula 6 N D / peak, and our estimate for a Penjing model of that size."""
    count, total = cost.read_count(size, "--params"), cost.read_count(amount, "--tokens")
    if not tflops and not gpu:
        raise UserError("no speed", where="--tflops", next_step='Give --tflops 75, or --gpu "RTX 3090".')
    card = find_gpu_spec(gpu) if gpu else nearest_card(tflops)
    peak = tflops or card.half
    textbook = 6 * count * total / (peak * 1e12)
    machine = machine_from_spec(card)
    shape = shape_of(model_of(count))
    seconds, flops = step_estimate(shape, count, total, machine)
    low, high = interval(seconds, MARGINS["L0"])
    console.print(
        f"textbook: 6 x {units.count(count)} x {units.count(total)} / {peak:g} TFLOPS = {units.duration(textbook)} "
        f"({textbook / 60:.0f} min), at 100 % utilisation, which nobody reaches"
    )
    console.print(
        f"ours: {units.duration(seconds)} ({units.duration(low)} to {units.duration(high)}; L0, {card.name}), "
        f"{textbook / seconds * peak / card.half:.0%} of the card's {card.half:g} TFLOPS by the same formula"
    )
    for name, share in flops.items():
        console.print(f"  {name:<12} {share:.0%}")
    weights = 4 * count / 1e9  # the same again for gradients, and for each of Adam's two moments
    console.print(
        f"memory, textbook: weights {weights:.3g} GB + gradients {weights:.3g} GB + Adam {2 * weights:.3g} GB = "
        f"{4 * weights:.3g} GB in float32; plus activations and logits: see `penjing plan memory`"
    )


def nearest_card(tflops: float) -> GpuSpec:
    """The consumer GPU whose specified rate is nearest."""
    consumer = [card for card in GPU_SPECS.values() if card.generation == "consumer"]
    return min(consumer, key=lambda card: abs(card.half - tflops))


def step_estimate(shape: Shape, count: int, total: int, machine: Machine) -> tuple[float, dict[str, float]]:
    """Seconds for `total` tokens with a model of this shape, scaled to `count` parameters; fractions of the step."""
    work = _usual_work(shape, machine)
    step = step_time(work, machine)
    seconds = step.seconds / work.tokens * total * count / shape.parameters
    shares = {name: value / step.seconds for name, value in asdict(step).items() if value > 0}
    return seconds, dict(sorted(shares.items(), key=lambda pair: -pair[1]))
