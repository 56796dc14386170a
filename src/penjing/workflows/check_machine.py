"""penjing doctor: check this machine."""

import importlib.metadata
import re
import sys

import torch
from rich.console import Console
from rich.text import Text

from penjing import __version__, devices
from penjing.base import formatting as units
from penjing.base.markup import print_table
from penjing.devices import host
from penjing.devices.choose import local_device
from penjing.kernels.ops import report
from penjing.plan import hardware
from penjing.plan.gpu_specs import match_gpu_spec
from penjing.plan.microbenchmarks import squares
from penjing.planner.profile import matmul_cells
from penjing.train.load_model import set_threads

MATMUL_SECONDS = 1.0  # for larger and larger matmuls
FOR_DEVELOPERS = ("test", "dev")  # extras that no command needs


def check_machine(console: Console) -> None:
    """Print versions, devices, matmul speed, optional packages and kernel backends of this machine."""
    set_threads(0, 1)
    device = local_device("auto")
    dtype = devices.of(device).compute_dtype("auto", device)
    machine = hardware.describe(device, dtype)
    measured = squares(device, dtypes=[str(machine["compute_dtype"])], budget_seconds=MATMUL_SECONDS)
    size, name, rate, _, share = matmul_cells(measured[-1], match_gpu_spec(str(machine["device"])))
    lines = {
        "penjing": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        host.PROCESSOR: f"{machine[host.PROCESSOR]}, {machine['cores']} cores, {machine['threads']} threads",
        "memory": units.gibibytes(float(str(machine["memory_bytes"]))),
        "device": machine["device"],
        "matmul": f"{name}, {size}: {rate} TFLOPS, {share}",
    }
    for heading, value in lines.items():
        console.print(f"{heading:<20} {value}", highlight=False)
    for package, extra in optional_packages().items():
        try:  # not by import: a folder `wandb` of runs can be imported too
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = f'not installed; pip install "penjing[{extra}]"'
        console.print(Text(f"{package:<20} {version}"))
    console.print()
    print_table(console, ("op", "backend", "why not another"), report(device, dtype))


def optional_packages() -> dict[str, str]:
    """The packages of all extras, as penjing's metadata lists them, and the extra of each."""
    try:
        requirements = importlib.metadata.requires("penjing") or ()
    except importlib.metadata.PackageNotFoundError:  # run from its source, not installed
        return {}
    found = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*\bextra == [\"']([\w-]+)", requirement)
        if match and match[2] not in FOR_DEVELOPERS and match[1] != "penjing":
            found[match[1]] = match[2]
    return found
