"""Measure a device: matmuls, attention, copies, launches, what a context holds, exchange between devices.

GPUs are timed with device events, CPUs with the clock; every figure is the median of several tries with its spread.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
import torch.nn.functional as functional

from penjing.kernels.attention_metadata import first_keys
from penjing.kernels.cpu import ops as cpu
from penjing.kernels.tiled_attention import group_tiles, tiled_attention
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.linear import set_compute_dtype
from penjing.model.transformer import Transformer
from penjing.plan import hardware
from penjing.plan.profile import Key, Profile
from penjing.plan.shape import shape_of
from penjing.plan.step_time import quantile
from penjing.plan.step_workload import Workload

SIZES = (1024, 2048, 4096, 8192, 16384)
TRIES = 7
TRY_SECONDS = 0.05  # of one try at least: the matmul is repeated until then
COPY_BYTES = 256 << 20
EXCHANGE_BYTES = 64 << 20
CPU_LENGTHS = 256, 1024  # of documents whose attention is measured


def key_of(device: torch.device) -> Key:
    """What figures taken now would hold for."""
    if device.type != "cuda":
        return Key(device=hardware.cpu_name(), kind="cpu", torch=torch.__version__, threads=torch.get_num_threads())
    driver, watts = _driver(device)
    return Key(
        device=torch.cuda.get_device_name(device),
        kind="cuda",
        driver=driver,
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        power_limit_watts=watts,
        devices=torch.cuda.device_count(),
    )


def _driver(device: torch.device) -> tuple[str, float]:
    """Driver version and power limit, where nvidia-smi tells."""
    wanted = ("--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    query = ["nvidia-smi", f"--id={device.index or 0}", *wanted]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        driver, watts = output.splitlines()[0].split(", ")
        return driver, float(watts.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "unknown", 0.0


def seconds_of(work: Callable[[], object], device: torch.device, tries: int = TRIES) -> tuple[float, float]:
    """Median seconds of one call, and (slowest - fastest) / median. Device events on CUDA, else the clock."""
    work()
    times = 1
    while True:
        took = _once(work, device, times)
        if took >= TRY_SECONDS or times >= 1 << 14:
            break
        times = max(2 * times, min(1 << 14, int(times * TRY_SECONDS / max(took, 1e-7)) + 1))
    taken = sorted(_once(work, device, times) / times for _ in range(tries))
    median = quantile(taken, 0.5)
    return median, (taken[-1] - taken[0]) / median


def _once(work: Callable[[], object], device: torch.device, times: int) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - start


def matmul(rows: int, inner: int, outputs: int, dtype: str, device: torch.device, tries: int = TRIES) -> dict[str, Any]:
    """One matmul's rate. dtype `tf32`: float32 values through tensor cores."""
    kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        left = torch.randn(rows, inner, device=device, dtype=kind)
        right = torch.randn(inner, outputs, device=device, dtype=kind)
        out = torch.empty(rows, outputs, device=device, dtype=kind)
        median, spread = seconds_of(lambda: torch.mm(left, right, out=out), device, tries)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    rate = 2.0 * rows * inner * outputs / median
    return {"dtype": dtype, "flops_per_second": rate, "seconds": median, "spread": spread}


def dtypes_of(device: torch.device) -> list[str]:
    """Those that matmuls are measured in."""
    if device.type != "cuda":
        return ["float32", "bfloat16"]
    if hardware.has_fast_bfloat16(device):
        return ["bfloat16", "float16", "tf32", "float32"]
    return ["float16", "float32"]


def squares(
    device: torch.device,
    *,
    sizes: Iterable[int] = SIZES,
    dtypes: Sequence[str] = (),
    budget_seconds: float = 30.0,
    report: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Square matmuls by dtype, smallest first; sizes that would outlast the budget or the memory are left out."""
    found: list[dict[str, Any]] = []
    kinds = list(dtypes) or dtypes_of(device)
    for dtype in kinds:
        began, rate = time.perf_counter(), 0.0
        for size in sizes:
            # The first call is not known beforehand; later ones are, from the rate before.
            expected = (TRIES + 2) * 2.0 * size**3 / rate if rate else 0.0
            if time.perf_counter() - began + expected > budget_seconds / len(kinds):
                break
            try:
                one = matmul(size, size, size, dtype, device)
            except (RuntimeError, MemoryError) as error:
                if "memory" not in str(error).lower():
                    raise
                break
            rate = one["flops_per_second"]
            found.append({"size": size, **one})
            report(f"{dtype} {size}: {rate / 1e12:.3g} TFLOPS")
    return found


def attention_rate(dtype: str, device: torch.device, cpu_tokens: int = CPU_LENGTHS[0]) -> float:
    """FLOPs per second of causal attention, forward and backward, counted as done: 7 matmuls of T x T / 2 x width.

    On a CPU of our own way of doing it, a document to a row: the kernel that a run would use there, or tiles.
    """
    on_gpu = device.type == "cuda"
    rows, heads, tokens, size = (4, 8, 1024, 64) if on_gpu else (4, 4, cpu_tokens, 64)
    kind = getattr(torch, dtype)
    shape = (rows, heads, tokens, size) if on_gpu else (rows, tokens, heads, size)
    q, k, v = (torch.randn(shape, device=device, dtype=kind, requires_grad=True) for _ in range(3))
    grad_out = torch.ones(shape, device=device, dtype=kind)
    document_BT = torch.zeros(rows, tokens, dtype=torch.int64)
    first_BT, groups = None, None  # which a model finds once for all its layers
    if cpu.supports_attention(kind, size, rows * heads) and not on_gpu:
        first_BT = first_keys(document_BT, 0)
    elif not on_gpu:
        groups = group_tiles(document_BT, None, 0, kind)

    def work() -> None:
        if on_gpu:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = tiled_attention(q, k, v, document_BT, groups=groups, first_BT=first_BT)
        mixed.backward(grad_out)  # type: ignore[no-untyped-call]
        q.grad = k.grad = v.grad = None

    median, _ = seconds_of(work, device, 5)
    return _attention_flops(rows * heads, tokens, size) / median


def _attention_flops(units: int, tokens: int, size: int) -> float:
    return 7 * 2.0 * units * tokens * (tokens + 1) / 2 * size


def attentions(device: torch.device, budget_seconds: float) -> list[dict[str, Any]]:
    """Attention's rate on a CPU in short and in long documents, by dtype; what would outlast the budget is left out."""
    found: list[dict[str, Any]] = []
    kinds = dtypes_of(device)
    for dtype in kinds:
        rate = 0.0
        for tokens in CPU_LENGTHS:
            # As with matmuls: the first call is not known beforehand.
            expected = TRIES * _attention_flops(16, tokens, 64) / rate if rate else 0.0
            if expected > budget_seconds / len(kinds):
                break
            rate = attention_rate(dtype, device, tokens)
            found.append({"dtype": dtype, "keys": (tokens + 1) / 2, "flops_per_second": rate})
    return found


def copy_rate(device: torch.device) -> float:
    """Bytes per second of a copy within the device's memory, reading and writing counted."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    median, _ = seconds_of(lambda: target.copy_(source), device, 5)
    return 2.0 * COPY_BYTES / median


def launch_seconds(device: torch.device) -> float:
    """Of one operation on nothing much: what the host takes to start it. On a CPU as those of a model's blocks do."""
    if device.type == "cpu":
        return _call_seconds(device)
    small = torch.ones(8, device=device)
    for _ in range(100):
        small.add_(1.0)
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(2000):
        small.add_(1.0)
    took = time.perf_counter() - start
    torch.accelerator.synchronize(device)
    return took / 2000


def _call_seconds(device: torch.device) -> float:
    """Of one operation, Python, autograd and the threads' start with it: a block on next to nothing, forward and
    backward, over the number of operations that plans count for it."""
    dtype = hardware.compute_dtype("auto", device)
    ids_BT = torch.zeros(2, 8, dtype=torch.int64)
    seconds, calls = [], []
    for layers in (1, 5):
        config = ModelConfig(
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=64,
            vocab_size=64,
        )
        model = Transformer(config)
        initialise(model, 1)
        set_compute_dtype(model, None if dtype == torch.float32 else dtype)

        def work(model: Transformer = model) -> None:
            model.hidden(ids_BT, ids_BT).sum().backward()  # type: ignore[no-untyped-call]
            model.zero_grad()

        seconds.append(seconds_of(work, device, 3)[0])
        name = str(dtype).removeprefix("torch.")
        calls.append(Workload(shape=shape_of(config), tokens=16, seq_len=8, keys=4.5, dtype=name).kernels())
    return max(0.0, seconds[1] - seconds[0]) / (calls[1] - calls[0])


def context_bytes(device: torch.device) -> int:
    """Held beside tensors: on CUDA what the driver has given out and torch has not reserved; of a CPU the process."""
    if device.type != "cuda":
        return hardware.peak_memory_bytes(device)
    left = torch.ones(256, 256, device=device)
    left @ left
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def _exchange(rank: int, world: int, place: str, answer: str) -> None:
    """One rank of an all-reduce; rank 0 writes the bus rate."""
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{place}", rank=rank, world_size=world)
    value = torch.ones(EXCHANGE_BYTES // 4, device=f"cuda:{rank}")
    median, _ = seconds_of(lambda: distributed.all_reduce(value), torch.device("cuda", rank), 5)
    if rank == 0:
        Path(answer).write_text(str(2.0 * (world - 1) / world * EXCHANGE_BYTES / median))
    distributed.destroy_process_group()


def all_reduce_rate() -> float:
    """Bus bytes per second of an all-reduce over this machine's GPUs; 0 with fewer than two."""
    world = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world < 2:
        return 0.0
    with tempfile.TemporaryDirectory() as place:
        answer = os.path.join(place, "rate")
        multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _exchange, args=(world, os.path.join(place, "meet"), answer), nprocs=world
        )
        return float(Path(answer).read_text())


def measure(
    device: torch.device,
    shapes: Sequence[tuple[int, int, int]] = (),
    *,
    budget_seconds: float = 60.0,
    report: Callable[[str], None] = lambda text: None,
) -> Profile:
    """A whole profile. shapes: (rows, inner, outputs) of a model's own matmuls, measured in the dtype of a run."""
    began = time.perf_counter()
    context = context_bytes(device)
    found = squares(device, budget_seconds=0.5 * budget_seconds, report=report)
    own = str(hardware.compute_dtype("auto", device)).removeprefix("torch.")
    measured: list[dict[str, Any]] = []
    for rows, inner, outputs in shapes:
        if time.perf_counter() - began > budget_seconds:
            report("out of time: further shapes are left out")
            break
        one = matmul(rows, inner, outputs, own, device, tries=3)
        measured.append({"rows": rows, "inner": inner, "outputs": outputs, **one})
        report(f"{own} {rows} x {inner} x {outputs}: {one['flops_per_second'] / 1e12:.3g} TFLOPS")
    by_length = attentions(device, 0.2 * budget_seconds) if device.type == "cpu" else []
    short = [one["flops_per_second"] for one in by_length if one["dtype"] == own][:1]
    on_gpu = device.type == "cuda"
    return Profile(
        key=key_of(device),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        squares=found,
        shapes=measured,
        attention_flops_per_second={own: short[0] if short else attention_rate(own, device)},
        attentions=by_length,
        copy_bytes_per_second=copy_rate(device),
        launch_seconds=launch_seconds(device),
        context_bytes=context,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else hardware.memory_bytes(),
        all_reduce_bytes_per_second=all_reduce_rate(),
        seconds=time.perf_counter() - began,
    )
