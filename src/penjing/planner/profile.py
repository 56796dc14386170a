"""penjing plan profile: measure this machine."""

from typing import Any

import torch
from rich.console import Console

from penjing.base import formatting as units
from penjing.base.markup import print_table
from penjing.base.process_info import thread_seconds
from penjing.devices.choose import local_device
from penjing.plan.gpu_specs import GpuSpec, match_gpu_spec
from penjing.plan.microbenchmarks import measure, profile_key
from penjing.plan.profile import Profile, find_profile, save_profile
from penjing.plan.shape import shape_of
from penjing.plan.step_workload import Workload
from penjing.plan.time_interval import slowdown
from penjing.planner.inputs import busy_notes
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.load_model import set_threads

MATMUL_HEADINGS = ("matmul>", "dtype>", "TFLOPS (median)>", "spread>", "fraction of the stated peak>")


def matmul_cells(row: dict[str, Any], card: GpuSpec | None) -> tuple[str, ...]:
    """A measured matmul as a row of the table, beside the card's stated peak if it is known."""
    rate = row["flops_per_second"]
    size = f"{row['size']}^3" if "size" in row else f"{row['rows']} x {row['inner']} x {row['outputs']}"
    share = f"{rate / card.peak_flops(row['dtype']):.0%}" if card else "no stated peak"
    return size, row["dtype"], f"{rate / 1e12:.3g}", f"{row['spread']:.0%}", share


def matmul_shapes(run: Run, device: torch.device) -> list[tuple[int, int, int]]:
    """The matmul shapes (M, K, N) of a run's step, forward and backward; most work first."""
    micro, row = batch_geometry(run, 1, device).micro_size, run.data.seq_len
    work = Workload(shape=shape_of(run.model), tokens=micro * row, seq_len=row, keys=(row + 1) / 2)
    flops: dict[tuple[int, int, int], float] = {}
    for left, inner, outputs, count in work.matmuls():
        flops[left, inner, outputs] = flops.get((left, inner, outputs), 0.0) + 2.0 * left * inner * outputs * count
    return sorted(flops, key=lambda shape: -flops[shape])


def profile(run: Run | None, seconds: float, console: Console) -> Profile:
    """Measure, print and save. run: also measure its matmul shapes; None: square ones only."""
    set_threads(run.compute.threads if run else 0, 1)
    device = local_device(run.compute.device if run else "auto")
    previous = find_profile(profile_key(device))
    if previous is not None and previous[1]:
        console.print(f"  the old profile is stale: {', '.join(previous[1])}", highlight=False)
    shapes = matmul_shapes(run, device) if run else []
    before = thread_seconds()
    measured = measure(
        device, shapes, budget_seconds=seconds, report=lambda text: console.print(f"  {text}", highlight=False)
    )
    path = save_profile(measured)
    print_profile(measured, console)
    for note in busy_notes(slowdown([thread_seconds(since=before)])):
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    console.print(f"{path}: plans on this machine now use it (L1)", highlight=False, soft_wrap=True)
    return measured


def print_profile(measured: Profile, console: Console) -> None:
    """Print the rates, with the fraction of the GPU's specified peak if it is known."""
    card = match_gpu_spec(measured.key.device, measured.memory_bytes)
    rows = [matmul_cells(row, card) for row in [*measured.squares, *measured.shapes]]
    title = f"{measured.key.device}, torch {measured.key.torch}"
    print_table(console, MATMUL_HEADINGS, rows, title=title)
    for row in measured.attentions:
        keys, rate = row["keys"], row["flops_per_second"]
        line = f"causal, {row['dtype']}, {keys:g} keys: {rate / 1e12:.3g} TFLOPS"
        console.print(f"  attention, {line}", highlight=False)
    for dtype, rate in () if measured.attentions else measured.attention_flops_per_second.items():
        console.print(f"  attention, causal, {dtype}: {rate / 1e12:.3g} TFLOPS", highlight=False)
    console.print(
        f"  copies {measured.copy_bytes_per_second / 1e9:.3g} GB/s, launch {measured.launch_seconds * 1e6:.3g} us, "
        f"context {units.gibibytes(measured.context_bytes)}",
        highlight=False,
    )
    if measured.all_reduce_bytes_per_second:
        console.print(f"  all-reduce {measured.all_reduce_bytes_per_second / 1e9:.3g} GB/s (bus)", highlight=False)
