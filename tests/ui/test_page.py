"""The app in a browser."""

import json
import re
import sys
import time

import pytest
from chromium import CHROMIUM, CONTRAST, NAMELESS

from penjing.base.lock import is_locked, locked
from penjing.serve.errors import ApiError
from penjing.ui import processes
from penjing.ui.blind import _answer

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
expect = sync_api.expect
expect.set_options(timeout=20_000)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page's tests need chromium")
HALF_A_LABEL = """node => {
  const drawing = node.querySelector('canvas').getContext('2d');
  drawing.font = '11.5px system-ui, sans-serif';
  return drawing.measureText('16 min 40 s').width / 2;
}"""


@pytest.fixture
def opened(browser, address):
    """Opens the page at a tab. At the end nothing may have gone wrong in the console."""
    contexts, troubles = [], []

    def open_page(tab="runs", *, locale="en-US", width=1200, height=800, at=address, **context):
        made = browser.new_context(locale=locale, viewport={"width": width, "height": height}, **context)
        made.set_default_timeout(20_000)
        contexts.append(made)
        page = made.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(at)
        if tab != "runs":
            page.locator(f"#tab-{tab}").click()
        return page

    open_page.troubles = troubles
    yield open_page
    for made in contexts:
        made.close()
    assert not troubles


def grow(run, step, loss):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": loss, "tokens": 64 * step, "seconds": step / 4}) + "\n")


def test_curves_of_a_running_run_move_and_a_reload_shows_the_same(opened, folder, write_run):
    run = write_run(folder / "runs" / "a", 10, done=False)
    with locked(run):
        page = opened()
        expect(page.locator("#runs-rows .state")).to_have_text("running")
        expect(page.locator(".chart canvas").first).to_be_visible()
        loss = page.locator(".chart", has_text="Loss").locator(".legend b").first
        expect(loss).to_have_text("3.01")
        expect(page.locator("#runs-rows .run-facts")).to_contain_text("Loss 3.02 (held out)")
        began = time.monotonic()
        grow(run, 110, 1.25)
        expect(loss).to_have_text("1.25")
        assert time.monotonic() - began < 4, "the page is to follow within a second; this machine may be busy"
        assert "token" not in page.url
        page.reload()
        expect(loss).to_have_text("1.25")
        page.get_by_label("Compare runs/a").focus()
        for selector in ("#runs-rows button", ".samples ol"):
            page.locator(selector).evaluate("node => (node.dataset.kept = 1)")
        grow(run, 120, 1.5)
        expect(loss).to_have_text("1.5")
        expect(page.locator("#runs-rows button[data-kept]")).to_have_count(1)  # a click that had begun is not lost
        expect(page.locator(".samples ol[data-kept]")).to_have_count(1)  # nor the place where a person reads
        expect(page.get_by_label("Compare runs/a")).to_be_focused()
        other = opened()  # another device
        expect(other.locator(".chart", has_text="Loss").locator(".legend b").first).to_have_text("1.5")
    expect(page.locator("#runs-rows .state")).to_have_text("killed")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_runs_are_compared_zoomed_and_smoothed(opened, folder, write_run):
    for number in range(3):
        write_run(folder / f"r{number}", 30, level=number + 1)
    page = opened()
    expect(page.locator("#runs-rows .chosen")).to_have_count(1)
    for number in range(3):
        box = page.get_by_label(f"Compare r{number}")
        if not box.is_checked():
            box.check()
    chart = page.locator(".chart", has_text="Loss")
    expect(chart.locator(".legend li")).to_have_count(6)
    page.wait_for_timeout(300)  # the legends of the last run move the charts
    plot = chart.locator(".u-over").bounding_box()
    with page.expect_request(lambda request: "low=" in request.url and "high=" in request.url):
        page.mouse.move(plot["x"] + plot["width"] * 0.5, plot["y"] + 50)
        page.mouse.down()
        page.mouse.move(plot["x"] + plot["width"] * 0.75, plot["y"] + 60)
        colour = chart.locator(".u-select").evaluate("node => getComputedStyle(node).backgroundColor")
        assert not colour.startswith("rgba"), "what is chosen is seen"
        page.mouse.up()
    assert 140 < float(page.get_by_label("from", exact=True).input_value()) < 170
    page.get_by_label("to", exact=True).fill("20")
    page.get_by_label("to", exact=True).press("Enter")
    expect(page.get_by_text("No points in this range.")).to_be_visible()
    page.get_by_role("button", name="Show the whole run").click()
    expect(page.get_by_label("from", exact=True)).to_have_value("")
    expect(page.get_by_text("No points in this range.")).to_have_count(0)
    assert chart.evaluate(HALF_A_LABEL) < 34
    room = [chart.locator(part).bounding_box() for part in (".u-wrap", ".u-over")]
    assert room[0]["x"] + room[0]["width"] - room[1]["x"] - room[1]["width"] >= 34, "the last label is cut"
    with page.expect_request(re.compile("x=tokens")):
        page.get_by_label("Horizontal axis").select_option("tokens")
    page.get_by_label("log x").check()
    page.get_by_label("log y").check()
    with page.expect_request(re.compile("smooth=0.5")):
        page.get_by_label("Smooth").fill("0.5")
    page.reload()
    expect(chart.locator(".legend li")).to_have_count(6)
    expect(page.locator("#runs-details tbody tr")).to_have_count(3)  # what differs
    expect(page.get_by_label("Horizontal axis")).to_have_value("tokens")
    expect(page.get_by_label("log y")).to_be_checked()


def test_a_chosen_run_is_in_sight_in_a_long_list(opened, folder, write_run, address):
    for number in range(30):
        write_run(folder / f"r{number}", 1)
    last = opened(height=500).locator("#runs-rows .run-name").last.inner_text()
    page = opened(height=500)
    page.goto(f"{address.partition('#')[0]}#runs?run={last}")
    page.reload()
    expect(page.locator("#runs-rows .chosen .run-name")).to_have_text(last)
    expect(page.locator("#runs-rows .chosen")).to_be_in_viewport()


def test_curves_follow_the_theme_of_the_system(opened, folder, write_run):
    write_run(folder / "a")
    page = opened(color_scheme="light")
    plot = page.locator("#runs-charts .uplot").first
    plot.evaluate("node => (node.dataset.theme = 'light')")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("#runs-charts .uplot[data-theme]")).to_have_count(0)
    expect(plot).to_be_visible()


def test_what_a_run_left_behind_is_text(opened, folder, write_run):
    write_run(folder / "step")
    page = opened()
    expect(page.locator(".samples p")).to_have_text(" <b>sat</b>")
    expect(page.locator(".incidents")).to_contain_text("step 30: not finite")
    expect(page.locator("table.figures").first).to_contain_text("−20 %")
    page.get_by_text("More curves").click()
    expect(page.locator("#runs-small .chart")).to_have_count(3)
    assert page.url.endswith("#runs?run=step&small=1")


def test_why_a_run_ended_is_told_in_the_pages_language(opened, folder, write_run):
    run = write_run(folder / "a", done=False)
    line = "stopped by SIGTERM after step 200; the same command continues"
    (run / "ended.json").write_text(json.dumps({"ended": "stopped", "why": line, "steps_done": 200}))
    note = "held-out loss 2.500 is 0.300 above its best, 2.200 at step 10, which is kept"
    (run / "incidents.jsonl").write_text(json.dumps({"step": 20, "kind": "held-out loss rises", "note": note}) + "\n")
    page = opened(locale="zh-CN")
    expect(page.get_by_text("在第 200 步后因 SIGTERM 停止；重新执行同样的命令即可继续")).to_be_visible()
    chinese = "验证集 loss 为 2.500，比最低值 2.200（第 10 步）高 0.300，最低时的检查点已保留"
    expect(page.locator(".incidents")).to_contain_text(chinese)
    page.locator("#language").click()
    expect(page.get_by_text(line)).to_be_visible()
    expect(page.locator(".incidents")).to_contain_text(note)


def test_the_keyboard_moves_between_tabs(opened, folder, write_run):
    write_run(folder / "a")
    page = opened()
    page.locator("#tab-runs").focus()
    for key, tab in (("ArrowLeft", "chat"), ("ArrowRight", "runs"), ("End", "chat"), ("Home", "runs")):
        page.keyboard.press(key)
        expect(page.locator(f"#tab-{tab}")).to_be_focused()
        expect(page.locator(f"#tab-{tab}")).to_have_attribute("aria-selected", "true")
        expect(page.locator(f".tab-root.{tab}")).to_be_visible()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Tab")  # out of the tabs at once
    assert "tab" not in page.evaluate("document.activeElement.className").split()


def test_a_tab_that_is_left_at_once_leaves_nothing_behind(opened, folder, write_run):
    write_run(folder / "a")
    page = opened()
    for tab in ("plan", "data", "train", "chat", "runs") * 2:
        page.locator(f"#tab-{tab}").click()
    expect(page.locator("#runs-rows .state")).to_have_text("finished")
    assert page.locator("#panel > *").count() == 1 and page.url.endswith("#runs")
    paused = "import('./api.js').then(({ pause }) => pause(9, AbortSignal.abort())).catch((error) => error.name)"
    assert page.evaluate(paused) == "AbortError", "a tab that is left while it asks does not ask on"
    page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")  # away, and back
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    write_run(folder / "b")
    expect(page.locator("#runs-rows .state")).to_have_count(2)


def test_without_the_token_nothing_is_shown(opened, folder, write_run, address):
    write_run(folder / "a")
    page = opened(at=address.partition("#")[0])
    expect(page.locator("#runs-gone")).to_contain_text("with the token at its end")
    expect(page.locator("#runs-rows li")).to_have_count(0)
    opened.troubles.clear()  # the refusal is in the console


@pytest.mark.parametrize(("scheme", "locale"), [("light", "en-US"), ("dark", "zh-CN")])
def test_text_can_be_read_and_a_phone_has_no_sideways_scroll(opened, folder, write_run, scheme, locale):
    write_run(folder / "a")
    page = opened(locale=locale, color_scheme=scheme, width=390, height=844)
    ready = {"runs": ".samples", "train": "#train-start", "chat": ".chats"}
    for tab, selector in ready.items():
        page.locator(f"#tab-{tab}").click()
        expect(page.locator(selector).first).to_be_attached()
        assert page.evaluate("document.documentElement.scrollWidth") == 390, tab
        assert page.evaluate("document.querySelector('main').scrollWidth <= 390"), tab
        assert page.evaluate(CONTRAST) == [], tab
        assert page.evaluate(NAMELESS) == [], tab
    assert page.evaluate("document.documentElement.lang") == ("en" if locale == "en-US" else "zh-Hans")


def test_the_form_sends_what_was_changed_and_marks_what_is_refused(opened, folder, tmp_path_factory, monkeypatch):
    program = tmp_path_factory.mktemp("program") / "program.py"
    program.write_text(
        "import sys, time; from pathlib import Path; from penjing.base.lock import locked\n"
        "with locked(Path('runs/x')):\n    Path('runs/x/told').write_text(' '.join(sys.argv[1:])); time.sleep(30)\n"
    )
    monkeypatch.setattr(processes, "PROGRAM", (sys.executable, str(program)))
    page = opened("train")
    page.locator("#train-recipe").select_option("tiny")
    expect(page.locator(".setting .bad:visible")).to_contain_text("data.train: no data")
    page.get_by_label("data.train", exact=True).fill("a.txt")
    expect(page.locator(".train-result .panel-error")).to_have_text("penjing: a.txt: no such file or folder")
    (folder / "a.txt").write_text("text")
    page.get_by_label("max_steps", exact=True).fill("-3")
    page.reload()  # before the server was asked
    expect(page.get_by_label("seed", exact=True)).to_have_attribute("placeholder", "1")  # as the recipe has it
    expect(page.locator(".setting .bad:visible")).to_have_text("penjing: max_steps: out of range; got -3; wanted >= 0")
    expect(page.locator("#train-start")).to_be_disabled()
    page.get_by_label("max_steps", exact=True).fill("50")
    page.get_by_label("out", exact=True).fill("../x")
    expect(page.locator(".panel-error")).to_contain_text("outside the folder")
    page.get_by_label("out", exact=True).fill("runs/x")
    expect(page.locator(".command code")).to_have_text("penjing train tiny data.train=a.txt max_steps=50 out=runs/x")
    page.locator("#train-search").fill("optimizer.weight_decay")
    page.locator('[id*="weight_decay"]:visible').first.fill("-1")  # each optimizer has one; that of the other is absent
    expect(page.locator(".setting .bad:visible")).to_contain_text("optimizer.weight_decay: out of range")
    page.locator(".setting.changed:visible").get_by_role("button").click()
    page.locator("#train-search").fill("momentum nothing")
    expect(page.locator(".setting:visible")).to_have_count(0)
    page.locator("#train-search").fill("optimizer.momentum")
    expect(page.locator(".setting:visible")).to_have_count(1)
    page.locator("#train-start").click()
    expect(page.locator("#runs-rows .state")).to_have_text("running")
    assert (folder / "runs" / "x" / "told").read_text() == "train tiny data.train=a.txt max_steps=50 out=runs/x"
    page.get_by_role("button", name="Stop (saves first)").click()
    expect(page.locator("#runs-rows .state")).to_have_text("killed")  # this program saves nothing
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)  # nor its settings
    assert not is_locked(folder / "runs" / "x")
    opened.troubles.clear()  # the refusal of ../x is in the console


def test_the_usual_mistakes_are_told_in_the_pages_language(opened, folder):
    page = opened("train", locale="zh-CN")
    wanted = "data.train：没有数据。请填写 data.train，或查看 `penjing data list`。"
    expect(page.locator(".panel-error")).to_have_text(wanted)
    page.get_by_label("data.train", exact=True).fill("a.txt")
    expect(page.locator(".panel-error")).to_have_text("a.txt：没有这个文件或文件夹")
    page.get_by_label("max_steps", exact=True).fill("-3")
    expect(page.locator(".setting .bad:visible")).to_have_text("max_steps：超出范围；实际为 -3；应为 >= 0")
    told = "runs/a: strange, and new: yes; got 1.5; wanted at most 3. Do it."
    texts = page.evaluate("(text) => import('./words.js').then(({ said }) => said(text))", told)
    assert texts == "runs/a：strange, and new: yes；实际为 1.5；应为 at most 3。Do it."
    page.locator("#language").click()
    expect(page.locator(".panel-error")).to_have_text("penjing: max_steps: out of range; got -3; wanted >= 0")
    assert page.evaluate("(text) => import('./words.js').then(({ said }) => said(text))", told) == told
    page.locator("#tab-plan").click()
    page.locator("#language").click()
    page.locator("[data-field=seq_len] .plain-input").fill("3")
    page.keyboard.press("Tab")
    expect(page.locator("#plan-status")).to_have_text("data.seq_len：超出范围；实际为 3；应为 >= 8")


def test_two_checkpoints_are_compared_blind_by_keyboard(opened, folder, write_run, models):
    (write_run(folder / "runs" / "a") / "checkpoints" / "step-00000010").mkdir(parents=True)
    page = opened("chat")
    text = page.locator(".blind-form textarea")
    answers = page.locator(".samples")
    for key, place in (("1", 1), ("4", 2)):
        text.fill("Who?")
        text.press("Enter")
        expect(page.get_by_role("button", name="A better")).to_be_focused()
        expect(answers.locator("h3")).to_have_text(["A", "B"])
        page.keyboard.press(f"Control+{key}")  # another tab of the browser
        page.locator("#theme").click()
        for _ in range(2):
            page.locator("#language").click()
            expect(answers.locator("h3")).to_have_text(["A", "B"])
            expect(text).to_have_value("Who?")
        page.get_by_role("button", name="A better").focus()
        page.keyboard.press(key)
        expect(answers.locator("h3").first).to_have_text(re.compile(r"^A was runs/[ab]@\d0$"))
        expect(answers.locator("p").first).to_have_text(re.compile(r"^Who\? http://[ab]/$"))
        expect(page.locator("table.figures tbody td:nth-child(4)")).to_have_text(["1", "0"])
        expect(page.locator("table.figures tbody td:nth-child(5)")).to_have_text([str(place - 1)] * 2)
        expect(text).to_be_focused()
    page.reload()
    expect(page.locator("table.figures tbody tr")).to_have_count(2)
    assert [json.loads(line)["vote"] for line in (folder / "votes.jsonl").read_text().splitlines()] == ["a", "bad"]


def test_a_run_opens_its_chat_and_a_reload_starts_nothing(opened, folder, write_run, models, monkeypatch):
    (write_run(folder / "runs" / "a") / "checkpoints" / "step-00000010").mkdir(parents=True)
    started = []
    monkeypatch.setattr(processes.Chats, "start", lambda _, run, name, step: started.append((name, step)))
    page = opened()
    page.get_by_role("button", name="Chat with this checkpoint").click()
    for _ in range(2):
        expect(page.get_by_role("link", name="Open the chat")).to_have_count(2)
        page.reload()
    assert started == [("runs/a", 10)]


def test_a_chat_that_cannot_be_stopped_says_so_and_a_moment_later_all_is_well(opened, models, monkeypatch):
    def refuse(*_):
        raise ApiError(409, "it is busy")

    monkeypatch.setattr(processes.Chats, "stop", refuse)
    page = opened("chat")
    stop = page.get_by_role("button", name="Stop", exact=True).first
    stop.click()
    expect(page.locator("#toast")).to_contain_text("it is busy")
    expect(stop).to_be_enabled()
    with page.expect_response(lambda response: response.status == 409):
        monkeypatch.setattr(processes.Chats, "list", refuse)
    monkeypatch.setattr(processes.Chats, "list", lambda _: [])
    expect(stop).to_have_count(0)
    opened.troubles.clear()  # the refusals are in the console


def test_what_is_drawn_anew_keeps_the_focus_and_long_names_stay_inside(opened, folder, write_run, models):
    (write_run(folder / "runs" / "a") / "checkpoints" / "step-00000010").mkdir(parents=True)
    (folder / "a.txt").write_text("text")
    page = opened("chat", width=390)
    stop = page.get_by_role("button", name="Stop", exact=True).nth(1)
    stop.focus()
    processes.Chats.list(None)[0] |= {"run": "runs/" + 300 * "a", "state": "starting", "address": ""}
    expect(page.locator(".chats h2").first).to_contain_text(300 * "a")
    expect(stop).to_be_focused()
    processes.Chats.list(None)[0] |= {"state": "ready", "address": "http://a/"}
    expect(page.locator(".blind-form option").first).to_have_text(f"runs/{300 * 'a'}@10")
    assert page.evaluate("document.querySelector('main').scrollWidth") == 390
    page.locator("#tab-train").click()
    page.get_by_label("data.train", exact=True).fill("a.txt")
    start = page.locator("#train-start")
    expect(start).to_be_enabled()
    page.get_by_label("max_steps", exact=True).fill("5")
    start.focus()
    expect(page.locator(".command code")).to_contain_text("max_steps=5")
    expect(start).to_be_focused()
    page.locator("#tab-data").click()
    file = page.get_by_role("button", name="a.txt")
    file.press("Enter")
    expect(file).to_have_attribute("aria-current", "true")
    expect(file).to_be_focused()


def test_a_tab_says_that_the_server_is_gone(opened, folder):
    page = opened()
    expect(page.locator("#runs-first")).to_be_visible()
    page.route("**/*", lambda route: route.abort())
    page.locator("#tab-plan").click()
    expect(page.locator(".panel-error")).to_contain_text("The server does not answer")
    page.close()
    opened.troubles.clear()  # the failures are in the console


@pytest.mark.nightly
def test_from_a_click_to_a_chat(opened, folder):
    """Plan by sliders, start the tiny recipe on the toy world, see the curve move, stop, continue, and chat with it."""
    from penjing.data import synthetic

    synthetic.write(
        folder / "data", seed=1, documents=2000, conversations=1, preferences=1, prompts=1, questions_per_kind=1
    )
    page = opened("plan")
    page.context.set_default_timeout(120_000)
    expect.set_options(timeout=120_000)
    page.get_by_label("Card", exact=True).select_option("here")
    for name, keys in (("Parameters", ("Home",)), ("Sequence length", ("Home", "ArrowRight", "ArrowRight"))):
        for key in keys:
            page.get_by_role("slider", name=name).press(key)
    for field, text in (("batch", "8"), ("tokens", "122k")):
        page.locator(f"#plan-{field} + input").fill(text)
        page.keyboard.press("Enter")
    expect(page.locator("#plan-note-tokens")).to_contain_text("60 steps of 2,048")
    page.get_by_role("button", name="Train with these settings").click()
    page.locator("#train-recipe").select_option("tiny")
    planned = {"model.preset": "ladder-1m", "data.seq_len": "256", "batch.size": "8", "max_steps": "60"}
    for name, value in planned.items():
        expect(page.get_by_label(name, exact=True)).to_have_value(value)
    for name, value in {"data.train": "data/pretrain.jsonl", "out": "runs/x"}.items():
        page.get_by_label(name, exact=True).fill(value)
    page.locator("#train-search").fill("log.every")
    page.locator(".setting:visible input").fill("1")
    expect(page.locator(".command code")).to_contain_text("log.every=1")
    page.locator("#train-start").click()
    state = page.locator("#runs-rows .state")
    expect(state).to_have_text("running")
    expect(page.locator(".run-facts")).to_contain_text(re.compile(r"^[1-9]\d* / 60"))
    loss = page.locator(".chart", has_text="Loss").locator(".legend b").first
    first = loss.inner_text()
    expect(loss).not_to_have_text(first)
    page.get_by_role("button", name="Stop (saves first)").click()
    expect(state).to_have_text("stopped")
    page.get_by_role("button", name="Continue").click()
    expect(state).to_have_text("finished")
    steps = [
        json.loads(line)["step"]
        for line in (folder / "runs/x/metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert steps == list(range(1, 61))
    page.get_by_role("button", name="Chat with this checkpoint").click()
    with page.context.expect_page() as chat:
        page.get_by_role("link", name="Open the chat").click()
    sheet = chat.value.locator("#sheet")
    sheet.fill("Tom")
    chat.value.get_by_role("button", name="Continue").click()
    expect(sheet).to_have_value(re.compile("^Tom.{10,}", re.DOTALL))
    assert len(_answer(chat.value.url, "Tom")) > 9  # as the blind comparison asks for it
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_role("link", name="Open the chat")).to_have_count(0)
    expect.set_options(timeout=20_000)
