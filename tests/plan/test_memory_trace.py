"""The tracer: what is born and dies, what code is told about its device, and a meta trace against a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from memory_compiled import compiled
from memory_rows import at_rows
from torch import Tensor, nn

import penjing
from penjing.model.norm import RMSNorm
from penjing.plan.layout import STATE_BYTES, Layout
from penjing.plan.memory import FakeDeviceMode, Target, Trace, Tracer, plan_from, replay
from penjing.plan.memory.fake_device_mode import attention_kernel
from penjing.plan.memory.kernels import WORKSPACE
from penjing.plan.memory.sharded_memory import GradientBuckets, rank_memory
from penjing.plan.memory.trace import Storage

A100 = Target(name="A100", capability=(8, 0), memory_bytes=40 << 30)
CPU = Target(kind="cpu", memory_bytes=1 << 30)


def empty(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def small_step(device: str, rows: int = 4) -> Trace:
    """Two steps of a small network, on real memory (`cpu`) or none (`meta`)."""
    with torch.device(device):
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    tracer = Tracer(device, kernel_temporaries=False)
    with tracer:
        tracer.tag_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for _ in range(2):
            tracer.phase = "forward"
            x = torch.ones(rows, 32, device=device)
            target = torch.zeros(rows, dtype=torch.long, device=device)
            loss = functional.cross_entropy(model(x), target)
            loss.backward()
            tracer.tag_gradients(model)
            tracer.phase = "optimizer"
            optimizer.step()
            tracer.tag_state([optimizer])
            optimizer.zero_grad()
            del x, target, loss
    return tracer.trace


def test_births_and_deaths_are_in_order() -> None:
    tracer = Tracer(kernel_temporaries=False)
    with tracer:
        x = empty(10, 10)
        y = x + 1
        view = y.view(100)
        del y
        z = view * 2
        del view
        del x, z
    assert [storage.num_bytes for storage in tracer.trace.storages] == [400, 400, 400]
    assert tracer.trace.events == [1, 2, 3, -2, -1, -3]
    assert tracer.trace.live_bytes() == [400, 800, 1200, 800, 400, 0]


def test_lines_are_of_the_caller_and_in_the_backward_pass_of_the_forward_call() -> None:
    tracer = Tracer()
    with tracer, FakeDeviceMode(A100):
        tracer.phase = "forward"
        weight = nn.Parameter(empty(8, 8))
        (empty(4, 8) @ weight).sum().backward()
    lines = {storage.operation: storage.line for storage in tracer.trace.storages}
    assert lines["mm"].startswith("test_memory_trace.py:")
    assert tracer.trace.storages[-1].phase == "backward"
    assert {storage.line for storage in tracer.trace.storages if storage.operation == "mm"} == {lines["mm"]}


def test_lines_of_the_package_are_named_from_its_folder() -> None:
    with Tracer() as tracer, FakeDeviceMode(A100):
        RMSNorm(8, 1e-6)(empty(2, 8))
    files = {storage.line.partition(":")[0] for storage in tracer.trace.storages} - {"test_memory_trace.py"}
    package = Path(penjing.__file__).parent
    assert files and all((package.parent / name).is_relative_to(package) for name in files)
    assert all((package.parent / name).is_file() for name in files)


def test_a_trace_without_memory_is_that_of_a_real_run() -> None:
    meta, real = small_step("meta"), small_step("cpu")
    assert meta.live_bytes() == real.live_bytes()
    assert [s.component for s in meta.storages] == [s.component for s in real.storages]


def test_components() -> None:
    trace = small_step("meta")
    sizes: dict[str, int] = {}
    for storage in trace.storages:
        sizes[storage.component] = sizes.get(storage.component, 0) + storage.num_bytes
    weights = 4 * (32 * 64 + 64 + 64 * 16 + 16)
    assert sizes["weights"] == weights
    assert sizes["gradients"] == 2 * weights  # those of two steps
    assert sizes["optimizer state"] == weights
    assert sizes["activations"] > 0


def test_a_plan_adds_up() -> None:
    trace = small_step("meta")
    plan = plan_from(trace, A100)
    assert sum(plan.waterfall.values()) == plan.total_bytes == plan.peak_reserved_bytes + A100.context_bytes
    assert plan.peak_allocated_bytes <= plan.peak_reserved_bytes


def test_workspaces_are_made_once_for_each_direction() -> None:
    tracer = Tracer()
    with tracer:
        for _ in range(2):
            (empty(8, 8, grad=True) @ empty(8, 8)).sum().backward()
    made = [storage for storage in tracer.trace.storages if storage.num_bytes == WORKSPACE]
    assert [storage.phase for storage in made] == ["build", "backward"]
    assert replay(tracer.trace, A100).allocated > 2 * A100.workspace_bytes == 2 * 8_519_680
    assert Target(capability=(9, 0)).workspace_bytes == 32 << 20


# --- the fake device -------------------------------------------------------------------------------------------------


class Told(torch.autograd.Function):
    """Notes what it is told about its device, both ways."""

    devices: list[str] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Told.devices.append(x.device.type)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        Told.devices.append(upstream[0].device.type)
        assert torch.zeros(1, device=upstream[0].device).device == upstream[0].device
        return upstream[0] * 2


@pytest.mark.parametrize("target", [A100, CPU])
def test_tensors_say_that_they_are_on_the_target(target: Target) -> None:
    x = empty(4, grad=True)
    Told.devices.clear()
    with FakeDeviceMode(target):
        assert x.device.type == target.kind
        assert x.is_cuda == (target.kind == "cuda")
        made = torch.zeros(3, device=x.device)
        assert made.device == x.device
        assert not bool(made.sum() > 0)
        Told.apply(x).sum().backward()  # type: ignore[no-untyped-call]
        assert torch.Generator(device=x.device) is not None
    assert Told.devices == [target.kind, target.kind]
    assert (made.device.type, x.grad is not None and x.grad.device.type) == ("meta", "meta")
    assert torch.Generator.__name__ == "Generator"


@pytest.mark.parametrize(
    ("capability", "dtype", "mask", "groups", "kernel"),
    [
        ((8, 0), torch.bfloat16, False, 2, "flash"),
        ((8, 6), torch.bfloat16, True, 8, "efficient"),
        ((8, 6), torch.bfloat16, True, 2, "math"),
        ((8, 0), torch.float32, False, 8, "efficient"),
        ((7, 0), torch.float16, False, 8, "efficient"),
        ((9, 0), torch.bfloat16, True, 2, "cudnn"),
    ],
)
def test_attention_takes_the_targets_kernel(
    capability: tuple[int, int], dtype: torch.dtype, mask: bool, groups: int, kernel: str
) -> None:
    query, key = empty(2, 8, 64, 32, dtype=dtype), empty(2, groups, 64, 32, dtype=dtype)
    seen = empty(2, 1, 64, 64, dtype=torch.bool) if mask else None
    assert attention_kernel(Target(capability=capability), query, key, seen) == kernel


@pytest.mark.parametrize(("capability", "maps"), [((8, 0), 0), ((6, 0), 0), ((8, 6), 1)])
def test_flash_keeps_no_maps(capability: tuple[int, int], maps: int) -> None:
    tokens, dtype = 256, torch.float16 if capability[0] < 8 else torch.bfloat16
    masked = maps > 0
    query = empty(2, 8, tokens, 32, dtype=dtype, grad=True)
    key = empty(2, 2 if masked else 8, tokens, 32, dtype=dtype, grad=True)
    tracer = Tracer()
    with tracer, FakeDeviceMode(Target(capability=capability)):
        mask = torch.ones(2, 1, tokens, tokens, dtype=torch.bool, device=query.device) if masked else None
        out = functional.scaled_dot_product_attention(
            query, key, key, attn_mask=mask, is_causal=not masked, enable_gqa=masked
        )
        out.sum().backward()
    largest = max(storage.num_bytes for storage in tracer.trace.storages)
    assert (largest >= 2 * 8 * tokens * tokens * 2) == masked
    assert query.grad is not None and key.grad is not None and key.grad.shape == key.shape


def test_dropout_keeps_a_mask_of_bytes_and_rms_norm_its_input() -> None:
    x = empty(64, 64, grad=True)
    gain = nn.Parameter(empty(64))
    tracer = Tracer()
    with tracer, FakeDeviceMode(A100):
        dropped = functional.dropout(x, 0.1)
        normal = functional.rms_norm(dropped, (64,), gain, 1e-5)
        sizes = [storage.num_bytes for storage in tracer.trace.storages]
        normal.sum().backward()
    assert sizes.count(64 * 64) == 1
    assert sizes.count(64 * 64 * 4) == 2  # what was left and what was normalised; x was there before
    assert sizes.count(64 * 4) == 1
    assert x.grad is not None and gain.grad is not None


# --- from one trace to others ----------------------------------------------------------------------------------------


def test_a_trace_of_more_rows_from_two_of_fewer() -> None:
    low, high = small_step("meta", 4), small_step("meta", 8)
    made = at_rows(low, high, (4, 8), 50)
    assert made is not None
    assert made.live_bytes() == small_step("meta", 50).live_bytes()
    assert at_rows(low, Trace(), (4, 8), 50) is None


def test_compiled_passes_keep_less() -> None:
    class Activated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(torch.tanh(torch.sin(x) * 2) + 1) * 3

    def activation_bytes(call: Any, x: Tensor) -> int:
        tracer = Tracer()
        with tracer:
            tracer.phase = "forward"
            call(x).sum().backward()
        return sum(storage.num_bytes for storage in tracer.trace.storages if storage.component == "activations")

    x, call = empty(64, 64, grad=True), compiled(Activated())
    call(x).sum().backward()
    assert activation_bytes(call, x) < activation_bytes(Activated(), x)


def test_buckets_hold_every_gradient() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    buckets = GradientBuckets(model)
    assert sum(bucket.numel() for bucket in buckets.tensors) == sum(p.numel() for p in model.parameters())
    model(empty(2, 64)).sum().backward()
    held = {bucket.untyped_storage()._cdata for bucket in buckets.tensors}
    assert all(p.grad is not None and p.grad.untyped_storage()._cdata in held for p in model.parameters())


def test_sharding_divides_what_it_names() -> None:
    trace = Trace()
    for component in ("weights", "gradients", "optimizer state", "activations"):
        trace.storages.append(Storage(8 << 20, component, "", "build", component))  # type: ignore[arg-type]
        trace.events.append(len(trace.storages))

    def sizes(*shards: str, **more: Any) -> dict[str, int]:
        made = rank_memory(trace, Layout(ranks=8, shards=frozenset(shards), **more))
        return {s.component: s.num_bytes for s in made[0].storages}

    whole, part = 8 << 20, 1 << 20
    assert sizes() == dict.fromkeys(["weights", "gradients", "optimizer state", "activations"], whole)
    assert sizes("optimizer state") == {**sizes(), "optimizer state": part}
    assert sizes(*STATE_BYTES) == {**dict.fromkeys(STATE_BYTES, part), "activations": whole}
    assert sizes(*STATE_BYTES, nodes=2, within_node=True)["weights"] == whole // 4, "each machine holds everything"
