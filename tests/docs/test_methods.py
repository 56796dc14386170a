"""The pages of docs/methods say what the record says, and their plots are there."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from pages import ROOT, script

MADE = script("benchmarks/method_pages.py")
PAGES = [ROOT / f"docs/methods/{name}.md" for name in ("distillation", "dpo", "grpo", "ppo", "reward")]


def text(page):
    return page.read_text(encoding="utf-8")


def test_a_page_says_what_is_optimised_what_to_watch_and_what_came_of_it():
    for page in PAGES:
        for heading in ("## What it optimises", "## What to watch", "## From a real run"):
            assert heading in text(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_on_record(page):
    found = MADE.BLOCK.findall(text(page))
    assert [name for _, name, _ in found] == [page.stem]
    assert MADE.filled(text(page), MADE.read_records(ROOT)) == text(page)
    assert text(page).count(" % |") >= 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_plots_are_there(page):
    linked = re.findall(r"\]\(([^)#]+)\)", text(page))
    plots = [target for target in linked if target.endswith(".svg")]
    assert plots
    for target in plots:
        drawing = ElementTree.parse(page.parent / target).getroot()
        assert "prefers-color-scheme: dark" in ElementTree.tostring(drawing, encoding="unicode")
        assert len(list(drawing.iter("{http://www.w3.org/2000/svg}circle"))) > 2


def test_every_plot_has_a_page():
    shown = {Path(target).name for page in PAGES for target in re.findall(r"\]\((plots/[^)]+)\)", text(page))}
    assert shown == {f"{plot.name}.svg" for plot in MADE.PLOTS}


def test_the_record_has_three_seeds_of_each():
    found = MADE.read_records(ROOT)
    for method in ("dpo", "dpo_lora", "reward", "grpo", "distill"):
        assert len(found[method]) == 3, method
    for seed in found["dpo"].values():
        assert seed["val_reward_margin"]["after"] > 0.3
        assert seed["val_reward_accuracy"]["after"] >= 0.8  # of pairs; one half before, by construction
    for seed in [*found["dpo"].values(), *found["dpo_lora"].values()]:
        asked = seed["questions"]
        assert asked["tool"]["before"] == 40
        assert asked["tool"]["after"] >= 38
        assert not any(kind["lost"] for kind in asked.values())
    for seed in found["grpo"].values():
        assert seed["val_exact_match"]["after"] - seed["val_exact_match"]["before"] >= 0.4
    for seed in found["distill"].values():
        assert max(seed["recovered"].values()) >= 0.5
