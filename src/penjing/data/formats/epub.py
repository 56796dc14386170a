"""Books in EPUB: the text of each chapter, in the order of the book."""

import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag
from xml.etree import ElementTree

from penjing.base.errors import UserError
from penjing.data.formats.files import check_ratio, open_raw
from penjing.data.formats.html import LARGEST_PAGE_BYTES, decode_html, html_text
from penjing.data.formats.source_location import unrecoverable

_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, RuntimeError, NotImplementedError)
_CONTAINER = "META-INF/container.xml"
_LOCKED = "META-INF/encryption.xml"
_PAGES = ("application/xhtml+xml", "text/html")
# It may define entities, which can unpack to gigabytes.
_DOCTYPE = re.compile(r"<!DOCTYPE[^\[>]*(?:\[.*?\]\s*)?>", re.DOTALL | re.IGNORECASE)


def epub_documents(path: Path) -> Iterator[tuple[int, str | UserError]]:
    """(number of the chapter, text) in the order of the spine. A broken chapter is yielded as an error."""
    number = 0
    try:
        with open_raw(path) as stream, zipfile.ZipFile(stream) as book:
            check_ratio(path, sum(info.file_size for info in book.infolist()), stream.seek(0, io.SEEK_END))
            for number, name in enumerate(_chapters(book, path), 1):
                yield number, _chapter(book, name, f"{path}:{number}")
    except _BROKEN as error:
        yield number + 1, unrecoverable(UserError(f"broken EPUB file: {error}", where=path))
    except OSError as error:
        yield number + 1, unrecoverable(UserError(f"cannot be read: {error.strerror or error}", where=path))
    except UserError as error:
        yield number + 1, unrecoverable(error)


def _chapter(book: zipfile.ZipFile, name: str, where: str) -> str | UserError:
    try:
        return html_text(_read(book, name), keep="all", where=where)
    except _BROKEN as error:
        return UserError(f"a chapter that cannot be read: {error}", where=where, got=name)
    except UserError as error:
        return error


def _chapters(book: zipfile.ZipFile, path: Path) -> list[str]:
    """The names of the chapters. The container names the package; that lists the files, and in which order to read."""
    names = set(book.namelist())
    if _LOCKED in names and b"xmlenc#aes" in _read(book, _LOCKED):  # of fonts alone it is another method
        raise UserError("a book with copy protection", where=path)
    container = _xml(book, _CONTAINER)
    package_name = next((each.get("full-path", "") for each in container.iterfind(".//{*}rootfile")), "")
    package = _xml(book, package_name)
    folder = posixpath.dirname(package_name)
    files = {
        each.get("id"): posixpath.normpath(posixpath.join(folder, unquote(urldefrag(each.get("href", ""))[0])))
        for each in package.iterfind(".//{*}item")
        if each.get("media-type", "") in _PAGES and "nav" not in each.get("properties", "").split()
    }
    chapters = [files[each.get("idref")] for each in package.iterfind(".//{*}itemref") if each.get("idref") in files]
    if not chapters:
        raise UserError("a book without chapters", where=path)
    return list(dict.fromkeys(chapters))


def _xml(book: zipfile.ZipFile, name: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(_DOCTYPE.sub("", decode_html(_read(book, name))).encode())
    except ElementTree.ParseError as error:
        raise ValueError(f"{name}: {error}") from None


def _read(book: zipfile.ZipFile, name: str) -> bytes:
    with book.open(name) as stream:
        data = stream.read(LARGEST_PAGE_BYTES + 1)
    if len(data) > LARGEST_PAGE_BYTES:
        raise UserError(f"a file of more than {LARGEST_PAGE_BYTES >> 20} MiB inside", got=name)
    return data
