"""Turn documents that are web pages, or parts of them, into their text."""

import html
import re
from dataclasses import replace

from penjing.base.errors import UserError
from penjing.data.clean.rule import Dropped, Record, Rule
from penjing.data.clean.text_scan import scan
from penjing.data.formats.html import html_text
from penjing.data.formats.schema import Document

_PAGE = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(?:!doctype html|html|head|body)\b", re.IGNORECASE | re.DOTALL
)
_TAG_NAMES = (
    "a|abbr|article|aside|b|blockquote|br|button|center|code|dd|div|dl|dt|em|figure|font|footer|form|h[1-6]|header|hr|i|iframe"
    "|img|input|label|li|link|main|meta|nav|ol|option|p|pre|script|section|select|small|span|strong|style|sub|sup|table|tbody"
    "|td|th|thead|tr|u|ul"
)
_TAG = re.compile(rf"</?(?:{_TAG_NAMES})(?:\s[^<>]*)?/?>", re.IGNORECASE)
_BLOCK = re.compile(
    r"</?(?:br|div|p|li|ul|ol|tr|table|h[1-6]|section|article|blockquote|hr)\b[^<>]*>\n?", re.IGNORECASE
)
_UNSEEN = (
    (re.compile(r"<(?:script|style)\b.*?</(?:script|style)\s*>", re.IGNORECASE | re.DOTALL), "</s"),
    (re.compile(r"<!--.*?-->", re.DOTALL), "-->"),
)
_MIN_TAGS = 3


class Html(Rule):
    """A page becomes its main text; of a text with at least three tags, a fiftieth of its length, they are removed."""

    def __call__(self, record: Record) -> Record | str:
        if not isinstance(record, Document) or scan(record.text).tags < _MIN_TAGS:
            return record
        text = record.text
        if _PAGE.match(text):
            try:
                return replace(record, text=html_text(text, where=f"{record.source}:{record.line}"))
            except UserError as error:
                return Dropped("a web page without text", error.what)
        tags = [tag[0] for tag in _TAG.finditer(text)]
        if len(tags) < _MIN_TAGS or 50 * sum(map(len, tags)) < len(text):
            return record
        for unseen, ending in _UNSEEN:  # only up to the last ending: each beginning without one costs the rest
            end = text.lower().rfind(ending) + len("</script>")
            text = unseen.sub("", text[:end]) + text[end:]
        text = _BLOCK.sub("\n", text)
        text = re.sub(r"\n{3,}", "\n\n", html.unescape(_TAG.sub("", text)).replace("\xa0", " ")).strip()
        return replace(record, text=text)
