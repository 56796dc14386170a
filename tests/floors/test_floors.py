"""Floors: a file imports only from its own package and from lower floors. Read from the source: no import can hide."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import penjing

ROOT = Path(penjing.__file__).parent
FLOORS = {
    0: "base",
    1: "data kernels devices",
    2: "agent_tools model loader checkpoint",
    3: "plan objective optim parallel track convert",
    4: "infer",  # a stage may let the model that it trains answer
    5: "train",
    6: "eval export report rl serve",
    7: "recipes",
    8: "planner",
    9: "workflows",
    10: "api ui",
    11: "commands",
    12: "cli",
    13: "__main__",  # the door: calls cli and nothing else
}
FLOOR_OF = {package: floor for floor, packages in FLOORS.items() for package in packages.split()}
# (module, imported package), each with its reason; better none
EXCEPTIONS: set[tuple[str, str]] = set()
MOST_PARAMETERS = 10
WITHOUT_TORCH = ("base", "data", "agent_tools")


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("penjing", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path) -> Iterator[str]:
    """Dotted names of what a module imports, at its top or inside a function."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def package_of(name: str) -> str:
    """`penjing.data.packing.concat` -> `text`; the package itself and `penjing.__version__` belong to none."""
    return name.partition(".")[2].partition(".")[0]


def test_every_package_has_a_floor() -> None:
    packages = {package_of(name) for name in modules()} - {""}
    assert packages <= FLOOR_OF.keys()


def test_imports_go_down_only() -> None:
    upward = []
    for name, path in modules().items():
        here = package_of(name)
        for imported in imports(name, path):
            there = package_of(imported)
            if not imported.startswith("penjing.") or there == here or there not in FLOOR_OF:
                continue
            if FLOOR_OF[there] >= FLOOR_OF.get(here, 0) and (name, there) not in EXCEPTIONS:
                upward.append(f"{name} imports {imported}")
    assert not upward, "\n".join(upward)


def test_no_circle_of_files() -> None:
    """Imports inside functions, and those for types only, count too."""
    files = modules()
    below = {name: {found for found in imports(name, path) if found in files} - {name} for name, path in files.items()}
    for name in below:  # a package's own file is imported with each of its modules, and imports none of them
        below[name] -= {package for package in below[name] if name.startswith(package + ".")}
    while leaves := [name for name, imported in below.items() if not imported]:
        below = {name: imported.difference(leaves) for name, imported in below.items() if name not in leaves}
    assert not below


def test_no_function_has_more_than_ten_parameters() -> None:
    """But commands, whose options they are, and Triton's kernels, which take no tensors but addresses and strides."""
    found = []
    for name, path in modules().items():
        if package_of(name) == "commands" or name == "penjing.kernels.triton.kernels":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                if len([*given.posonlyargs, *given.args, *given.kwonlyargs]) > MOST_PARAMETERS:
                    found.append(f"{name}.{node.name}")
    assert not found


def test_data_needs_no_torch() -> None:
    for name, path in modules().items():
        if package_of(name) in WITHOUT_TORCH:
            assert "torch" not in {imported.partition(".")[0] for imported in imports(name, path)}, name


def test_the_reader_of_imports_sees_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "pack.py"
    path.write_text("import a.b\nfrom . import c\nfrom ..d import e\ndef f():\n    from .g.h import i\n")
    found = set(imports("penjing.text.pack", path))
    assert {"a.b", "penjing.text.c", "penjing.d.e", "penjing.text.g.h.i"} <= found


# As there is no circle of files, one process may import them all, those of the floors without torch first.
ALL = """
import importlib, sys
sys.modules["torch"] = None
for name in [*sys.argv[1].split(), "", *sys.argv[2].split()]:
    try:
        importlib.import_module(name) if name else sys.modules.pop("torch")
    except Exception as error:
        sys.exit(f"{name}: {error!r}")
"""


def import_all(light: list[str], others: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALL, " ".join(light), " ".join(others)]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_module_can_be_imported() -> None:
    needs = {"triton": "penjing.kernels.triton.kernels"}
    absent = [name for library, name in needs.items() if not importlib.util.find_spec(library)]
    names = [name for name in modules() if not name.endswith("__main__") and name not in absent]
    light = [name for name in names if package_of(name) in WITHOUT_TORCH]
    done = import_all(light, [name for name in names if name not in light])
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_module_that_cannot_be_imported_is_noticed() -> None:
    assert "penjing.base.absent" in import_all(["penjing.base.seeds", "penjing.base.absent"], []).stderr
    assert "penjing.model.norm" in import_all(["penjing.model.norm"], []).stderr, "it needs torch"
