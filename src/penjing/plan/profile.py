"""A machine's own figures, measured once (`penjing plan profile`) and saved: level L1 of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from penjing.base.files import read_json, write_json
from penjing.plan.device_model import (
    LAUNCH_SECONDS,
    PCIE_BYTES_PER_SECOND,
    AttentionRate,
    Gemm,
    Machine,
    machine_of_card,
)
from penjing.plan.gpu_specs import Card, card_called, find_card
from penjing.plan.user_dir import home

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Key:
    """What figures hold for. A profile whose key is another one is out of date and says in what."""

    device: str  # as the driver or the processor calls itself
    kind: Literal["cuda", "cpu"]
    driver: str = ""
    torch: str
    cuda: str = ""
    power_limit_watts: float = 0.0  # 0 = not known
    threads: int = 0  # of a CPU; 0 for others
    devices: int = 1

    @property
    def name(self) -> str:
        """Of the file: one for each device and number of threads, so that a newer profile replaces an older one."""
        threads = f"-{self.threads}-threads" if self.threads else ""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.device).strip("-") + threads

    def differences(self, other: Key) -> list[str]:
        """Fields in which they differ, in words."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} {theirs[name]} -> {mine[name]}" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured. Rates in FLOPs and bytes per second; `spread`: (slowest - fastest) / median of its tries."""

    key: Key
    created: str  # UTC
    seconds: float  # that measuring took
    squares: list[dict[str, Any]]  # {"size", "dtype", "flops_per_second", "spread"}
    shapes: list[dict[str, Any]] = field(default_factory=list)  # {"rows", "inner", "outputs", "dtype", ...}
    attention_flops_per_second: dict[str, float] = field(default_factory=dict)  # by dtype, fused, forward and backward
    attentions: list[dict[str, Any]] = field(default_factory=list)  # {"dtype", "keys", "flops_per_second"}; of a CPU
    copy_bytes_per_second: float
    launch_seconds: float
    context_bytes: int
    memory_bytes: int
    all_reduce_bytes_per_second: float = 0.0  # 0 = one device
    version: int = VERSION

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Profile:
        return cls(**{**known, "key": Key(**known["key"])})

    def machine(self) -> Machine:
        """The rates as a plan takes them: large squares for matmuls in general, own shapes where they are like."""
        best: dict[str, float] = {}
        for square in self.squares:
            best[square["dtype"]] = max(best.get(square["dtype"], 0.0), square["flops_per_second"])
        matmuls = tuple(
            Gemm(**{name: one[name] for name in ("rows", "inner", "outputs", "dtype", "flops_per_second")})
            for one in self.shapes
        )
        shares = [rate / best[dtype] for dtype, rate in self.attention_flops_per_second.items() if best.get(dtype)]
        return Machine(
            name=self.key.device,
            kind=self.key.kind,
            level="L1",
            source=f"profile of {self.created[:10]}",
            matmul_flops=best,
            attention_share=max(shares) if shares else 0.3,
            bytes_per_second=self.copy_bytes_per_second,
            # A training step's operations take Python and autograd besides the launch that was measured.
            launch_seconds=max(self.launch_seconds, LAUNCH_SECONDS) if self.key.kind == "cuda" else self.launch_seconds,
            bus_bytes_per_second=self.all_reduce_bytes_per_second or PCIE_BYTES_PER_SECOND,
            memory_bytes=self.memory_bytes,
            watts=self.key.power_limit_watts,
            peak_flops=best if self.key.kind == "cpu" else {},
            context_bytes=self.context_bytes,
            matmuls=matmuls,
            attentions=tuple(AttentionRate(**one) for one in self.attentions),
        )


def folder() -> Path:
    return home() / "profiles"


def save_profile(profile: Profile) -> Path:
    path = folder() / f"{profile.key.name}.json"
    write_json(path, asdict(profile))
    return path


def _stored(pattern: str) -> Iterator[Profile]:
    """Profiles of this version in files that are called so; none in a folder that cannot be searched."""
    with suppress(OSError):
        for path in sorted(folder().glob(pattern)):
            known = read_json(path)
            if known.get("version") == VERSION:
                yield Profile.from_dict(known)


def find_profile(key: Key) -> tuple[Profile, list[str]] | None:
    """The stored profile of this device, and in what its key is another one by now; None if there is none."""
    profile = next(_stored(f"{key.name}.json"), None)
    return (profile, key.differences(profile.key)) if profile else None


def profile_called(card: str) -> Profile | None:
    """A profile of the card of this name, such as one copied from another machine; None if there is none."""
    for profile in _stored("*.json"):
        found = card_called(profile.key.device, profile.memory_bytes)
        if found is not None and found.name == card:
            return profile
    return None


def gpu_called(name: str) -> Machine:
    """The GPU of this name: measured rates where there is a profile of it, else its specification."""
    card = find_card(name)
    stored = profile_called(card.name)
    return machine_of_card(card) if stored is None else with_specs(stored.machine(), card)


def with_specs(machine: Machine, card: Card | None) -> Machine:
    """A profile's rates with the specified peaks of its GPU and, where the driver did not report them, its watts."""
    if card is None:
        return machine
    sheet = machine_of_card(card)
    return replace(
        machine,
        name=card.name,
        peak_flops=sheet.peak_flops,
        watts=machine.watts or sheet.watts,
        matmul_flops={**sheet.matmul_flops, **machine.matmul_flops},
    )
