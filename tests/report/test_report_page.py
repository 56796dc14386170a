"""The report in a browser: its curves are drawn, and no other script runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import CHROMIUM, CONTRAST
from report_synthetic import put_lines, write_folder, write_run

from penjing.report.html import write_report
from penjing.report.load_runs import read_record

pytest.importorskip("playwright.sync_api", reason="the report's test needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the report's test needs chromium")


@pytest.fixture
def opened(browser, tmp_path: Path):
    """Opens the report of runs. Nothing may go wrong in its console."""
    troubles: list[str] = []
    context = browser.new_context(viewport={"width": 1000, "height": 800}, offline=True)
    context.set_default_timeout(20_000)

    def open_report(*folders: Path):
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.goto(write_report(read_record(folders), tmp_path / "report.html").as_uri())
        return page

    yield open_report
    context.close()
    assert not troubles


def test_curves_are_drawn_and_show_their_values(opened, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "chats")
    put_lines(run / "metrics.jsonl", [{"step": step, "tokens": 100 * step, "loss": 5 - step} for step in range(1, 5)])
    page = opened(run)
    chart = page.locator("figure", has_text="Loss").first
    over = chart.locator(".u-over")
    values = chart.locator(".u-value")
    assert values.all_inner_texts() == ["400", "1"]
    over.hover(position={"x": 1, "y": 20})
    assert values.all_inner_texts() == ["100", "4"]
    page.mouse.move(0, 0)
    assert values.all_inner_texts() == ["400", "1"]
    box = over.bounding_box()
    over.hover(position={"x": box["width"] - 2, "y": 20})
    assert values.all_inner_texts() == ["400", "1"]
    over.drag_to(over, source_position={"x": 2, "y": 9}, target_position={"x": box["width"] / 3, "y": 9})  # zoom
    over.hover(position={"x": box["width"] - 2, "y": 20})
    assert values.all_inner_texts() == ["200", "3"]
    over.dblclick()
    for scheme, ink in (("dark", "rgb(230, 228, 218)"), ("light", "rgb(38, 37, 31)")):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("getComputedStyle(document.body).color") == ink
        page.locator("canvas").first.wait_for()
        assert page.evaluate(CONTRAST) == []


def test_a_quickstart_with_hostile_texts_on_a_phone(opened, tmp_path: Path) -> None:
    page = opened(write_folder(tmp_path / "quickstart"))
    page.set_viewport_size({"width": 375, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.locator("canvas").count() == page.locator(".plot").count() > 8


def test_a_chart_in_a_closed_part_is_drawn_when_it_opens(opened, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "chats")
    put_lines(run / "metrics.jsonl", [{"step": step, "tokens": step, "loss": 1.0, "my_own": 2.0} for step in (1, 2)])
    page = opened(run)
    part = page.locator("details:has(.plot)")
    assert part.locator("canvas").count() == 0
    part.locator("summary").click()
    part.locator("canvas").wait_for()
