"""The chat page in a browser, over a scripted server: everything a person does with it."""

import json
import re

import pytest
from chromium import CHROMIUM, CONTRAST, NAMELESS
from page_server import PAGE, TOOL, PageServer

from penjing.data.formats import read_chats

sync_api = pytest.importorskip("playwright.sync_api", reason="the chat page's tests need playwright")
expect = sync_api.expect
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the chat page's tests need chromium")


@pytest.fixture(scope="module")
def server():
    with PageServer() as running:
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def tab(browser):
    """A tab in a language. One without further settings is opened once: its next load finds the files in its cache."""
    kept = {}

    def open_tab(locale, **context):
        if locale in kept and not context:
            return kept[locale]
        made = browser.new_context(locale=locale, **context)
        made.set_default_timeout(10_000)
        page = made.new_page()
        if not context:
            kept[locale] = page
        return page

    return open_tab


@pytest.fixture
def opened(tab, server):
    """Opens the page: with settings, in a language, a size. At the end nothing may have gone wrong in the console."""
    server.reset()
    pages, troubles = [], []

    def note_error(error):
        troubles.append(str(error))

    def note_message(said):
        if said.type in ("error", "warning") and not said.location["url"].endswith("/favicon.ico"):  # of tree.svg, late
            troubles.append(said.text)

    def open_page(settings=None, *, locale="en-US", width=1200, height=800, wait=True, **context):
        page = tab(locale, **context)
        page.set_viewport_size({"width": width, "height": height})
        page.mouse.move(0, 0)
        page.goto(f"{server.url}tree.svg")  # of the same origin, and without scripts that would write
        kept = json.dumps({"seed": 1, **(settings or {})})
        page.evaluate(
            "kept => { localStorage.clear(); sessionStorage.clear(); localStorage.setItem('penjing.settings', kept) }",
            kept,
        )
        page.on("pageerror", note_error)
        page.on("console", note_message)
        pages.append((page, bool(context)))
        page.goto(server.url)
        if wait:
            expect(page.locator("#welcome")).to_be_visible()
        return page

    open_page.troubles = troubles
    yield open_page
    for page, of_its_own in pages:
        page.remove_listener("pageerror", note_error)
        page.remove_listener("console", note_message)
        for other in page.context.pages:
            if other is not page:
                other.close()
        if of_its_own:
            page.context.close()
        else:
            page.unroute_all()
            page.goto("about:blank")
    assert not troubles


def send(page, text):
    """Ask, and wait for the end of the answer."""
    page.locator("#text").fill(text)
    page.keyboard.press("Enter")
    ended(page)


def ended(page):
    expect(page.locator(".answer, .document").first).to_be_visible()
    expect(page.locator(".answer.running")).to_have_count(0)
    expect(page.locator(".figures .context").last).to_be_visible()


def test_several_turns_stream_into_the_page_and_are_kept(opened, server):
    page = opened({"system": "Be kind.", "temperature": 0.25, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1})
    send(page, "hello")
    send(page, "again")
    assert page.locator(".words").all_inner_texts() == ["You said hello", "You said again"]
    first, second = server.asked()
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "You said hello"
    wanted = {"temperature": 0.25, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1, "stream": True}
    assert first.items() >= wanted.items()
    figures = page.locator(".figures").last.inner_text()
    assert "1,235" in figures and "21 ms" in figures and "32 of 640" in figures
    page.wait_for_timeout(400)  # saved soon after
    page.reload()
    page.get_by_role("button", name="hello").first.click()
    assert page.locator(".words").all_inner_texts() == ["You said hello", "You said again"]


def test_stop_keeps_the_text_and_frees_the_server(opened, server):
    page = opened()
    page.locator("#text").fill("slow")
    page.keyboard.press("Enter")
    expect(page.locator(".words")).to_contain_text("w3")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("Stopped.")
    assert "w3" in page.locator(".words").inner_text()
    assert server.left.wait(10)
    send(page, "hello")
    assert server.asked()[-1]["messages"][1]["content"].startswith(" w0")


def test_an_edited_question_and_a_repeated_answer_stand_beside_the_first(opened, server):
    page = opened()
    send(page, "one")
    page.locator(".answers").get_by_role("button", name="Try again").click()
    expect(page.locator(".answers .versions")).to_contain_text("2 / 2")
    ended(page)
    page.locator(".question").hover()
    page.get_by_role("button", name="Edit").click()
    page.locator(".edit").fill("two")
    page.keyboard.press("Enter")
    expect(page.locator(".words")).to_have_text("You said two")
    ended(page)
    assert [body["messages"] for body in server.asked()] == [
        [{"role": "user", "content": text}] for text in ("one", "one", "two")
    ]
    page.locator(".question").get_by_role("button", name="Show the version before").click()
    expect(page.locator(".words")).to_have_text("You said one")


def test_tools_are_called_and_their_results_sent_back(opened, server):
    server.tools = [TOOL]
    page = opened()
    send(page, "calculate")
    assert "expression: 6*7" in page.locator(".call").inner_text()
    expect(page.locator(".call-result pre")).to_have_text("42")
    expect(page.locator(".words").last).to_have_text("It is 42.")
    assert [path for path, _ in server.requests] == ["/v1/chat/completions", "/api/tools/call", "/v1/chat/completions"]
    asked = server.asked()[1]["messages"]
    assert asked[1]["tool_calls"][0]["function"] == {"name": "calculator", "arguments": '{"expression": "6*7"}'}
    assert asked[2] == {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    page.locator("#open-settings").click()
    page.get_by_label("calculator").uncheck()
    send(page, "calculate")
    assert "tools" not in server.asked()[-1]


def test_a_result_that_is_the_answer_ends_it(opened, server):
    server.tools = [{**TOOL, "function": {**TOOL["function"], "name": "calc"}}]
    page = opened()
    send(page, "calculate")
    expect(page.locator(".call-result pre")).to_have_text("42")
    assert [path for path, _ in server.requests] == ["/v1/chat/completions", "/api/tools/call"]
    expect(page.locator(".note")).to_be_hidden()


def test_thoughts_are_folded(opened, server):
    page = opened({"thinking": "on", "look": True})
    send(page, "think")
    expect(page.locator(".thought-text")).to_be_hidden()
    page.locator(".thought summary").click()
    assert page.locator(".thought-text .token").all_inner_texts() == ["<think>", "Let", " me", " see.", "</think>"]
    assert page.locator(".words .token").all_inner_texts() == ["Yes.", "end"]
    page.locator("#look").click()
    expect(page.locator(".words")).to_have_text("Yes.")
    assert server.asked()[0]["enable_thinking"] is True


def test_looking_inside_shows_what_else_a_token_might_have_been(opened, server):
    page = opened()
    send(page, "hello")
    page.locator("#look").click()
    tokens = page.locator(".token")
    assert tokens.all_inner_texts() == ["You", " said", " hello", "end"]
    assert {"s4", "s0"} <= set(" ".join(token.get_attribute("class") for token in tokens.all()).split())
    tokens.nth(1).hover()
    window = page.get_by_role("dialog", name="What else it might have been")
    expect(window).to_contain_text("rank 1")
    assert window.locator("li").count() == 5
    tokens.nth(0).hover()
    expect(window).to_contain_text("rank 2")
    expect(window.locator("li").first).to_contain_text("74 %")
    with page.expect_response("**/v1/chat/completions"):
        window.get_by_role("button", name="␣cat").click()
    ended(page)
    assert [server.ids[b" cat"]] == server.asked()[-1]["continue_ids"]
    expect(page.locator(".versions")).to_contain_text("2 / 2")
    assert page.locator(".token").all_inner_texts() == [" cat", " went", " on", "end"]
    page.locator("#look").click()
    expect(page.locator(".words")).to_have_text("cat went on")


def test_an_answer_can_be_ended_at_a_token(opened, server):
    page = opened({"look": True})
    send(page, "hello")
    page.locator(".token").nth(1).click()
    page.get_by_role("button", name="Go on with end").click()
    expect(page.locator(".versions")).to_contain_text("2 / 2")
    assert page.locator(".token").all_inner_texts() == ["You", "end"] and len(server.asked()) == 1


def test_a_character_of_several_tokens_is_one_place(opened, server):
    page = opened({"look": True})
    send(page, "bytes")
    assert page.locator(".token").all_inner_texts() == ["盆", "景", " ok", "end"]
    page.locator(".token").first.click()
    window = page.locator(".popover")
    expect(window).to_contain_text("“盆” is 2 tokens")
    expect(window.locator(".popover-head .piece")).to_have_text("E7")
    window.get_by_role("button", name="2", exact=True).click()
    expect(window.locator(".popover-head .piece")).to_have_text("盆")
    expect(window.locator("li").first).to_contain_text("盆")


def test_the_keyboard_reaches_everything_of_the_look_inside(opened, server):
    page = opened({"look": True})
    send(page, "hello")
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_be_focused()
    expect(page.locator(".popover")).to_be_visible()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("button", name="Go on with ␣cat")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".popover")).to_have_count(0)
    expect(page.locator(".token").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Escape")
    page.locator(".token").nth(1).press("ArrowDown")
    page.keyboard.press("Enter")
    ended(page)
    assert server.asked()[-1]["continue_ids"] == [server.ids[b"You"], server.ids[b" cat"]]


def test_two_models_answer_side_by_side(opened, server):
    page = opened({"model": "chat"})
    page.locator("#compare").click()
    send(page, "hello")
    expect(page.locator(".lane")).to_have_count(2)
    ended(page)
    assert page.locator(".lane-head h2").all_inner_texts() == ["chat", "base"]
    assert page.locator(".words").all_inner_texts() == ["You said hello", "and then it rained"]
    assert server.asked("text")[0]["prompt"] == "hello"
    page.locator(".lane").nth(1).get_by_role("button", name="Try again").click()
    expect(page.locator(".versions")).to_contain_text("2 / 2")
    ended(page)
    assert len(server.asked()) == 1 and len(server.asked("text")) == 2  # the other answer stayed


def test_a_pretrained_model_continues_a_text(opened, server):
    page = opened({"model": "base"})
    sheet = page.locator("#sheet")
    sheet.fill("It was dark")
    page.get_by_role("button", name="Continue").click()
    expect(sheet).to_have_value("It was dark and then it rained")
    ended(page)
    sheet.press("Control+Enter")
    expect(sheet).to_have_value("It was dark and then it rained and then it rained")
    ended(page)
    assert server.asked("text")[1]["prompt"] == "It was dark and then it rained"
    page.locator("#look").click()
    page.locator(".token", has_text="then").first.click()
    page.get_by_role("button", name="Go on with ␣cat").click()
    ended(page)
    asked = server.asked("text")[2]
    assert asked["prompt"] == "It was dark" and asked["continue_ids"] == [server.ids[b" and"], server.ids[b" cat"]]
    page.get_by_role("button", name="Edit the text").click()
    expect(page.locator("#sheet")).to_have_value("It was dark and cat went on")
    page.locator("#sheet").fill("It was dark and cat went")  # what was typed over is no token any more
    page.locator("#look").click()
    expect(page.locator(".token")).to_have_count(0)


def test_what_a_model_writes_runs_nothing(opened, server):
    page = opened()
    send(page, "attack")
    send(page, '<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>')
    page.locator("#look").click()
    page.locator("#look").click()
    assert page.evaluate("window.hit") is None
    assert (
        page.locator("#thread")
        .locator("script, img, iframe, object, [onerror], [onclick], [onload], [onmouseover]")
        .count()
        == 0
    )
    links = page.locator("#thread a")
    assert (
        all(re.match("https://example.org/", link.get_attribute("href")) for link in links.all()) and links.count() >= 1
    )
    assert all("noopener" in link.get_attribute("rel") for link in links.all())
    assert "<script>window.hit = 1</script>" in page.locator(".words").first.inner_text()
    assert page.locator(".code code").inner_text() == "<script>window.hit = 1</script>"


def test_no_file_of_the_page_parses_text_as_html():
    for file in PAGE.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(\"style",
            file.read_text(),
        ), file
        assert len(file.read_text().splitlines()) < 300, file
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<script>|<style|style=|\son\w+=|https?://", html)


def test_markdown_is_shown(opened, server):
    page = opened()
    send(page, "markdown")
    words = page.locator(".words")
    wanted = {"h3": "Big", "strong": "bold", "em": "soft", "p > code": "code", "ul > li ol > li": "deep", "a": "a link"}
    wanted |= {"blockquote": "said", "td.to-right": "2", "pre code": "print(1 < 2)"}
    for selector, text in wanted.items():
        expect(words.locator(selector)).to_have_text(text)


def test_a_model_that_repeats_itself_does_not_hang_the_page(opened, server):
    page = opened()
    send(page, "deep")
    assert page.locator(".words blockquote").count() <= 9
    assert len(page.locator(".words").inner_text()) > 20_000


def test_a_key_is_asked_for_and_kept_for_the_tab(opened, server):
    server.key = "sesame"
    page = opened(wait=False)
    page.locator("#key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#dialog")).to_contain_text("did not accept")
    page.locator("#key").fill("sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#welcome")).to_be_visible()
    assert page.evaluate("[sessionStorage['penjing.key'], JSON.stringify(localStorage).includes('sesame')]") == [
        "sesame",
        False,
    ]
    send(page, "hello")
    assert all("401" in trouble for trouble in opened.troubles)
    opened.troubles.clear()


def test_a_busy_server_is_asked_again(opened, server):
    page = opened()
    server.busy = 1
    page.locator("#text").fill("hello")
    page.keyboard.press("Enter")
    expect(page.locator(".note")).to_have_text(re.compile("trying again in 1 s"))
    ended(page)
    expect(page.locator(".words")).to_have_text("You said hello")
    opened.troubles.clear()


def test_errors_are_said_and_the_text_stays(opened, server):
    page = opened()
    send(page, "hello")
    page.locator("#text").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator(".note.bad")).to_have_text("No answer: messages: 99 tokens, too long")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.locator(".answers").last.get_by_role("button", name="Try again").click()
    expect(page.locator(".note.bad")).to_have_text(re.compile("The server is gone"))
    expect(page.locator(".words").first).to_have_text("You said hello")
    page.unroute("**/v1/chat/completions")
    page.locator("#text").fill("it breaks off")
    page.keyboard.press("Enter")
    expect(page.locator(".note.bad").last).to_have_text(re.compile("the connection broke"))
    expect(page.locator(".words").last).to_have_text("You said it breaks")
    opened.troubles.clear()


def test_what_no_longer_fits_is_left_out_and_said(opened, server):
    page = opened({"system": "Be kind."})
    for text in ("one", "two", "three"):
        send(page, text)
    asked = [message["content"] for message in server.asked()[-1]["messages"]]
    expect(page.locator(".note").last).to_contain_text("no longer fit")
    assert asked == ["Be kind.", "two", "You said two", "three"]
    opened.troubles.clear()  # the refusal is in the console


def test_a_server_that_is_gone_is_said_and_asked_again(opened, server):
    page = opened(wait=False)
    page.route("**/v1/models", lambda route: route.abort())
    page.reload()
    expect(page.locator("#banner")).to_contain_text("The server does not answer")
    page.unroute("**/v1/models")
    page.locator("#banner").get_by_role("button").click()
    expect(page.locator("#welcome")).to_be_visible()
    opened.troubles.clear()


def test_conversations_are_exported_as_training_data_and_cleared(opened, server, tmp_path):
    server.tools = [TOOL]
    page = opened({"system": "Be kind."})
    send(page, "think")
    page.locator("#new-chat").click()
    send(page, "calculate")
    expect(page.locator(".conversation")).to_have_count(2)
    with page.expect_download() as download:
        page.locator("#export").click()
    file = tmp_path / "chats.jsonl"
    download.value.save_as(file)
    chats = list(read_chats(file))
    said = [[(message.role, message.content) for message in chat.messages] for chat in chats]
    assert said[1] == [("system", "Be kind."), ("user", "think"), ("assistant", "Yes.")]
    assert [role for role, _ in said[0]] == ["system", "user", "assistant", "tool", "assistant"]
    assert chats[1].messages[2].reasoning_content == "Let me see."
    assert chats[0].messages[2].tool_calls[0]["arguments"] == {"expression": "6*7"}
    page.locator("#clear").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".conversation")).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.includes('conversation'))") == []


def test_two_tabs_do_not_lose_each_others_conversations(opened, server):
    page = opened()
    other = page.context.new_page()
    other.goto(server.url)
    send(page, "one")
    expect(other.locator(".conversation")).to_have_count(1)
    send(other, "two")
    expect(page.locator(".conversation")).to_have_count(2)
    send(page, "three")
    expect(other.locator(".conversation")).to_have_count(2)
    other.reload()
    expect(other.locator(".conversation")).to_have_count(2)


def test_both_languages_are_whole_and_the_browsers_is_chosen(opened, server):
    patterns = (r"^  (\w+): \[", r"^  (\w+): \[\".+\", \".+\"\],$")  # both languages
    keys = [set(re.findall(pattern, (PAGE / "sentences.js").read_text(), flags=re.M)) for pattern in patterns]
    assert keys[0] == keys[1] and len(keys[0]) > 100
    used = set()
    for file in PAGE.glob("*.js"):
        used |= set(re.findall(r"\bt\(\"(\w+)\"", file.read_text()))
    used |= set(re.findall(r"data-i18n(?:-[\w-]+)?=\"(\w+)\"", (PAGE / "index.html").read_text()))
    assert used <= keys[0]
    page = opened(locale="zh-CN")
    assert page.evaluate("document.documentElement.lang") == "zh-Hans"
    send(page, "你好")
    expect(page.locator(".figures")).to_contain_text("词元/秒")
    page.locator("#language").click()
    expect(page.locator(".figures")).to_contain_text("tokens/s")
    page.reload()
    expect(page.locator("#new-chat")).to_have_text("New chat")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_controls_have_names(opened, server, scheme):
    page = opened({"look": True, "thinking": "on"}, color_scheme=scheme)
    page.locator("#open-settings").click()
    send(page, "long")
    page.locator(".token").nth(3).click()
    expect(page.locator(".popover")).to_be_visible()
    classes = " ".join(token.get_attribute("class") for token in page.locator(".token").all())
    assert "s0" in classes and "s4" in classes
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    # Every step of the scale, whatever this answer happened to hold.
    page.evaluate(
        "document.querySelectorAll('.token').forEach((node, place) => (node.className = `token s${place % 6}`))"
    )
    assert page.evaluate(CONTRAST) == []


PAPER = "getComputedStyle(document.body).backgroundColor"
DARK, LIGHT = "rgb(22, 24, 21)", "rgb(251, 250, 246)"


def let_system_be(page, scheme):
    """A page hears of its system's theme with the next frame, before the frame's callbacks."""
    page.emulate_media(color_scheme=scheme)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_one_is_chosen(opened, server, scheme):
    own, other = (DARK, LIGHT) if scheme == "dark" else (LIGHT, DARK)
    page = opened(color_scheme=scheme)
    assert page.evaluate(PAPER) == own
    swapped = {"light": "dark", "dark": "light"}[scheme]
    let_system_be(page, swapped)  # at dusk
    assert page.evaluate(PAPER) == other
    let_system_be(page, scheme)
    page.locator("#theme").click()
    assert page.evaluate(PAPER) == other
    for system in (scheme, swapped):
        let_system_be(page, system)
        assert page.evaluate(PAPER) == other
        page.reload()
        assert page.evaluate(PAPER) == other
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == swapped


def test_a_chosen_theme_is_there_before_the_first_paint(opened, server):
    """And each colour is written once for each theme."""
    page = opened({"theme": "dark"}, color_scheme="light", wait=False)
    page.route("**/main.js", lambda route: route.abort())
    page.reload()
    assert page.evaluate(PAPER) == DARK
    opened.troubles.clear()
    css = (PAGE / "page.css").read_text()
    assert [css.count(f"{name}: #") for name in ("--paper", "--s-line", "--bubble")] == [2, 2, 2]


def test_a_phone_has_no_sideways_scroll(opened, server):
    page = opened({"look": True}, width=390, height=844, has_touch=True)
    page.locator("#compare").click()
    wide = "document.documentElement.scrollWidth"
    send(page, "markdown")
    ended(page)
    assert page.evaluate(wide) == 390
    page.locator(".token").nth(2).tap()
    box = page.locator(".popover").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    page.keyboard.press("Escape")
    page.locator("#menu").click()
    expect(page.locator(".conversation")).to_be_visible()
    page.locator("#close-menu").click()
    page.locator("#open-settings").click()
    expect(page.get_by_label("Seed")).to_be_visible()
    assert page.evaluate(wide) == 390


HEARD = """new MutationObserver((all) => {
  for (const one of all) for (const node of one.addedNodes) (window.heard ??= []).push(node.textContent);
}).observe(document.querySelector('#announcer'), { childList: true })"""


def test_a_screen_reader_hears_sentences(opened, server):
    page = opened()
    page.evaluate(HEARD)
    send(page, "two lines")
    expect(page.locator("#announcer")).to_contain_text("three")
    heard = page.evaluate("window.heard")
    assert "".join(heard).strip() == "One. Two three"
    assert all(part.strip() in ("One.", "Two three", "One. Two three") for part in heard)


def test_an_input_method_keeps_its_enter(opened, server):
    page = opened()
    page.locator("#text").fill("ni hao")
    page.locator("#text").dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(page.locator(".question")).to_have_count(0)
    page.locator("#text").press("Shift+Enter")
    assert page.locator("#text").input_value() == "ni hao\n"


# --- what is kept ----------------------------------------------------------------------------------------------------


def two_tabs(opened, server):
    """Two tabs with one stored conversation, "one"."""
    page = opened()
    send(page, "one")
    page.wait_for_timeout(500)
    other = page.context.new_page()
    other.goto(server.url)
    return page, other


def test_tabs_merge_what_they_write(opened, server):
    """Also into one conversation, and where a tab did not hear of the other."""
    page, other = two_tabs(opened, server)
    other.get_by_role("button", name="one", exact=True).click()
    other.evaluate("addEventListener('storage', (event) => event.stopImmediatePropagation(), { capture: true })")
    send(page, "two")
    send(other, "three")
    other.wait_for_timeout(500)
    page.reload()
    page.get_by_role("button", name="one", exact=True).click()
    said = page.locator(".bubble")
    seen = set(said.all_inner_texts())
    if len(seen) < 3:  # "three" is a version beside "two", unless its tab had heard of "two" by then and asked below it
        page.locator(".question .versions button:enabled").first.click()
    assert seen | set(said.all_inner_texts()) == {"one", "two", "three"}


def test_a_conversation_that_another_tab_deletes_is_gone(opened, server):
    page, other = two_tabs(opened, server)
    other.get_by_role("button", name="Delete “one”").click()
    other.get_by_role("button", name="Cancel").click()
    expect(other.locator(".conversation")).to_have_count(1)  # it asks
    other.get_by_role("button", name="Delete “one”").click()
    other.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".conversation")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


def test_a_reload_in_mid_stream_keeps_the_answer_and_it_goes_on(opened, server):
    page = opened()
    page.locator("#text").fill("slow")
    page.keyboard.press("Enter")
    expect(page.locator(".words")).to_contain_text("w9")
    page.reload()
    page.get_by_role("button", name="slow", exact=True).click()
    expect(page.locator(".words")).to_contain_text("w9")
    expect(page.locator(".figures")).to_contain_text("tokens")
    kept = page.locator(".words").inner_text()
    page.get_by_role("button", name="Continue").click()
    ended(page)
    expect(page.locator(".words")).to_have_text(f"{kept} went on")
    assert len(server.asked()[-1]["continue_ids"]) == len(kept.split())
    expect(page.locator(".versions")).to_have_count(0)


def test_a_full_storage_is_said_and_older_texts_stay(opened, server):
    page = opened()
    send(page, "one")
    page.wait_for_timeout(500)
    page.evaluate("""() => { for (let size = 2 ** 22; size > 4; size /= 2)
      try { localStorage.setItem('x', (localStorage.x ?? '') + 'x'.repeat(size)); } catch {} }""")
    page.locator("#new-chat").click()
    send(page, "long")
    expect(page.locator("#toast")).to_contain_text("storage is full")
    page.reload()
    expect(page.locator(".conversation")).to_have_text("one")


# --- answers that were cut off, versions ------------------------------------------------------------------------------


def test_a_cut_off_answer_goes_on_in_its_place(opened, server):
    page = opened()
    send(page, "cut")
    expect(page.locator(".note")).to_contain_text("Cut off")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".words")).to_have_text("It is cut went on")
    expect(page.locator(".note")).to_be_hidden()
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    assert server.asked()[-1]["continue_ids"] == [server.ids[piece] for piece in (b"It", b" is", b" cut")]


def test_figures_stay_after_a_stop(opened, server):
    page = opened()
    page.locator("#text").fill("slow")
    page.keyboard.press("Enter")
    expect(page.locator(".words")).to_contain_text("w40")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("Stopped.")
    for part in ("tokens/s", "first token", " tokens"):
        expect(page.locator(".figures")).to_contain_text(part)


def test_an_answer_of_thoughts_only_shows_them(opened, server):
    page = opened()
    send(page, "only")
    expect(page.locator(".thought-text")).to_be_visible()
    expect(page.locator(".note")).to_have_text("It only thought, and said no answer.")


def test_turns_under_another_version_are_said(opened, server):
    page = opened({"look": True})
    send(page, "hello")
    send(page, "again")
    page.locator(".token").nth(1).click()
    page.get_by_role("button", name="Go on with ␣cat").click()
    ended(page)
    expect(page.locator(".question")).to_have_count(1)
    expect(page.locator(".later")).to_contain_text("goes on under version 1")
    page.get_by_role("button", name="Show it").click()
    expect(page.locator(".question")).to_have_count(2)
    expect(page.locator(".later")).to_have_count(0)


def test_a_text_that_was_replaced_comes_back(opened, server):
    page = opened({"model": "base"})
    page.locator("#sheet").fill("It was dark")
    page.get_by_role("button", name="Continue").click()
    ended(page)
    page.get_by_role("button", name="Continue").click()
    ended(page)
    page.locator("#look").click()
    page.locator(".token", has_text="then").first.click()
    page.get_by_role("button", name="Go on with ␣cat").click()
    ended(page)
    page.get_by_role("button", name="Text before").click()
    expect(page.locator("#sheet")).to_have_value("It was dark and then it rained and then it rained")


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1200, 390])
def test_a_long_line_of_code_scrolls_by_itself(opened, server, width):
    page = opened(width=width)
    page.locator("#text").fill("code")
    page.locator("#send").click()
    ended(page)
    box = page.locator(".code").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    assert page.locator(".code pre").evaluate("(node) => node.scrollWidth > node.clientWidth")
    assert page.locator("#scroll").evaluate("(node) => node.scrollWidth === node.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_formulas_and_the_rest_of_markdown(opened, server):
    page = opened()
    send(page, "math")
    words = page.locator(".words")
    assert words.locator("math").count() == 5
    assert words.locator("math[display=block] mfrac").count() == 1 and words.locator("msqrt").count() == 1
    assert words.locator("math msup").first.text_content() == "a2"
    expect(words).to_contain_text("It costs $5 and $6.")
    assert words.locator("ol > li").all_inner_texts() == ["one", "two"]
    assert words.locator("ul > li").all_inner_texts() == ["other"]
    links = [link.get_attribute("href") for link in words.locator("a").all()]
    assert links == ["https://example.org/a_(b)", "https://example.org/c"]
    assert words.locator("td").all_inner_texts() == ["x|y", "2"]
    assert words.locator("pre code").inner_text() == "<b onclick=window.hit=1>'\"</b>"
    assert words.locator(".hl-keyword").count() and words.locator(".hl-key").count()
    assert page.evaluate("window.hit") is None
    assert page.locator("#thread").locator("script, img, [onclick], [onerror], [href^=javascript]").count() == 0


def test_a_page_without_a_clipboard_copies_or_says_so(opened, server):
    page = opened()
    send(page, "hello")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.evaluate("document.addEventListener('copy', () => (window.copied = String(document.activeElement.value)))")
    copy = page.locator(".answers").get_by_role("button", name="Copy")
    copy.click()
    assert page.evaluate("window.copied") == "You said hello"
    page.wait_for_timeout(1600)
    page.evaluate("document.execCommand = () => false")
    copy.click()
    expect(page.locator("#toast")).to_contain_text("does not allow copying")


def test_the_window_opens_again_by_keyboard(opened, server):
    page = opened({"look": True})
    send(page, "hello")
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    for key in ("Enter", " ", "ArrowDown"):
        page.keyboard.press("Escape")
        expect(page.locator(".popover")).to_have_count(0)
        page.keyboard.press(key)
        expect(page.locator(".popover")).to_be_visible()
        expect(page.locator(".popover button:focus")).to_have_count(1)


def test_the_window_leaves_its_token_in_sight_at_200_percent(opened, server):
    page = opened({"look": True}, width=620, height=420)
    send(page, "long")
    for token in page.locator(".token").all()[::7]:
        token.click()
        own, window = token.locator(".paint").bounding_box(), page.locator(".popover").bounding_box()
        assert window["y"] >= own["y"] + own["height"] - 2 or window["y"] + window["height"] <= own["y"] + 2
        assert window["y"] >= 0 and window["y"] + window["height"] <= 420
        page.keyboard.press("Escape")


def test_examples_are_the_models_own_or_none(opened, server):
    page = opened()
    assert page.locator(".example").all_inner_texts() == ["Own question?", "自己的问题？"]
    page.locator("#language").click()
    assert page.locator(".example").all_inner_texts() == ["自己的问题？", "Own question?"]
    page.locator("#model").select_option("base")
    expect(page.locator(".example")).to_have_count(0)


LATIN = re.compile(r"[A-Za-z]{3,}")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"message": "messages: 99 tokens, too long", "code": "context_length_exceeded"}),
        (400, {"message": "top_p: Input should be greater than 0"}),
        (404, {"message": "no such model", "code": "model_not_found"}),
        (413, {"message": "the body has more than 4 bytes", "code": "body_too_large"}),
        (500, {"message": "the server failed on this request", "code": "internal_error"}),
        (418, {"message": "I am a teapot"}),
    ],
)
def test_errors_are_in_the_language_of_the_page(opened, server, status, error):
    page = opened(locale="zh-CN")
    reply = {"status": status, "content_type": "application/json", "body": json.dumps({"error": error})}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**reply))
    page.locator("#text").fill("你好")
    page.keyboard.press("Enter")
    note = page.locator(".note.bad")
    expect(note).to_contain_text("没有得到回答")
    assert not LATIN.search(note.inner_text())
    page.locator("#language").click()
    expect(note).to_contain_text("No answer: ")
    opened.troubles.clear()


def test_tokens_are_counted_before_they_are_sent(opened, server):
    page = opened({"system": "Be kind."})
    page.locator("#text").fill("hello")
    expect(page.locator("#count")).to_have_text(f"{len('Be kind.hello')} of 640 tokens")
    page.locator("#text").fill("x" * 700)
    expect(page.locator("#count")).to_have_class("bad")
    page.locator("#text").fill("")
    expect(page.locator("#count")).to_have_text("")


def test_a_way_to_the_end(opened, server):
    page = opened(height=500)
    for text in ("long", "long"):
        send(page, text)
    page.locator("#scroll").evaluate("(node) => (node.scrollTop = 0)")
    page.get_by_role("button", name="To the end").click()
    expect(page.locator("#to-end")).to_be_hidden()
    assert page.locator("#scroll").evaluate("(node) => node.scrollHeight - node.scrollTop - node.clientHeight < 2")


def test_conversations_are_renamed_searched_and_brought_back(opened, server, tmp_path):
    server.tools = [TOOL]
    page = opened({"system": "Be kind."})
    for text in ("think", "calculate", "markdown"):
        page.locator("#new-chat").click()
        send(page, text)
    page.get_by_role("button", name="Rename “think”").click()
    page.locator("#new-title").fill("My <b>title</b>")
    page.keyboard.press("Enter")
    expect(page.locator(".conversation").nth(2)).to_have_text("My <b>title</b>")
    page.locator("#search").fill("SEE let")  # in a thought
    expect(page.locator(".conversation")).to_have_text(["My <b>title</b>"])
    page.locator("#search").fill("nowhere")
    expect(page.locator("#conversations")).to_contain_text("No conversation")
    page.locator("#search").fill("")
    file, again = tmp_path / "chats.jsonl", tmp_path / "again.jsonl"
    with page.expect_download() as download:
        page.locator("#export").click()
    download.value.save_as(file)
    page.locator("#clear").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(file.read_text() + 'broken\n{"messages": [{"role": "robot"}]}\n{"messages": 1}\nnull\n')
    page.locator("#import-file").set_input_files(mixed)
    expect(page.locator("#toast")).to_contain_text("3 imported, 0 were here already, 4 lines")
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("#toast")).to_contain_text("0 imported, 3 were here already, 0 lines")
    page.wait_for_timeout(500)
    page.reload()
    with page.expect_download() as download:
        page.locator("#export").click()
    download.value.save_as(again)
    assert sorted(again.read_text().splitlines()) == sorted(file.read_text().splitlines())
    page.get_by_role("button", name="calculate", exact=True).click()
    expect(page.locator(".call-result pre")).to_have_text("42")
    send(page, "hello")  # goes on behind it
    roles = [message["role"] for message in server.asked()[-2]["messages"]]  # as refused: too long
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    opened.troubles.clear()


# --- the real server, with a small random model ----------------------------------------------------------------------


@pytest.fixture
def real(browser, serving):
    """Opens the page of the real app."""
    context = browser.new_context(locale="en-US")
    troubles = []

    def open_page(**settings):
        kept = json.dumps(json.dumps({"seed": 3, "max_tokens": 24, "temperature": 1, "top_p": 1, **settings}))
        context.add_init_script(f"localStorage.setItem('penjing.settings', {kept})")
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(serving.url)
        expect(page.locator("#welcome")).to_be_visible()
        return page

    yield open_page
    context.close()
    assert not troubles


def test_the_real_server_and_the_page_understand_each_other(real, serving):
    page = real(model="chat", look=True)
    expect(page.locator("#welcome")).to_contain_text("step 7")
    send(page, "so it is")
    first = page.locator(".token").all_inner_texts()
    assert len(first) > 3
    page.locator(".token").nth(2).click()
    other = page.locator(".alternatives button:not(:disabled)").first
    chosen = other.locator(".piece").inner_text()
    other.click()
    expect(page.locator(".versions")).to_contain_text("2 / 2")
    ended(page)
    second = page.locator(".token").all_inner_texts()
    assert second[:2] == first[:2] and second[2:] != first[2:] and chosen
    page.locator("#compare").click()
    send(page, "and so")
    expect(page.locator(".answers:last-child .token").first).to_be_visible()
    assert page.locator(".note.bad").count() == 0
    serving.idle()


def test_the_real_server_continues_a_text(real, serving):
    page = real(model="base", look=True)
    page.locator("#sheet").fill("so it was")
    page.keyboard.press("Control+Enter")
    ended(page)
    expect(page.locator(".typed")).to_have_text("so it was")
    before = page.locator(".token").all_inner_texts()
    page.locator(".token").nth(1).click()
    page.locator(".alternatives button:not(:disabled)").first.click()
    ended(page)
    after = page.locator(".token").all_inner_texts()
    assert after[0] == before[0] and after[1:] != before[1:]
