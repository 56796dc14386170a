"""Web pages: their encoding, and their text without navigation, advertisements and scripts."""

import logging
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from penjing.base.errors import UserError, import_extra
from penjing.data.formats.encodings import guess_encoding, marked_encoding
from penjing.data.formats.files import open_data

LARGEST_PAGE_BYTES = 1 << 24  # 16 MiB; trafilatura needs some 10 seconds and 600 MB for such a page
_LARGEST_DEPTH = 250  # libxml2, below trafilatura, drops what is nested deeper
# Nesting x tags bounds the time and memory of resiliparse (quadratic); a page of 3,000 tags in 30 levels has 90,000.
_LARGEST_WORK = 2_000_000
_LARGEST_ATTRIBUTES = 1000  # of one tag; both parsers compare each with all others
_TAG = re.compile(r"<(/?)([a-zA-Z][\w:-]*)[^<>]*?(/?)>")
_CONTROLS = re.compile(r"[\x01-\x08\x0b\x0e-\x1f\x7f]")
_LONG_TAG = re.compile(r"<[a-zA-Z][^<>]{5000,}")
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
# Elements that do not nest, or that the next of their kind ends
_FLAT = re.compile(
    "area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr|"
    "p|li|dt|dd|tr|td|th|thead|tbody|tfoot|colgroup|option",
    re.IGNORECASE,
)
_DECLARED = re.compile(rb"<(?:meta\b[^>]*?charset|\?xml\b[^>]*?encoding)\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_DECLARED_WITHIN = 4096  # browsers look at 1,024 bytes
_WIDER = {"gbk": "gb18030", "big5": "big5hkscs", "shift_jis": "cp932", "euc_kr": "cp949"}  # as browsers read them
_SEVEN_BIT_ESCAPE = b"\x1b$"  # of ISO-2022-JP, which is valid UTF-8 too


def html_documents(path: Path) -> Iterator[tuple[int, str | UserError]]:
    """One text: that of the page."""
    with open_data(path, convert=False) as stream:
        page = stream.read(LARGEST_PAGE_BYTES + 1)
        stream.read(1)  # raises the damage that ended the page, if it was that
    if page.strip():
        try:
            yield 1, html_text(page, where=path)
        except UserError as error:
            yield 1, error


def html_text(
    page: bytes | str, *, charset: str = "", keep: Literal["main", "main, fast", "all"] = "main", where: object = None
) -> str:
    """The text of a page, a paragraph a line; empty if there is none.

    charset: of the HTTP header. keep: the main text, found by trafilatura; or six times as fast by resiliparse, which
    leaves more boilerplate (F1 0.92, not 0.97); or all text, of a chapter of a book. where: the place, for errors.
    """
    if len(page) > LARGEST_PAGE_BYTES:
        raise UserError(f"a page of more than {LARGEST_PAGE_BYTES >> 20} MiB", where=where)
    text = page if isinstance(page, str) else decode_html(page, charset)
    if "\0" in text or len(_CONTROLS.findall(text)) > len(text) // 100:
        what = "zero bytes or control characters in a web page"
        raise UserError(what, where=where, next_step="This is a binary file.")
    for tag in _LONG_TAG.finditer(text):
        if (number := len(_QUOTED.sub("", tag[0]).split())) > _LARGEST_ATTRIBUTES:
            raise UserError("a tag with too many attributes", where=where, got=number, wanted=_LARGEST_ATTRIBUTES)
    depth, num_tags = _nesting(text)
    is_light = depth * num_tags <= _LARGEST_WORK
    if depth > _LARGEST_DEPTH and not is_light:
        raise UserError("tags are nested too deeply", where=where, got=depth, wanted=f"at most {_LARGEST_DEPTH}")
    if depth > _LARGEST_DEPTH or (keep == "all" and is_light):
        return _resiliparse_text(text, main_content=False)
    if keep == "main, fast" and is_light:
        return _resiliparse_text(text)
    return _trafilatura_text(text) or (_resiliparse_text(text) if is_light else "")


def _nesting(text: str) -> tuple[int, int]:
    """(depth of the tags, at least; number of tags)."""
    depth = deepest = num_tags = 0
    script = ""  # the name of the element of which all but its end is no HTML
    for end, name, closes_itself in _TAG.findall(text):
        if script and (not end or name.lower() != script):
            continue
        num_tags += 1
        script = name.lower() if not end and name.lower() in ("script", "style") else ""
        if closes_itself or _FLAT.fullmatch(name):
            continue
        depth = max(0, depth - 1) if end else depth + 1
        deepest = max(deepest, depth)
    return deepest, num_tags


def _trafilatura_text(text: str) -> str:
    trafilatura = import_extra("trafilatura")
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # it logs every page without text
    try:
        return str(trafilatura.extract(text, fast=True, include_comments=False) or "")
    except Exception:  # of a parser, on a page that it was not made for; the other one reads it
        return ""


def _resiliparse_text(text: str, *, main_content: bool = True) -> str:
    extract = import_extra("resiliparse.extract.html2text").extract_plain_text
    return str(extract(text, main_content=main_content, alt_texts=False))


# --- encoding --------------------------------------------------------------------------------------------------------


def decode_html(page: bytes, charset: str = "") -> str:
    """The page as text. Its encoding: a byte order mark, else UTF-8 if it is that, else what the header or the page
    declares if that fits, else the likeliest. charset: of the HTTP header."""
    try:
        if _SEVEN_BIT_ESCAPE not in page and b"\0" not in page:
            return page.removeprefix(BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError:
        pass
    if marked := marked_encoding(page):
        return page.decode(marked, errors="replace")
    encoding = import_extra("resiliparse.parse.encoding")
    declared = _DECLARED.search(page, 0, _DECLARED_WITHIN)
    labels = (charset, declared[1].decode("ascii", "ignore") if declared else "")
    names = [encoding.map_encoding_to_html5(label, fallback_utf8=False) for label in labels if label]
    if b"\0" in page:
        names = [guess_encoding(page)]
    for name in (*names, guess_encoding(page), encoding.detect_encoding(page)):
        if name is not None and name != "utf-8":
            text = page.decode(_WIDER.get(name, name), errors="replace")
            if text.count("\ufffd") <= len(text) // 100:
                return text
    text = page.decode("utf-8", errors="replace")  # damaged, if more than half of what is not ASCII decodes
    is_utf8 = 3 * text.count("\ufffd") < sum(char > "\x7f" for char in text)
    return text if is_utf8 else page.decode("cp1252", errors="replace")
