"""Compressed data files: gzip and Zstandard, as streams of bounded reads."""

import gzip
import zlib
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from penjing.base.errors import import_extra
from penjing.data.formats.encodings import ChunkReader

PACKED = (".gz", ".zst")
PACKED_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)
_ZST_CHUNK_BYTES = 1 << 11  # 4 bytes may unpack to 128 KiB: so that one chunk unpacks to 64 MiB at most


def unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """The stream, decompressed if the file's name says so. Damage is one of PACKED_ERRORS."""
    match path.suffix.lower():
        case ".gz":
            return cast(IO[bytes], gzip.GzipFile(fileobj=raw, mode="rb"))
        case ".zst":
            return cast(IO[bytes], BufferedReader(_ZstdReader(raw, path)))
        case _:
            return raw


class _ZstdReader(ChunkReader):
    """Not `stream_reader` of zstandard: for that the end of a file that is cut short is an end like any other."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        zstandard = import_extra("zstandard", where=path)
        super().__init__(stream)
        self._error, self._new_frame = zstandard.ZstdError, zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._packed = b""

    def _chunk(self) -> bytes:
        data = b""
        while not data:
            self._packed = self._packed or self._stream.read(_ZST_CHUNK_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                break
            frame = self._frame or self._new_frame()
            try:
                data = frame.decompress(self._packed)
            except self._error as error:
                raise EOFError(str(error)) from None
            self._frame, self._packed = (None, frame.unused_data) if frame.eof else (frame, b"")
        return data
