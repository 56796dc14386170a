"""The pages of docs/methods say what the record says, and their plots are there."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / f"docs/methods/{name}.md" for name in ("distillation", "dpo", "grpo", "ppo", "reward")]


def script():
    spec = importlib.util.spec_from_file_location("method_pages", ROOT / "benchmarks/method_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(pages):
    return pages.read_records(ROOT)


def text(page):
    return page.read_text(encoding="utf-8")


def test_a_page_says_what_is_optimised_what_to_watch_and_what_came_of_it():
    for page in PAGES:
        for heading in ("## What it optimises", "## What to watch", "## From a real run"):
            assert heading in text(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_on_record(page):
    pages = script()
    found = pages.BLOCK.findall(text(page))
    assert [name for _, name, _ in found] == [page.stem]
    assert pages.filled(text(page), record(pages)) == text(page)
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
    assert shown == {f"{plot.name}.svg" for plot in script().PLOTS}


def test_the_record_has_three_seeds_of_each():
    found = record(script())
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


def test_a_chart_without_points_is_nothing_alone_too():
    pages = script()
    assert not pages.standalone(
        pages.line_chart([pages.Series("a", [(0, None)])], title="t", x=pages.STEPS, y=pages.NATS), title="t"
    )


def test_a_chart_alone_brings_its_colours_title_and_room():
    pages = script()
    chart = pages.line_chart([pages.Series("a", [(0, 1), (1, 2)], dots=True)], title="t", x=pages.STEPS, y=pages.NATS)
    drawing = ElementTree.fromstring(str(pages.standalone(chart, title="KL < 1 & more")))
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    left, top, width, height = map(int, drawing.attrib["viewBox"].split())
    assert left < 0 > top
    assert (width + 2 * left, height + top + left) == (460, 250)
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "KL < 1 & more"
    style = drawing.find("{http://www.w3.org/2000/svg}style")
    assert style is not None and "prefers-color-scheme: dark" in (style.text or "")
