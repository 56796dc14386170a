"""Broken records: listed with file, line and reason, and counted; too many are an error."""

import json
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from penjing.base.errors import UserError
from penjing.base.formatting import listing
from penjing.data.formats.source_location import SourceLocation, UnrecoverableFileError

DEFAULT_MAX_BAD = 0.01
MAX_LISTED = 10_000  # entries in the list; all are counted
_NUM_SHOWN = 3
_NUM_IGNORED_SHOWN = 12
_MAX_IGNORED = 1000  # distinct names that are counted
_MAX_FIELDS = 20  # of a note
_PLAIN_NAMES = {  # of what a field is read as
    "text": ("content", "raw_content"),
    "messages": ("conversations", "conversation"),
    "question": ("prompt",),
    "answer": ("completion", "response"),
    "reference": ("gt",),
}


class BadRecords:
    """Counts the records of one pass: good + bad + left_out are all records, each counted once.

    bad: broken records. left_out: valid records with nothing to learn from, or that a cleaning rule leaves out; never
    an error. changed: records by what changes them, a cleaning rule or a repair (`data/formats/repair.py`). roles:
    records by a field and what it is read as.
    Damage can hide where records begin (a truncated archive, broken JSON inside an array). The rest of that file is one
    bad record of unknown size: an error at once, unless all records may be broken (max_bad_fraction=1).
    """

    def __init__(self, max_bad_fraction: float = DEFAULT_MAX_BAD, path: Path | None = None) -> None:
        """max_bad_fraction: fraction of records that may be broken. path: the list, as JSON lines; None: no list."""
        self.max_bad_fraction, self.path = max_bad_fraction, path
        self.good = self.bad = self.left_out = 0
        self.reasons: Counter[str] = Counter()  # why valid records, or parts of them, were left out
        self.changed: Counter[str] = Counter()
        self.roles: Counter[tuple[str, str]] = Counter()
        self.ignored: dict[str, tuple[int, str]] = {}  # field or mark: number of records that have it, the first place
        self._first: dict[tuple[str, str], str] = {}  # of a few kinds of error
        self.unread: list[str] = []  # file:line where reading stopped
        self._stream: IO[str] | None = None

    @property
    def records(self) -> int:
        return self.good + self.bad + self.left_out

    @property
    def first(self) -> list[str]:
        """The first error of a few kinds."""
        return list(self._first.values())

    def add(self, error: UserError, file: Path, line: int) -> None:
        """Count a broken record. Raises UserError if it ends its file early, unless max_bad_fraction is 1."""
        self.bad += 1
        if len(self._first) < _NUM_SHOWN:
            self._first.setdefault((error.what, str(error.got)), error.line().rstrip("."))
        reason = f"{error.what}; got {error.got}" if error.got is not None else error.what
        if isinstance(error, UnrecoverableFileError):
            reason += "; what follows in the file is not read"
        self._list(str(file), line, "bad", " ".join(reason.split())[:500])
        if isinstance(error, UnrecoverableFileError):
            self.unread.append(f"{file}:{line}")
            if self.max_bad_fraction < 1:
                self._close()
                raise _file_lost_error(error)

    def leave_out(self, where: SourceLocation, reasons: Sequence[str]) -> None:
        """Count a valid record of which nothing is kept. reasons: of each of its parts."""
        self.left_out += 1
        self.reasons.update(reasons)
        self._list(str(where.path), where.line, "left out", reasons[0])

    def keep(self, where: SourceLocation, reasons: Sequence[str]) -> None:
        """Count a good record. reasons: why parts of it are left out."""
        self.good += 1
        if reasons or where.repairs:
            self.reasons.update(reasons)
            self.changed.update(sorted(where.repairs))
        for name, role in where.used.items():
            item = where.names.get(name, name), role
            if role and (item in self.roles or len(self.roles) < _MAX_IGNORED):
                self.roles[item] += 1
        for name in sorted(where.ignored):  # not as the hash seed has it
            name = name if name in self.ignored or len(self.ignored) < _MAX_IGNORED else "other fields"
            count, first = self.ignored.get(name, (0, str(where)))
            self.ignored[name] = count + 1, first

    def reject(self, error: UserError, file: str, line: int) -> None:
        """Recount a good record as broken, for example if the chat template refuses it."""
        self.good -= 1
        self.add(error, Path(file), line)

    def check(self) -> None:
        """Called at the end: warns of what was ignored. Raises UserError if too many records were broken, or none was
        good.
        """
        self._close()
        if self.ignored:
            most_common = sorted(self.ignored.items(), key=lambda item: -item[1][0])
            names = [
                f"{name} ({count:,} record{'s' if count > 1 else ''}, the first {first})"
                for name, (count, first) in most_common
            ]
            note = f"in the data but without effect on what is learned: {listing(names, _NUM_IGNORED_SHOWN)}"
            warnings.warn(note, stacklevel=3)
        examples = "; ".join(self.first)
        if self.bad > self.max_bad_fraction * self.records:
            share = self.bad / self.records
            hint = f"Correct them, or allow more: data.max_bad_fraction={math.ceil(share * 1000) / 1000}."
            what = f"{self.bad:,} of {self.records:,} records are broken: {examples}"
            wanted, next_step = f"at most {self.max_bad_fraction:.2%}", hint if self.good else None  # else none does
            raise UserError(what, where=self.path, got=f"{share:.2%}", wanted=wanted, next_step=next_step)
        if not self.good:
            counts = [f"{self.left_out:,} are left out{_counted(self.reasons)}"] * bool(self.left_out)
            counts += [f"{self.bad:,} broken: {examples}"] * bool(self.bad)
            is_rule = any(": " in reason for reason in self.reasons)  # a rule's reason begins with its name
            what = f"no usable record: {', '.join(counts) or 'the data are empty'}"
            hint = "Choose other rules, or none: data.clean=."
            raise UserError(what, where=self.path, next_step=hint if is_rule else None)

    def note(self) -> str:
        """A line for the user; empty if nothing was wrong, and all fields have the names that they are read as."""
        note = ""
        if self.bad or self.left_out or self.changed.total():
            note = f"of {self.records:,} records {self.bad:,} are broken and {self.left_out:,} left out"
            note += _counted(self.reasons)
            note += f", listed in {self.path}" if self.path and (self.bad or self.left_out) else ""
            note += f"; changed{_counted(self.changed)}" if self.changed.total() else ""
            note += f"; not read to the end: {listing(self.unread, _NUM_SHOWN)}" if self.unread else ""
        if all(field in (role, *_PLAIN_NAMES.get(role, ())) for field, role in self.roles):
            return note
        fields = ", ".join(f"{field} as {role}" for (field, role), _ in self.roles.most_common(_MAX_FIELDS))
        return f"{note}; read {fields}" if note else f"read {fields}"

    def summary(self) -> dict[str, Any]:
        """How many records were read; left out and changed ones with all reasons, where there are any."""
        found = {"left_out": (self.left_out, self.reasons), "changed": (self.changed.total(), self.changed)}
        shown = {name: f"{num:,}{_counted(reasons, len(reasons))}" for name, (num, reasons) in found.items() if num}
        return {"records": self.records, **shown}

    def _close(self) -> None:
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            self._stream = None

    def _list(self, file: str, line: int, kind: str, reason: str) -> None:
        if self.path is None or self.bad + self.left_out > MAX_LISTED:
            return
        with suppress(OSError):  # on a full disk only the counts are kept
            if self._stream is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._stream = open(self.path, "w", encoding="utf-8", errors="backslashreplace")
            entry = {"file": file, "line": line, "kind": kind, "reason": reason}
            self._stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


class NoBadRecords(BadRecords):
    """Raises the error of the first broken record."""

    def add(self, error: UserError, file: Path, line: int) -> None:
        raise error from None


class UncheckedRecords(BadRecords):
    """For a first look at data, such as examples of questions: nothing is an error, and nothing is warned of."""

    def __init__(self) -> None:
        super().__init__(max_bad_fraction=1)

    def check(self) -> None:
        self._close()


def _counted(counts: Counter[str], most: int = _NUM_SHOWN) -> str:
    """The largest counts in brackets."""
    shown = ", ".join(f"{name}: {count:,}" for name, count in counts.most_common(most) if count)
    return f" ({shown})" if shown else ""


def _file_lost_error(error: UnrecoverableFileError) -> UserError:
    hint = "Repair the file, or continue without the unreadable part: data.max_bad_fraction=1."
    what = f"{error.what}; nothing after it in the file can be read"
    next_step = f"{hint} {error.next_step}" if error.next_step else hint
    return UserError(what, where=error.where, got=error.got, wanted=error.wanted, next_step=next_step)
