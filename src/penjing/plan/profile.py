"""A machine's measured rates, saved by `penjing plan profile`: level L1 of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from penjing.base.files import read_json, write_json
from penjing.base.user_dir import user_dir
from penjing.devices import HOST_TYPE
from penjing.plan.device_model import (
    LAUNCH_SECONDS,
    PCIE_BYTES_PER_SECOND,
    AttentionRate,
    Gemm,
    Machine,
    machine_from_spec,
)
from penjing.plan.gpu_specs import GpuSpec, find_gpu_spec, match_gpu_spec

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """What a profile is valid for. If the key has changed, the profile is out of date and the changes are listed."""

    device: str  # name reported by the driver or the CPU
    kind: str  # its type, as torch calls it
    driver: str = ""
    torch: str
    power_limit_watts: float = 0.0  # 0 = unknown
    threads: int = 0  # of a CPU; 0 for others
    devices: int = 1

    @property
    def name(self) -> str:
        """File name, by device and number of threads: a newer profile replaces an older one."""
        threads = f"-{self.threads}-threads" if self.threads else ""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.device).strip("-") + threads

    def differences(self, other: ProfileKey) -> list[str]:
        """The fields that differ, as text."""
        ours, others = asdict(self), asdict(other)
        return [f"{name} {others[name]} -> {ours[name]}" for name in ours if ours[name] != others[name]]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured rates in FLOPs and bytes per second. `spread`: (slowest - fastest) / median of the tries."""

    key: ProfileKey
    created: str  # UTC
    seconds: float  # spent measuring
    squares: list[dict[str, Any]]  # {"size", "dtype", "flops_per_second", "spread"}
    shapes: list[dict[str, Any]] = field(default_factory=list)  # {"rows", "inner", "outputs", "dtype", ...}
    attention_flops_per_second: dict[str, float] = field(default_factory=dict)  # by dtype, fused, forward and backward
    attentions: list[dict[str, Any]] = field(default_factory=list)  # {"dtype", "keys", "flops_per_second"}; CPU only
    copy_bytes_per_second: float
    launch_seconds: float
    context_bytes: int
    memory_bytes: int
    all_reduce_bytes_per_second: float = 0.0  # 0 = one device
    version: int = VERSION

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        known = {field.name for field in fields(ProfileKey)}  # files of earlier versions have more
        return cls(**{**data, "key": ProfileKey(**{name: data["key"][name] for name in known & data["key"].keys()})})

    def machine(self) -> Machine:
        """The rates in the form that a plan uses: the fastest squares as the general rate, plus measured shapes."""
        best: dict[str, float] = {}
        for square in self.squares:
            best[square["dtype"]] = max(best.get(square["dtype"], 0.0), square["flops_per_second"])
        matmuls = tuple(
            Gemm(**{name: measured[name] for name in ("rows", "inner", "outputs", "dtype", "flops_per_second")})
            for measured in self.shapes
        )
        shares = [rate / best[dtype] for dtype, rate in self.attention_flops_per_second.items() if best.get(dtype)]
        on_host = self.key.kind == HOST_TYPE
        return Machine(
            name=self.key.device,
            kind=self.key.kind,
            level="L1",
            source=f"profile of {self.created[:10]}",
            matmul_flops=best,
            attention_share=max(shares) if shares else 0.3,
            bytes_per_second=self.copy_bytes_per_second,
            # Operations of a training step cost Python and autograd time besides the measured launch.
            launch_seconds=self.launch_seconds if on_host else max(self.launch_seconds, LAUNCH_SECONDS),
            bus_bytes_per_second=self.all_reduce_bytes_per_second or PCIE_BYTES_PER_SECOND,
            memory_bytes=self.memory_bytes,
            watts=self.key.power_limit_watts,
            peak_flops=best if on_host else {},
            context_bytes=self.context_bytes,
            matmuls=matmuls,
            attentions=tuple(AttentionRate(**measured) for measured in self.attentions),
        )


def profiles_dir() -> Path:
    return user_dir() / "profiles"


def save_profile(profile: Profile) -> Path:
    path = profiles_dir() / f"{profile.key.name}.json"
    write_json(path, asdict(profile))
    return path


def _saved_profiles(pattern: str) -> Iterator[Profile]:
    """Profiles of this version in files matching the pattern; none if the folder is unreadable."""
    with suppress(OSError):
        for path in sorted(profiles_dir().glob(pattern)):
            data = read_json(path)
            if data.get("version") == VERSION:
                yield Profile.from_dict(data)


def find_profile(key: ProfileKey) -> tuple[Profile, list[str]] | None:
    """The saved profile of this device, and the differences to its key; None if there is none."""
    profile = next(_saved_profiles(f"{key.name}.json"), None)
    return (profile, key.differences(profile.key)) if profile else None


def profile_of_gpu(card: str) -> Profile | None:
    """A saved profile of the card of this name, perhaps copied from another machine; None if there is none."""
    for profile in _saved_profiles("*.json"):
        spec = match_gpu_spec(profile.key.device, profile.memory_bytes)
        if spec is not None and spec.name == card:
            return profile
    return None


def gpu_machine(name: str) -> Machine:
    """The GPU of this name: measured rates if it has a profile, else its data sheet."""
    card = find_gpu_spec(name)
    stored = profile_of_gpu(card.name)
    return machine_from_spec(card) if stored is None else with_specs(stored.machine(), card)


def with_specs(machine: Machine, card: GpuSpec | None) -> Machine:
    """A profile's rates, plus the data sheet's peaks and, if the driver did not report it, the power limit."""
    if card is None:
        return machine
    sheet = machine_from_spec(card)
    return replace(
        machine,
        name=card.name,
        peak_flops=sheet.peak_flops,
        watts=machine.watts or sheet.watts,
        matmul_flops={**sheet.matmul_flops, **machine.matmul_flops},
    )
