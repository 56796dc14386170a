"""penjing plan profile: measure this machine, for plans."""

from __future__ import annotations

import torch
from rich.console import Console

from penjing.base import formatting as units
from penjing.base.markup import print_table
from penjing.plan.gpu_specs import card_called
from penjing.plan.microbenchmarks import key_of, measure
from penjing.plan.profile import Profile, find_profile, save_profile
from penjing.plan.shape import shape_of
from penjing.plan.step_workload import Workload
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.load_model import set_threads


def matmul_shapes(run: Run, device: torch.device) -> list[tuple[int, int, int]]:
    """The matmul shapes (M, K, N) of a run's step, forward and backward; most work first."""
    micro, row = batch_geometry(run, 1, device).micro_size, run.data.seq_len
    work = Workload(shape=shape_of(run.model), tokens=micro * row, seq_len=row, keys=(row + 1) / 2)
    found: dict[tuple[int, int, int], float] = {}
    for left, inner, outputs, count in work.matmuls():
        found[left, inner, outputs] = found.get((left, inner, outputs), 0.0) + 2.0 * left * inner * outputs * count
    return sorted(found, key=lambda shape: -found[shape])


def profile(run: Run | None, seconds: float, console: Console) -> Profile:
    """Measure, print and save. run: also measure its matmul shapes; None: square ones only."""
    set_threads(run.compute.threads if run else 0, 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = find_profile(key_of(device))
    if before is not None and before[1]:
        console.print(f"  the old profile is stale: {', '.join(before[1])}", highlight=False)
    shapes = matmul_shapes(run, device) if run else []
    found = measure(
        device, shapes, budget_seconds=seconds, report=lambda text: console.print(f"  {text}", highlight=False)
    )
    path = save_profile(found)
    print_profile(found, console)
    console.print(f"{path}: plans on this machine now use it (L1)", highlight=False, soft_wrap=True)
    return found


def print_profile(found: Profile, console: Console) -> None:
    """The figures, with the fraction of the GPU's specified peak where it is known."""
    card = card_called(found.key.device, found.memory_bytes)
    rows = []
    for one in [*found.squares, *found.shapes]:
        rate = one["flops_per_second"]
        size = f"{one['size']}^3" if "size" in one else f"{one['rows']} x {one['inner']} x {one['outputs']}"
        share = f"{rate / card.peak_flops(one['dtype']):.0%}" if card else ""
        rows.append((size, one["dtype"], f"{rate / 1e12:.3g}", f"{one['spread']:.0%}", share))
    title = f"{found.key.device}, torch {found.key.torch}"
    print_table(console, ("matmul>", "dtype>", "TFLOPS>", "spread>", "of specified peak>"), rows, title=title)
    for one in found.attentions:
        keys, rate = one["keys"], one["flops_per_second"]
        line = f"causal, {one['dtype']}, {keys:g} keys: {rate / 1e12:.3g} TFLOPS"
        console.print(f"  attention, {line}", highlight=False)
    for dtype, rate in () if found.attentions else found.attention_flops_per_second.items():
        console.print(f"  attention, causal, {dtype}: {rate / 1e12:.3g} TFLOPS", highlight=False)
    console.print(
        f"  copies {found.copy_bytes_per_second / 1e9:.3g} GB/s, launch {found.launch_seconds * 1e6:.3g} us, "
        f"context {units.gibibytes(found.context_bytes)}",
        highlight=False,
    )
    if found.all_reduce_bytes_per_second:
        console.print(f"  all-reduce {found.all_reduce_bytes_per_second / 1e9:.3g} GB/s (bus)", highlight=False)
