"""Two published GPT-2 programs written anew, as far as memory sees them, to hold predictions against measurements.

`Guide` is the model of S. Raschka's "LLM training speed" notes (LLMs-from-scratch, ch05/10), whose reserved memory on
an A100 was published step by step; `Sweep` that of the Languini Kitchen's throughput sweeps, which say at which batch
each GPU ran out of memory. `python tests/plan/memory_twins.py TABLE.csv` prints every row of such a table beside what
is predicted for it.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as functional
from limited_allocator import LimitedAllocator, OutOfMemory
from memory_autocast import Autocast
from memory_compiled import FARTHEST_TO_2_2, compiled
from memory_rows import at_rows
from torch import Tensor, nn

from penjing.plan.memory import FakeDeviceMode, MemoryPlan, Target, Trace, Tracer, plan_from, replay, report

GIB = 1 << 30

# --- the guide -------------------------------------------------------------------------------------------------------


class WrittenNorm(nn.Module):
    """LayerNorm, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class WrittenGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2 / math.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class WrittenAttention(nn.Module):
    """With the scores of all heads written out, and a mask that is stored or made."""

    def __init__(self, width: int, heads: int, tokens: int, *, keeps_mask: bool) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        if keeps_mask:
            self.register_buffer("mask", torch.triu(torch.ones(tokens, tokens), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        key, query, value = (
            part(x).view(rows, tokens, self.heads, -1).transpose(1, 2) for part in (self.key, self.query, self.value)
        )
        scores = query @ key.transpose(2, 3)
        buffer = getattr(self, "mask", None)
        mask = torch.triu(torch.ones(tokens, tokens, device=x.device), diagonal=1) if buffer is None else buffer
        scores.masked_fill_(mask.bool()[:tokens, :tokens], -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        out: Tensor = self.out((weights @ value).transpose(1, 2).reshape(x.shape))
        return out


class FusedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.together, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        query, key, value = self.together(x).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1 if self.training else 0.0, is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).contiguous().view(x.shape))
        return out


class GuideBlock(nn.Module):
    def __init__(self, width: int, heads: int, tokens: int, kind: str) -> None:
        super().__init__()
        written = kind in ("stored mask", "written")
        norm: Callable[[int], nn.Module] = WrittenNorm if written else nn.LayerNorm
        self.attention = (
            FusedAttention(width, heads)
            if kind == "flash"
            else WrittenAttention(width, heads, tokens, keeps_mask=kind == "stored mask")
        )
        activation = WrittenGELU() if written else nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))
        self.norm1, self.norm2, self.dropout = norm(width), norm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.attention(self.norm1(x))) + x
        return self.dropout(self.mlp(self.norm2(x))) + x


class Guide(nn.Module):
    """kind: stored mask, written, classes (torch's own norm and GELU), flash."""

    def __init__(self, kind: str, vocabulary: int, *, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        tokens = 1024
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(GuideBlock(width, heads, tokens, kind) for _ in range(layers)))
        self.norm = WrittenNorm(width) if kind in ("stored mask", "written") else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(x))))
        return logits


def guide_plan(kind: str, dtype: torch.dtype, rows: int, vocabulary: int, *, fused: bool) -> MemoryPlan:
    """Two steps with an evaluation between them, as the guide's loop takes them, on an A100."""
    target, tokens = Target(name="A100", capability=(8, 0)), 1024
    with torch.device("meta"):
        model = Guide(kind, vocabulary).to(dtype)
    tracer = Tracer(vocabulary=vocabulary)

    def loss() -> Tensor:
        ids, targets = (torch.empty(rows, tokens, dtype=torch.long, device="meta") for _ in range(2))
        tracer.tag([ids, targets], "batch")
        return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    with tracer, FakeDeviceMode(target):
        tracer.tag_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused)
        for index in range(2):
            optimizer.zero_grad()
            tracer.phase = "forward"
            told = loss()
            told.backward()
            tracer.tag_gradients(model)
            tracer.phase = "optimizer"
            optimizer.step()
            tracer.tag_state([optimizer])
            if index == 0:
                model.eval()
                with torch.no_grad(), tracer.during("evaluate"):
                    for _ in range(2):
                        loss()
                model.train()
    return plan_from(tracer.trace, target)


# --- the sweep -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepShape:
    layers: int
    width: int
    mlp: int
    head_dim: int
    heads: int
    vocabulary: int = 16384
    tokens: int = 512


SHAPES = {
    "mini": SweepShape(4, 512, 2048, 32, 8),
    "tiny": SweepShape(4, 768, 3072, 64, 12),
    "small": SweepShape(12, 768, 3072, 64, 12),
    "medium": SweepShape(24, 1024, 4096, 64, 16),
    "large": SweepShape(24, 1536, 6144, 96, 16),
    "XL": SweepShape(24, 2048, 8192, 128, 24),
}
# What these cards report as their memory, in GiB (from out-of-memory messages); the sweep's table has the round figure.
REPORTED_GIB = {
    "3090": 23.69,
    "4090": 23.64,
    "V100-SXM2-32GB": 31.74,
    "V100-SXM2-16GB": 15.77,
    "P100": 15.90,
    "TITAN X": 11.92,
    "2080 Ti": 10.75,
    "A100-SXM4-40GB": 39.39,
    "A100-SXM4-80GB": 79.15,
    "H100": 79.11,
}
CAPABILITY = {
    "3090": (8, 6),
    "4090": (8, 9),
    "V100": (7, 0),
    "P100": (6, 0),
    "TITAN X": (6, 1),
    "2080": (7, 5),
    "A100": (8, 0),
    "H100": (9, 0),
}


class SweepBlock(nn.Module):
    def __init__(self, shape: SweepShape) -> None:
        super().__init__()
        inner, self.shape = shape.heads * shape.head_dim, shape
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.query, self.key, self.value = (nn.Linear(shape.width, inner) for _ in range(3))
        self.out = nn.Linear(inner, shape.width)
        self.up, self.down = nn.Linear(shape.width, shape.mlp), nn.Linear(shape.mlp, shape.width)
        self.register_buffer("mask", torch.tril(torch.ones(4096, 4096)).view(1, 1, 4096, 4096))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        inner = self.up(self.norm2(x))
        cubed = inner + 0.044715 * torch.pow(inner, 3.0)
        activated = 0.5 * inner * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubed))
        out: Tensor = x + self.down(activated)
        return out

    def attention(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        query, key, value = (
            part(x).view(rows, tokens, self.shape.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = torch.einsum("bhid,bhjd->bhij", query, key) * self.shape.head_dim**-0.5
        assert isinstance(self.mask, Tensor)
        scores = scores.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, -math.inf)
        mixed = torch.einsum("bhjd,bhij->bhid", value, functional.softmax(scores, dim=-1))
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class Sweep(nn.Module):
    def __init__(self, shape: SweepShape) -> None:
        super().__init__()
        self.width = shape.width
        self.tokens, self.positions = (
            nn.Embedding(shape.vocabulary, shape.width),
            nn.Embedding(shape.tokens, shape.width),
        )
        self.blocks = nn.ModuleList(SweepBlock(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * math.sqrt(self.width)
        x = x + self.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def sweep_trace(shape: SweepShape, rows: int, target: Target, *, is_compiled: bool) -> Trace:
    """Two steps of the sweep's test: autocast to float16 around everything, Adam, gradients dropped after the loss."""
    with torch.device("meta"):
        model = Sweep(shape)
    call: Callable[..., Any] = model
    if is_compiled:
        call = compiled(model, farthest=FARTHEST_TO_2_2)  # it ran in 2023, with torch 2.0 or 2.1
        with Autocast(torch.float16):
            call(torch.empty(rows, shape.tokens, dtype=torch.long, device="meta")).float().sum().backward()
        model.zero_grad(set_to_none=True)
    tracer = Tracer(vocabulary=shape.vocabulary)
    with tracer, FakeDeviceMode(target):
        tracer.tag_model(model)
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            ids = torch.empty(rows, shape.tokens + 1, dtype=torch.long, device="meta")
            tracer.tag([ids], "batch")
            tracer.phase = "forward"
            logits = call(ids[:, : shape.tokens]).reshape(rows * shape.tokens, shape.vocabulary)
            loss = functional.cross_entropy(logits, ids[:, 1:].reshape(-1)).reshape(-1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            tracer.tag_gradients(model)
            tracer.phase = "optimizer"
            optimizer.step()
            tracer.tag_state([optimizer])

        with Autocast(torch.float16):
            for _ in range(2):
                step()
    return tracer.trace


def largest_batch(shape: SweepShape, target: Target, *, is_compiled: bool) -> int:
    """The largest batch that fits into the target, from traces of two (of fewer rows compilers choose otherwise)."""
    pair = (16, 32)
    low, high = (sweep_trace(shape, rows, target, is_compiled=is_compiled) for rows in pair)

    def fits(rows: int) -> bool:
        trace = at_rows(low, high, pair, rows)
        assert trace is not None
        capacity = target.memory_bytes - target.context_bytes
        with patch.object(report, "CachingAllocator", lambda: LimitedAllocator(capacity)), suppress(OutOfMemory):
            replay(trace, target)
            return True
        return False

    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def card(name: str) -> Target:
    """A card of the sweep's table, by the name its driver gives."""
    memory = next((size for part, size in REPORTED_GIB.items() if part in name), 0.0)
    capability = next((found for part, found in CAPABILITY.items() if part in name), (8, 0))
    return Target(name=name, capability=capability, memory_bytes=int(memory * GIB))


# --- a table ---------------------------------------------------------------------------------------------------------


def guide_kind(row: dict[str, str]) -> tuple[str, torch.dtype, bool]:
    """What a row of the guide's table ran: kind of model, dtype, whether the optimizer was fused."""
    dtype = torch.bfloat16 if "bf16" in row["precision"] else torch.float32
    if "SDPA" in row["attention"]:
        kind = "flash"
    elif "buffer" in row["attention"]:
        kind = "stored mask"
    else:
        kind = "classes" if "classes" in row["name"] else "written"
    return kind, dtype, "fused" in row["optimizer"]


def main(path: str) -> None:
    with open(path, newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        if row["source"].startswith("rasbt") and row["peak_mem_gib"]:
            kind, dtype, fused = guide_kind(row)
            plan = guide_plan(kind, dtype, int(row["micro_batch"]), int(row["vocab"]), fused=fused)
            got, told = plan.peak_reserved_bytes / GIB, float(row["peak_mem_gib"])
            how = f"{kind}, compiled: {row['compile']}, {row['parallelism']}"
            print(
                f"{row['id']} {how}: {got:.4f} GiB, published {told:.4f}, {100 * (got / told - 1):+.2f} %", flush=True
            )
    sweeps: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        if row["source"].startswith("languini") and row["fits"]:
            sweeps[row["name"].split()[1].removeprefix("GPT-"), row["hardware"], row["compile"]].append(row)
    for (name, hardware, how), measured in sweeps.items():
        good = max((int(row["micro_batch"]) for row in measured if row["fits"].startswith("yes")), default=0)
        bad = min((int(row["micro_batch"]) for row in measured if row["fits"].startswith("no")), default=0)
        target = card(hardware)
        if target.memory_bytes and bad:
            is_compiled = how not in ("", "no", "None", "none")
            got = largest_batch(SHAPES[name], target, is_compiled=is_compiled)
            error = 100 * (got / good - 1) if good else math.nan
            how = f"{name}, {hardware}, compiled: {is_compiled}"
            print(f"{how}: {got}, measured {good} ({bad} did not fit), {error:+.1f} %", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
