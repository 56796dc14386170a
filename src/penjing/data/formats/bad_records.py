"""Broken records: set aside as file, line and reason, counted exactly, and too many of them are an error."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO

from penjing.base.errors import UserError
from penjing.data.formats.source_location import UnrecoverableFileError

DEFAULT_MAX_BAD = 0.01
MOST_LISTED = 10_000  # lines of the list; all are counted
_SHOWN = 3


class BadRecords:
    """Counts what one reading gave: good + bad + left_out is every record there was, each counted once.

    bad: broken ones. left_out: whole ones with nothing to learn from, such as an empty text; they are listed too, and
    are no reason to stop. What follows in a file after damage that hides where records begin (a cut archive, broken
    JSON inside an array) is one bad record, whose reason says so. Nobody knows how much that is, so it is an error at
    once, unless all records may be broken (max_bad_fraction=1): a share of what was read says nothing about what was
    not.
    """

    def __init__(self, max_bad_fraction: float = DEFAULT_MAX_BAD, path: Path | None = None) -> None:
        """max_bad_fraction: share of all records that may be broken. path: where to list them, as JSON lines; None:
        nowhere."""
        self.max_bad_fraction, self.path = max_bad_fraction, path
        self.good = self.bad = self.left_out = 0
        self.reasons: Counter[str] = Counter()  # why whole records, or a part of them, were left out
        self.first: list[str] = []
        self.unread: list[str] = []  # file:line from which the rest of a file was not read
        self._stream: IO[str] | None = None

    @property
    def records(self) -> int:
        return self.good + self.bad + self.left_out

    def add(self, error: UserError, file: Path, line: int) -> None:
        """One broken record. Raises UserError if the rest of its file is lost with it, and not all of it may be."""
        self.bad += 1
        if len(self.first) < _SHOWN:
            self.first.append(error.line())
        reason = f"{error.what}; got {error.got}" if error.got is not None else error.what
        if isinstance(error, UnrecoverableFileError):
            reason += "; what follows in the file is not read"
        self._list(str(file), line, "bad", " ".join(reason.split())[:500])
        if isinstance(error, UnrecoverableFileError):
            self.unread.append(f"{file}:{line}")
            if self.max_bad_fraction < 1:
                self._close()
                raise _no_rest(error)

    def leave_out(self, file: Path, line: int, reason: str) -> None:
        """One whole record with nothing to learn from."""
        self.left_out += 1
        self.reasons[reason] += 1
        self._list(str(file), line, "left out", reason)

    def reject(self, error: UserError, file: str, line: int) -> None:
        """A record that was taken for good turns out to be broken: no template writes it, say."""
        self.good -= 1
        self.add(error, Path(file), line)

    def check(self) -> None:
        """At the end of a reading. Raises UserError if too many records were broken, or none was good."""
        self._close()
        about = "; ".join(self.first)
        if self.bad > self.max_bad_fraction * self.records:
            share = self.bad / self.records
            raise UserError(
                f"{self.bad:,} of {self.records:,} records are broken: {about}",
                where=self.path,
                got=f"{share:.2%}",
                wanted=f"at most {self.max_bad_fraction:.2%}",
                next_step=f"Mend them, or allow more: data.max_bad_fraction={math.ceil(share * 1000) / 1000}.",
            )
        if not self.good:
            raise UserError(
                f"no usable record: {self.left_out:,} are left out, {self.bad:,} broken"
                + (f": {about}" if about else "")
            )

    def note(self) -> str:
        """A line for the user; empty where nothing was wrong."""
        if not self.bad and not self.left_out:
            return ""
        where = f", listed in {self.path}" if self.path else ""
        note = f"of {self.records:,} records {self.bad:,} are broken and {self.left_out:,} have nothing to learn{where}"
        if self.unread:
            more = f" and {len(self.unread) - _SHOWN:,} more" if len(self.unread) > _SHOWN else ""
            note += f"; not read to the end: {', '.join(self.unread[:_SHOWN])}{more}"
        return note

    def _close(self) -> None:
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            self._stream = None

    def _list(self, file: str, line: int, kind: str, reason: str) -> None:
        if self.path is None or self.bad + self.left_out > MOST_LISTED:
            return
        with suppress(OSError):  # a full disk: the counts are what matters
            if self._stream is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._stream = open(self.path, "w", encoding="utf-8", errors="backslashreplace")
            entry = {"file": file, "line": line, "kind": kind, "reason": reason}
            self._stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


class NoBadRecords(BadRecords):
    """The first broken record ends the reading."""

    def add(self, error: UserError, file: Path, line: int) -> None:
        raise error from None


def _no_rest(error: UnrecoverableFileError) -> UserError:
    mend = "Mend the file, or go on without what cannot be read: data.max_bad_fraction=1."
    return UserError(
        f"{error.what}; nothing after it in the file can be read",
        where=error.where,
        got=error.got,
        wanted=error.wanted,
        next_step=f"{mend} {error.next_step}" if error.next_step else mend,
    )
