"""Every page for people: its commands, settings, files and links exist, its lines are short, its words the field's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, calls, literal, parts, text_of
from typer.main import get_command

from penjing.base import config
from penjing.cli import app
from penjing.recipes import RECIPES
from penjing.workflows.train import resolve_run

DOCS = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/methods").glob("*.md"))]
LOG = ROOT / "docs/log.md"  # says what was so when it was written
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in DOCS if page != LOG),
]
NOT_HERE = ("init_from=", "objective.teacher=", "objective=smoothed")  # runs, and what CONTRIBUTING.md adds
STAGED = ("train", "run", "memory", "search", "forecast", "show")  # commands that take a recipe and settings
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def known_settings() -> set[str]:
    def keys(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in table.items():
            yield prefix + name
            if isinstance(value, dict):
                yield from keys(value, f"{prefix}{name}.")

    runs = [resolve_run(name) for name in ("pretrain", "sft", "dpo", "reward", "grpo", "ppo", "distill")]
    runs.append(resolve_run("pretrain", config.parse_overrides(["optimizer=adamw", "schedule=cosine"])))
    return {key for run in runs for key in keys(config.to_dict(run))}


KNOWN = known_settings()
SECTIONS = {key for key in KNOWN if any(other.startswith(f"{key}.") for other in KNOWN)}


@pages
def test_commands_exist(page: Path) -> None:
    for words in calls(page):
        command: Any = get_command(app)
        while getattr(command, "commands", None) and words and not words[0].startswith("-"):
            if command.name == "plan" and words[0] not in command.commands:
                words = ["run", *words]  # `penjing plan RECIPE`
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= options | {"--help"}, words
        recipe, _, dial = words[0].partition(":") if words else ("", "", "")
        if command.name in STAGED and recipe in RECIPES and not dial.isupper():
            settings = [word for word in words[1:] if "=" in word and not word.startswith(NOT_HERE)]
            resolve_run(words[0], config.parse_overrides(settings))


def test_the_check_of_commands_sees_them() -> None:
    found = {page.name: sum(1 for _ in calls(page)) for page in PAGES}
    for name, least in {"README.md": 8, "train.md": 12, "align.md": 7, "tools.md": 8, "distillation.md": 6}.items():
        assert found[name] >= least, name


@pages
def test_settings_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(sorted(SECTIONS))})\.(?!md)[a-z0-9_.]*[a-z0-9_])", text_of(page))
    assert set(named) <= KNOWN
    assert page.name != "train.md" or len(set(named)) >= 15


@pages
def test_files_and_links_are_there(page: Path) -> None:
    text = text_of(page)
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z0-9_]+\.(?:py|c|md|json))`", text):
        if not name.startswith("runs/") and not name.endswith(
            (
                "/smoothed.py",
                "/standin.py",
                "/value_clipping.py",
                "/table.py",
                "/shouting.py",
                "/successors.py",
                "/exact.py",
            )
        ):
            assert (ROOT / name).is_file() or (ROOT / "src/penjing" / name).is_file(), name
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        if "://" not in target:
            linked = page.parent / name if name else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def test_every_record_is_linked_from_a_page() -> None:
    """One that supports no claim is old: `git rm` it."""
    linked = "".join(text_of(page) for page in (*PAGES, LOG))
    assert not [path.name for path in sorted((ROOT / "results").iterdir()) if f"results/{path.name})" not in linked]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_lines_are_short(page: Path) -> None:
    """Of prose: tables, commands, what is rendered and Chinese text, which knows no line breaks, are not."""
    if page.name != "README.zh-CN.md":
        prose = re.sub(r"<!-- .*?<!-- end[^\n]*", "", "\n".join(parts(page)[0]), flags=re.DOTALL)
        assert not [line for line in prose.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]


@pages
def test_a_matmul_is_called_so(page: Path) -> None:
    assert not re.search(r"\bproducts?\b", text_of(page), flags=re.IGNORECASE)


def test_the_design_shows_each_package_on_its_floor() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text_of(ROOT / "docs/design.md"), flags=re.MULTILINE)
    shown = {package: int(floor) for floor, packages in rows for package in re.findall(r"`(\w+)`", packages)}
    floors = literal("tests/floors/test_floors.py", "FLOORS")
    expected = {package: floor for floor, packages in floors.items() for package in packages.split()}
    there = {path.stem for path in (ROOT / "src/penjing").iterdir()} - {"__main__"}
    assert shown == {package: floor for package, floor in expected.items() if package in there}
