"""Measure a device: matmuls, attention, copies, kernel launches, context memory, all-reduce between devices.

GPUs are timed with events, CPUs with the wall clock. Every figure is the median of several tries, with a spread.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
import torch.nn.functional as functional

from penjing import devices
from penjing.kernels import ops
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.linear import set_compute_dtype
from penjing.model.transformer import Transformer
from penjing.plan.profile import Profile, ProfileKey
from penjing.plan.shape import shape_of
from penjing.plan.step_workload import Workload

SIZES = (1024, 2048, 4096, 8192, 16384)
TRIES = 7
TRY_SECONDS = 0.05  # minimum of one try: the call is repeated until then
COPY_BYTES = 256 << 20
ALL_REDUCE_BYTES = 64 << 20
CPU_LENGTHS = 256, 1024  # document lengths for which attention is measured


def profile_key(device: torch.device) -> ProfileKey:
    """The key of a profile measured now."""
    kind = devices.of(device)
    return ProfileKey(device=kind.name(device), kind=kind.type, torch=torch.__version__, **kind.identity(device))


def time_call(function: Callable[[], object], device: torch.device, tries: int = TRIES) -> tuple[float, float]:
    """Median seconds of one call, and (slowest - fastest) / median. Events on GPUs, else the wall clock."""
    time_calls = devices.of(device).time_calls
    function()
    times = 1
    while True:
        elapsed = time_calls(function, device, times)
        if elapsed >= TRY_SECONDS or times >= 1 << 14:
            break
        times = max(2 * times, min(1 << 14, int(times * TRY_SECONDS / max(elapsed, 1e-7)) + 1))
    seconds = sorted(time_calls(function, device, times) / times for _ in range(tries))
    median = statistics.median(seconds)
    return median, (seconds[-1] - seconds[0]) / median


def matmul(rows: int, inner: int, outputs: int, dtype: str, device: torch.device, tries: int = TRIES) -> dict[str, Any]:
    """One matmul's rate. dtype `tf32`: float32 inputs on tensor cores."""
    torch_dtype = getattr(torch, "float32" if dtype == "tf32" else dtype)
    allow_tf32 = devices.uses_tf32()
    devices.set_tf32(dtype == "tf32")
    try:
        left = torch.randn(rows, inner, device=device, dtype=torch_dtype)
        right = torch.randn(inner, outputs, device=device, dtype=torch_dtype)
        out = torch.empty(rows, outputs, device=device, dtype=torch_dtype)
        median, spread = time_call(lambda: torch.mm(left, right, out=out), device, tries)
    finally:
        devices.set_tf32(allow_tf32)
    rate = 2.0 * rows * inner * outputs / median
    return {"dtype": dtype, "flops_per_second": rate, "seconds": median, "spread": spread}


def dtypes_of(device: torch.device) -> list[str]:
    """The dtypes in which matmuls are measured."""
    kind = devices.of(device)
    if kind.is_host:
        return ["float32", "bfloat16"]
    return ["bfloat16", "float16", "tf32", "float32"] if kind.has_fast_bfloat16(device) else ["float16", "float32"]


def squares(
    device: torch.device,
    *,
    sizes: Iterable[int] = SIZES,
    dtypes: Sequence[str] = (),
    budget_seconds: float = 30.0,
    report: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Square matmuls by dtype, smallest first; sizes that exceed the time budget or the memory are skipped."""
    measured: list[dict[str, Any]] = []
    dtype_names = list(dtypes) or dtypes_of(device)
    for dtype in dtype_names:
        began, rate = time.perf_counter(), 0.0
        for size in sizes:
            # The first size has no estimate; later ones are estimated from the previous rate.
            expected = (TRIES + 2) * 2.0 * size**3 / rate if rate else 0.0
            if time.perf_counter() - began + expected > budget_seconds / len(dtype_names):
                break
            try:
                measurement = matmul(size, size, size, dtype, device)
            except (RuntimeError, MemoryError) as error:
                if "memory" not in str(error).lower():
                    raise
                break
            rate = measurement["flops_per_second"]
            measured.append({"size": size, **measurement})
            report(f"{dtype} {size}: {rate / 1e12:.3g} TFLOPS")
    return measured


def attention_rate(dtype: str, device: torch.device, cpu_tokens: int = CPU_LENGTHS[0]) -> float:
    """FLOPs per second of causal attention, forward and backward, as executed: 7 matmuls of T x T / 2 x width.

    On a CPU: of the kernel that a run would use, with one document per row.
    """
    on_gpu = not devices.of(device).is_host
    rows, heads, tokens, size = (4, 8, 1024, 64) if on_gpu else (4, 4, cpu_tokens, 64)
    torch_dtype = getattr(torch, dtype)
    shape = (rows, heads, tokens, size) if on_gpu else (rows, tokens, heads * size)
    q, k, v = (torch.randn(shape, device=device, dtype=torch_dtype, requires_grad=True) for _ in range(3))
    grad_out = torch.ones(shape, device=device, dtype=torch_dtype)
    document_BT = torch.zeros(rows, tokens, dtype=torch.int64)
    # A model makes these once for all layers.
    metadata = ops.make_attention_metadata(
        position_BT=document_BT, document_BT=document_BT, heads=(heads, size), dtype=torch_dtype
    )

    def forward_backward() -> None:
        if on_gpu:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            fused = ops.fused_attention((q, k, v), heads, heads, None, None, metadata)
            assert fused is not None
            out = fused.flatten(2)
        out.backward(grad_out)  # type: ignore[no-untyped-call]
        q.grad = k.grad = v.grad = None

    median, _ = time_call(forward_backward, device, 5)
    return _attention_flops(rows * heads, tokens, size) / median


def _attention_flops(units: int, tokens: int, size: int) -> float:
    return 7 * 2.0 * units * tokens * (tokens + 1) / 2 * size


def attentions(device: torch.device, budget_seconds: float) -> list[dict[str, Any]]:
    """CPU attention rates for short and long documents, by dtype; what exceeds the time budget is skipped."""
    measured: list[dict[str, Any]] = []
    dtype_names = dtypes_of(device)
    for dtype in dtype_names:
        rate = 0.0
        for tokens in CPU_LENGTHS:
            # As with matmuls, the first length has no estimate.
            expected = TRIES * _attention_flops(16, tokens, 64) / rate if rate else 0.0
            if expected > budget_seconds / len(dtype_names):
                break
            rate = attention_rate(dtype, device, tokens)
            measured.append({"dtype": dtype, "keys": (tokens + 1) / 2, "flops_per_second": rate})
    return measured


def copy_rate(device: torch.device) -> float:
    """Bytes per second of a copy within device memory, reads plus writes."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    median, _ = time_call(lambda: target.copy_(source), device, 5)
    return 2.0 * COPY_BYTES / median


def launch_seconds(device: torch.device) -> float:
    """Host seconds to launch one operation on a tiny tensor. On a CPU: seconds per operation of a tiny model block."""
    kind = devices.of(device)
    if kind.is_host:
        return _call_seconds(device)
    small = torch.ones(8, device=device)
    for _ in range(100):
        small.add_(1.0)
    kind.synchronize(device)
    start = time.perf_counter()
    for _ in range(2000):
        small.add_(1.0)
    elapsed = time.perf_counter() - start
    kind.synchronize(device)
    return elapsed / 2000


def _call_seconds(device: torch.device) -> float:
    """Seconds per operation, including Python, autograd and thread start: the time of a tiny block, forward and
    backward, divided by the number of operations that a plan counts for it."""
    dtype = devices.of(device).compute_dtype("auto", device)
    ids_BT = torch.zeros(2, 8, dtype=torch.int64)
    passes, calls = [], []
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

        def forward_backward(model: Transformer = model) -> None:
            model.hidden(ids_BT, ids_BT).sum().backward()  # type: ignore[no-untyped-call]
            model.zero_grad()

        passes.append(forward_backward)
        name = str(dtype).removeprefix("torch.")
        calls.append(Workload(shape=shape_of(config), tokens=16, seq_len=8, keys=4.5, dtype=name).kernels())
    # In turns: on a busy machine, the time of one could otherwise exceed that of the other.
    rounds = [[time_call(function, device, 1)[0] for function in passes] for _ in range(3)]
    seconds = statistics.median(five_layers - one_layer for one_layer, five_layers in rounds)
    return max(0.0, seconds) / (calls[1] - calls[0])


def _all_reduce_worker(rank: int, device_type: str, world: int, rendezvous: str, rate_file: str) -> None:
    """One rank of an all-reduce; rank 0 writes the bus rate."""
    device, kind = torch.device(device_type, rank), devices.of(device_type)
    kind.set_current(device)
    meet = f"file://{rendezvous}"
    distributed.init_process_group(kind.collective_backend, init_method=meet, rank=rank, world_size=world)
    value = torch.ones(ALL_REDUCE_BYTES // 4, device=device)
    median, _ = time_call(lambda: distributed.all_reduce(value), device, 5)
    if rank == 0:
        Path(rate_file).write_text(str(2.0 * (world - 1) / world * ALL_REDUCE_BYTES / median))
    distributed.destroy_process_group()


def all_reduce_rate(device: torch.device) -> float:
    """Bus bytes per second of an all-reduce over this machine's devices of the type; 0 with fewer than two."""
    world = devices.of(device).count()
    if world < 2:
        return 0.0
    with tempfile.TemporaryDirectory() as folder:
        rate_file = os.path.join(folder, "rate")
        multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _all_reduce_worker, args=(device.type, world, os.path.join(folder, "meet"), rate_file), nprocs=world
        )
        return float(Path(rate_file).read_text())


def measure(
    device: torch.device,
    shapes: Sequence[tuple[int, int, int]] = (),
    *,
    budget_seconds: float = 60.0,
    report: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a full profile. shapes: (rows, inner, outputs) of a model's matmuls, measured in the dtype of a run."""
    began, kind = time.perf_counter(), devices.of(device)
    context = kind.context_bytes(device)
    measured_squares = squares(device, budget_seconds=0.5 * budget_seconds, report=report)
    dtype = kind.dtype_name("auto", device)
    measured: list[dict[str, Any]] = []
    for rows, inner, outputs in shapes:
        if time.perf_counter() - began > budget_seconds:
            report("out of time: further shapes are left out")
            break
        measurement = matmul(rows, inner, outputs, dtype, device, tries=3)
        measured.append({"rows": rows, "inner": inner, "outputs": outputs, **measurement})
        report(f"{dtype} {rows} x {inner} x {outputs}: {measurement['flops_per_second'] / 1e12:.3g} TFLOPS")
    by_length = attentions(device, 0.2 * budget_seconds) if kind.is_host else []
    short = [measurement["flops_per_second"] for measurement in by_length if measurement["dtype"] == dtype][:1]
    return Profile(
        key=profile_key(device),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        squares=measured_squares,
        shapes=measured,
        attention_flops_per_second={dtype: short[0] if short else attention_rate(dtype, device)},
        attentions=by_length,
        copy_bytes_per_second=copy_rate(device),
        launch_seconds=launch_seconds(device),
        context_bytes=context,
        memory_bytes=kind.memory_bytes(device),
        all_reduce_bytes_per_second=all_reduce_rate(device),
        seconds=time.perf_counter() - began,
    )
