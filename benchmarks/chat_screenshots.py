"""Pictures of the chat page for docs/images, from a server that runs: `penjing serve runs/quickstart`, then this.

    python benchmarks/chat_screenshots.py [http://127.0.0.1:8000] [--chromium /usr/bin/chromium] [--out docs/images]

Needs playwright and an installed Chromium. The models must be those of a quickstart: the prompts are of its world.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ENGLISH = ("Say in English: 绿色的袋子.", "Tell a story about Kate and a kite.")
CHINESE = ("用中文说：green bag。", "讲一个小雨和手表的故事。")
STORY = (
    "One cold day, Ben had a coat. Ben put the coat down in the forest. But Leo took the coat and put it on the farm. "
    "Ben felt sad because the coat was gone.\nWhy did Ben feel sad?"
)
# A word in the middle of an answer that was one of many which the model might have said.
UNSURE = """() => {
  const tokens = [...document.querySelectorAll('.answers:last-child .token:not(.mark)')];
  const chance = (node) => parseFloat(node.getAttribute('aria-label').split(/[,，] ?/).at(-1));
  const fit = tokens.map((node, place) =>
    [Math.abs(chance(node) - 7) * 4 + Math.abs(place - tokens.length * 0.25), place]);
  return fit.filter(([, place]) => /[\\p{L}]{2}/u.test(tokens[place].textContent)).sort((a, b) => a[0] - b[0])[0][1];
}"""


@contextmanager
def opened(
    browser: Browser, url: str, settings: dict[str, Any], width: int, height: int, **more: Any
) -> Iterator[Page]:
    """A page with settings of its own."""
    context = browser.new_context(viewport={"width": width, "height": height}, device_scale_factor=1.5, **more)
    kept = json.dumps(json.dumps({"seed": 2, "look": True, **settings}))
    context.add_init_script(
        f"localStorage.getItem('penjing.settings') || localStorage.setItem('penjing.settings', {kept})"
    )
    page = context.new_page()
    page.goto(url)
    page.locator("#welcome").wait_for()
    yield page
    context.close()


def ask(page: Page, *questions: str) -> None:
    """Ask, each time waiting for the whole answer."""
    for question in questions:
        page.locator("#text").fill(question)
        page.keyboard.press("Enter")
        page.locator(".answer").last.wait_for()
        page.locator(".answer.running").first.wait_for(state="detached")
        page.locator(".answers:last-child .figures .context").first.wait_for()


def point_at_a_token(page: Page) -> None:
    """Open the window of alternatives where there is something to see."""
    place = page.evaluate(UNSURE)
    page.locator(".answers:last-child .token:not(.mark)").nth(place).hover()
    page.locator(".popover").wait_for()


def shoot(url: str, chromium: str, out: Path) -> None:
    """All pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, words, look in (
            ("chat", ENGLISH, {"locale": "en-US"}),
            ("chat_dark", ENGLISH, {"locale": "en-US", "color_scheme": "dark"}),
            ("chat_zh", CHINESE, {"locale": "zh-CN"}),
        ):
            with opened(browser, url, {}, 1240, 860, **look) as page:
                ask(page, *words)
                point_at_a_token(page)
                page.screenshot(path=out / f"{name}.png")
        with opened(browser, url, {"max_tokens": 36}, 1240, 860, locale="en-US") as page:
            models = page.evaluate("fetch('v1/models').then((all) => all.json())")["data"]
            before = next(model["id"] for model in models if not model["penjing"]["answers"])
            page.locator("#compare").click()
            page.locator("#other").select_option(page.locator("#model").input_value())
            page.locator("#model").select_option(before)
            ask(page, STORY)
            page.screenshot(path=out / "chat_side_by_side.png")
        with opened(browser, url, {}, 390, 844, locale="en-US", has_touch=True, is_mobile=True) as page:
            ask(page, *ENGLISH)
            place = page.evaluate(UNSURE)
            page.locator(".answers:last-child .token:not(.mark)").nth(place).tap()
            page.locator(".popover").wait_for()
            page.screenshot(path=out / "chat_phone.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    shoot(given.url, given.chromium, given.out)


if __name__ == "__main__":
    main()
