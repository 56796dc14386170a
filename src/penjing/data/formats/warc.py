"""Web archives (WARC): the text of each page."""

import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError, import_extra
from penjing.data.formats.files import DataFile, open_data
from penjing.data.formats.html import LARGEST_PAGE_BYTES, html_text
from penjing.data.formats.source_location import unrecoverable

_PAGES = ("text/html", "application/xhtml+xml")
_CHUNK_SIZE = re.compile(rb"(?:\r?\n)?([0-9a-fA-F]{1,7})[^\r\n]{0,100}\r?\n")
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_RECORD_END = b"\r\n\r\n"


class _Stream:
    """What the parser reads; `end` is the last of it."""

    def __init__(self, file: DataFile) -> None:
        self._file, self.end, self._position = file, b"", 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.end, self._position = (self.end + data)[-len(_RECORD_END) :], self._position + len(data)
        return data

    def tell(self) -> int:
        return self._position


def warc_documents(path: Path) -> Iterator[tuple[int, str | UserError]]:
    """(number of the record in the file, text) of each page, and of each plain text (of a WET file).

    Records of other kinds (requests, pictures, errors of servers) hold no document and are passed over.
    """
    archive_records, number = import_extra("fastwarc.warc", where=path).ArchiveIterator, 0
    try:
        with open_data(path, convert=False) as file:
            stream, text, needed = _Stream(file), None, 0
            try:
                for record in archive_records(stream, parse_http=False, stream_detect=False):
                    if text is not None:
                        yield number, text
                    number, needed = number + 1, record.stream_pos + record.content_length
                    text = _text(record, f"{path}:{number}")
            except OSError as error:
                raise UserError(f"broken WARC file: {error}", where=path, got=f"{number} records before it") from None
            if number and (stream.end != _RECORD_END or stream.tell() < needed):
                raise UserError("the WARC file is cut short", where=path)
            if text is not None:
                yield number, text
    except UserError as error:
        yield max(1, number), unrecoverable(error)


def _text(record: Any, where: str) -> str | UserError | None:
    """The text of a record; None if it holds none. By type: of answers and resources pages, of conversions texts."""
    type_, kind, charset = str(record.record_type), str(record.headers.get("Content-Type", "")), ""
    if type_ not in ("response", "resource", "conversion"):
        return None
    if record.is_http:
        record.parse_http(auto_decode="none")
        if record.http_headers is None or not 200 <= (record.http_headers.status_code or 0) < 300:
            return None
        kind, charset = record.http_content_type or "", record.http_charset or ""
    kind = kind.partition(";")[0].strip().lower()
    if kind not in _PAGES and (kind, type_) != ("text/plain", "conversion"):
        return None
    content = record.reader.read(LARGEST_PAGE_BYTES + 1)
    if record.is_http:
        content = _decoded(content, record.http_headers)
    try:
        if kind in _PAGES:
            return html_text(content, charset=charset, keep="main, fast", where=where)
        return str(content, "utf-8")
    except UnicodeDecodeError:
        return UserError("not valid UTF-8", where=where)
    except UserError as error:
        return error


def _decoded(body: bytes, headers: Any) -> bytes:
    """The body of an answer, unpacked. Many crawlers do that, and keep the header that says that it is packed."""
    if "chunked" in str(headers.get("Transfer-Encoding", "")).lower():
        parts, end = [], 0
        while (size := _CHUNK_SIZE.match(body, end)) is not None:
            parts.append(body[size.end() : size.end() + int(size[1], 16)])
            end = size.end() + len(parts[-1])
        body = b"".join(parts) or body
    if "gzip" in str(headers.get("Content-Encoding", "")).lower():
        with suppress(zlib.error):
            body = zlib.decompressobj(_GZIP_WINDOW).decompress(body, LARGEST_PAGE_BYTES + 1)
    return body
