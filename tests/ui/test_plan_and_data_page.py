"""The tabs plan and data in a browser: what a person drags, types and chooses."""

import json
import re
import socket
import threading

import pytest
import uvicorn
from chromium import CHROMIUM

from penjing.ui import plan
from penjing.ui.app import make_app
from penjing.ui.site import Site

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
expect = sync_api.expect
MOST = 60_000  # ms: other programs may use the cores
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page's tests need chromium")
CHAT = {"messages": [{"role": "user", "content": "<b>hello</b>"}, {"role": "assistant", "content": "<i>good day</i>"}]}


@pytest.fixture(scope="module", autouse=True)
def patience():
    expect.set_options(timeout=MOST)
    yield
    expect.set_options(timeout=5_000)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    plan.estimate({"gpu": "RTX 3090"})  # imports
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(Site(folder), "token"), log_level="error"))
    running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    running.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    running.join()


@pytest.fixture
def opened(browser, address):
    """Opens a tab. At the end nothing may have gone wrong in the console."""
    contexts, troubles = [], []

    def open_tab(place, *, locale="en-US", width=1200, height=900):
        made = browser.new_context(locale=locale, viewport={"width": width, "height": height})
        made.set_default_timeout(MOST)
        contexts.append(made)
        page = made.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(f"{address}#token=token")
        page.goto(f"{address}#{place}")
        return page

    yield open_tab
    for made in contexts:
        made.close()
    assert not troubles


def figures(page):
    return [page.locator(f"#plan-out-{name}").inner_text() for name in ("time", "memory", "energy")]


def bars(page):
    return page.locator(".waterfall .part").evaluate_all(
        "nodes => nodes.map(node => node.getBoundingClientRect().width)"
    )


def test_dragging_moves_time_memory_and_the_address(opened):
    page = opened("plan")
    expect(page.locator("#plan-out-time")).not_to_have_text("–")
    before, drawn = figures(page), bars(page)
    slider = page.get_by_role("slider", name="Parameters")
    place = page.locator(".plan-results section").first.bounding_box()
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#plan-out-parameters")).to_have_text(re.compile("^5"))
    assert all(old != new for old, new in zip(before, figures(page), strict=True))
    assert bars(page) != drawn and len(bars(page)) == len(drawn)
    assert page.locator(".plan-results section").first.bounding_box() == place, "nothing jumps"
    assert slider.get_attribute("aria-valuetext") == "60M"
    assert "model=ladder-60m" in page.locator("#plan-lines code").first.inner_text()
    kept = figures(page)
    page.get_by_role("button", name="Train with these settings").click()
    expect(page.locator(".tab-root.train")).to_contain_text("model.preset=ladder-60m")
    page.go_back()
    page.reload()
    expect(page.locator("#plan-out-time")).to_have_text(kept[0])
    assert figures(page) == kept
    expect(page.locator("#plan-cards tr[aria-current]")).to_contain_text("RTX 3090")


def test_typed_numbers_are_read_and_refused_settings_are_marked(opened):
    page = opened("plan?model=104m&gpus=2")
    tokens = page.locator("#plan-tokens + input")
    tokens.fill("1,234,567")
    tokens.press("Enter")
    expect(page.locator("#plan-lines")).to_contain_text("--tokens 1234567 ")
    expect(tokens).to_have_value("1234567")
    tokens.fill("2b tokens")
    tokens.press("Enter")
    expect(page.locator("#plan-out-tokens")).to_have_text("2B")
    batch = page.locator("#plan-batch + input")
    batch.fill("63")
    batch.press("Enter")
    expect(page.locator("#plan-batch-hint")).to_contain_text("wanted a multiple of 2 devices")
    assert batch.get_attribute("aria-invalid") == "true"
    page.locator('[data-field="batch"]').get_by_role("button", name="auto").click()
    expect(page.locator("#plan-status")).to_contain_text("on 2 × RTX 3090")
    assert batch.get_attribute("aria-invalid") == "false"
    expect(page.locator("#plan-out-tokens")).to_have_text("2B")


def test_cards_that_are_too_small_are_marked_and_can_be_chosen(opened):
    page = opened("plan?model=ladder-1b&tokens=1B", locale="zh-CN", width=390)
    row = page.locator("#plan-cards tr", has_text="RTX 3060")
    expect(row).to_contain_text("放不下")
    row.get_by_role("button").click()
    expect(page.locator("#plan-note-memory")).to_contain_text("放不下")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_trace_can_be_cancelled(opened):
    page = opened("plan?model=tiny&gpu=T4")
    button = page.locator("#plan-refine")
    expect(page.locator("#plan-source")).to_contain_text("By formula")
    button.click()
    expect(button).to_have_text("Cancel")
    button.click()
    expect(button).to_have_text("Refine: trace a step")
    expect(page.locator("#plan-source")).to_contain_text("By formula")


def test_a_file_is_shown_with_what_the_loss_covers_and_as_text(opened):
    page = opened("data")
    page.get_by_role("button", name="chats.jsonl").click()
    row = page.locator("pre.data-row").first
    expect(row).to_contain_text("<b>hello</b>")
    learned, masked = (row.locator(f".{kind}").all_inner_texts() for kind in ("learned", "masked"))
    assert "<i>good day</i>" in "".join(learned) and "<b>hello</b>" in "".join(masked)
    assert row.locator(".special").count() >= 4
    page.get_by_role("button", name="Try cleaning").click()
    expect(page.locator(".data-clean")).to_contain_text("kept")
