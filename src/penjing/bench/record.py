"""The record format of all benchmarks: date, machine, versions, options, and every trial with its figures."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from typing import Any

import torch

import penjing
from penjing.plan import hardware

PACKAGES = ("torch", "transformers", "trl", "accelerate", "litgpt", "llama-cpp-python")


def environment(device: torch.device, dtype: torch.dtype, **more: object) -> dict[str, Any]:
    """Date, machine and versions. more: further fields of the machine."""
    versions = {"python": platform.python_version(), "penjing": penjing.__version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {**hardware.describe(device, dtype), **more}
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions}
