"""Encodings other than UTF-8: which one bytes are in, and a stream that converts."""

import codecs
import io
import unicodedata
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE, getincrementaldecoder
from collections.abc import Iterable
from typing import IO, Any

_CHUNK_BYTES = 1 << 16
# Of Chinese texts of 4,000 characters, modern and classical, at least 7 % are these; of other bytes read as Chinese
# at most 2 % (Korean, Russian), or they do not decode.
_COMMON_HAN = frozenset(
    "的一是不了在人有我他这這个個们們中来來上大为為和国國时時年说說地到以就生下之也其而曰子得於于無无与與所可此日月天山"
    "风風花水春心"
)
_LEAST_COMMON = 1 / 20
_FEWEST_HAN = 12  # less is too little evidence to convert a file
_BAD_BYTE = "penjing: a byte that does not decode"
_NO_TEXT = frozenset(("Cc", "Cn", "Co", "Cs"))
_CONTROLS_OF_TEXT = "\t\n\v\f\r\x1a"  # the last one ends old DOS files

# Bytes that do not decode stay visible: as UTF-8 they are invalid, so that the line there is reported.
codecs.register_error(_BAD_BYTE, lambda error: ("\udcff", error.end))  # type: ignore[attr-defined]


def guess_encoding(head: bytes) -> str | None:
    """The likely encoding, other than UTF-8, of `head` (a file's first bytes), as named by iconv; None: none is likely.

    Byte order marks and zero bytes reveal UTF-16 and UTF-32; a Chinese encoding is likely if at least one Han character
    in twenty is decoded as one of the most common.
    """
    if marked := marked_encoding(head):
        return marked
    if b"\0" not in head and decodes([head], "UTF-8", final=False):
        return None
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if even + odd > len(head) // 5:
        return "UTF-16LE" if odd > even else "UTF-16BE"
    score, name = max((_chinese_score(head, name), name) for name in ("GB18030", "BIG5", "UTF-16LE", "UTF-16BE"))
    return name if score > _LEAST_COMMON else None


def marked_encoding(head: bytes) -> str | None:
    """UTF-32 or UTF-16, by the byte order mark."""
    if head.startswith((BOM_UTF32_LE, BOM_UTF32_BE)):
        return "UTF-32"
    return "UTF-16" if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else None


def is_sure(head: bytes, name: str) -> bool:
    """Whether the first bytes of a text are surely in the encoding that was guessed.

    Sure is a byte order mark; else all must decode and read as text: nothing but printable characters, in UTF-16 nine
    in ten of Latin, or in any encoding Chinese with its usual share of common characters.
    """
    if name == marked_encoding(head):
        return True
    try:
        text = getincrementaldecoder(name)().decode(head)
    except UnicodeDecodeError:
        return False
    if any(unicodedata.category(char) in _NO_TEXT for char in set(text) - set(_CONTROLS_OF_TEXT)):
        return False
    is_latin = name.startswith("UTF-16") and sum(char > "\u024f" for char in text) <= len(text) // 10
    return is_latin or _is_chinese(text)


def decodes(chunks: Iterable[bytes], encoding: str, *, final: bool = True) -> bool:
    """Whether all of it is valid. final: whether it is all of the text, so that no character may be cut at its end."""
    decoder = getincrementaldecoder(encoding)()
    try:
        for chunk in chunks:
            decoder.decode(chunk)
        decoder.decode(b"", final)
    except UnicodeDecodeError:
        return False
    return True


def _is_chinese(text: str) -> bool:
    num_wide = sum(char > "\x7f" for char in text)
    marks = sum("\u3000" <= char <= "\u303f" or "\uff00" <= char <= "\uffef" or char in "‘’“”—…·" for char in text)
    num_han, common = _common_share(text)
    return num_han >= max(_FEWEST_HAN, 0.9 * num_wide - marks) and common > _LEAST_COMMON


def _chinese_score(head: bytes, encoding: str) -> float:
    text = head.decode(encoding, errors="replace")
    num_han, common = _common_share(text)
    return 0.0 if num_han < 4 or text.count("\ufffd") > 1 + len(text) // 100 else common


def _common_share(text: str) -> tuple[int, float]:
    """The number of Han characters, and the share of the most common ones of them."""
    han = [char for char in text if "\u4e00" <= char <= "\u9fff"]
    return len(han), sum(char in _COMMON_HAN for char in han) / max(1, len(han))


class ChunkReader(io.RawIOBase):
    """A stream over the chunks that `_chunk` returns; an empty one ends it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._pending = stream, memoryview(b"")

    def _chunk(self) -> bytes:
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._pending:
            self._pending = memoryview(self._chunk())
        size = min(len(buffer), len(self._pending))
        buffer[:size], self._pending = self._pending[:size], self._pending[size:]
        return size


class Utf8Reader(ChunkReader):
    """A stream in another encoding, as UTF-8. A byte that does not decode stays invalid."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        super().__init__(stream)
        self._decoder = getincrementaldecoder(encoding)(_BAD_BYTE)

    def _chunk(self) -> bytes:
        while raw := self._stream.read(_CHUNK_BYTES):
            if text := self._decoder.decode(raw):
                return text.encode("utf-8", "surrogatepass")
        return self._decoder.decode(b"", True).encode("utf-8", "surrogatepass")
