"""Reads the pages for people: their prose, their commands, and what scripts and tests say."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def text_of(page: Path | str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def parts(page: Path | str) -> tuple[list[str], list[str]]:
    """Lines of prose and tables, and lines of code blocks for a shell."""
    prose, shell, language = [], [], None
    for line in text_of(page).splitlines():
        if line.startswith("```"):
            language = line[3:].strip() if language is None else None
        elif language is None:
            prose.append(line)
        elif language in ("", "sh"):
            shell.append(line)
    return prose, shell


def calls(page: Path | str) -> Iterator[list[str]]:
    """What stands behind `penjing`, in code blocks and in prose."""
    prose, shell = parts(page)
    for line in shell:
        words = shlex.split(line, comments=True)
        at = next((i for i, word in enumerate(words) if Path(word).name == "penjing"), None)
        if at is not None:
            yield words[at + 1 :]
    for code in re.findall(r"`penjing ([^`]+)`", " ".join(prose)):
        yield shlex.split(code)


def literal(file: str, name: str) -> Any:
    """The value that a name is given in a file, which is not run."""
    for node in ast.parse(text_of(file)).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"no {name} in {file}")


def script(file: str) -> Any:
    """A file that is no part of a package as a module, such as `benchmarks/recipe.py`."""
    path = ROOT / file
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # as for a script
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module
