"""Clean one piece in a process of its own: all that the rules can do without the other pieces, and then the rest.

A piece's folder holds `records.jsonl` with what is kept so far, `trace.jsonl` with what is not and with what was
changed, `facts.npz` with arrays over the records that reached the end or a rule that compares records, and for each
such rule its sketches.
"""

import json
import re
import shutil
import warnings
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np

from penjing.base.errors import UserError
from penjing.base.files import disk_errors, printable, read_json, write_json
from penjing.data.clean.language import script_of
from penjing.data.clean.near_duplicates import compared_text
from penjing.data.clean.pieces import Part, Piece
from penjing.data.clean.pipeline import outcome
from penjing.data.clean.rule import CorpusRule, Dropped, Record, Rule, place_of
from penjing.data.clean.text_scan import scan
from penjing.data.formats import READERS, Kind, UncheckedRecords
from penjing.data.formats.fields import Columns
from penjing.data.formats.files import only
from penjing.data.formats.schema import Document
from penjing.data.formats.source_location import SourceLocation
from penjing.data.formats.write import record_row

FACTS = ("part", "line", "source", "language", "length", "size", "kept")
_TEXTS = ("sample", "before", "after")
NUM_SAMPLES = 5  # of each rule in a piece: so many trace lines show the text
SAMPLE_CHARACTERS = 300
LANGUAGES = ("English and other Latin", "Chinese", "other")
_OF_SCRIPT = {"Latin": 0, "Chinese": 1}
_SCRIPT_CHARACTERS = 256  # by which the script of a text is told
_BUFFER_BYTES = 1 << 20
_NUMBER = re.compile(r"\d[\d,]*")  # in an error, such as a column: kinds of errors are counted
_CONTROLS = bytes({*range(32)} - {*b"\n\t"})
_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode


def measures(text: str) -> tuple[int, int, int]:
    """Language (an index of LANGUAGES, by the script of the beginning), length and bytes."""
    length, num_bytes = len(text), len(text if text.isascii() else text.encode("utf-8", "surrogatepass"))
    if 16 * (num_bytes - length) <= length:  # almost all of it is ASCII
        return 0, length, num_bytes
    return _OF_SCRIPT.get(script_of(scan(text[:_SCRIPT_CHARACTERS])), 2), length, num_bytes


def write_line(stream: IO[bytes], row: Mapping[str, Any]) -> None:
    stream.write(_encode(row).encode("utf-8", "backslashreplace") + b"\n")


def _write_record(stream: IO[bytes], record: Record) -> None:
    """A line; of most documents without the encoder, which takes four times as long."""
    content = record.text.encode("utf-8", "backslashreplace") if isinstance(record, Document) else b"\0"
    if len(content.translate(None, _CONTROLS)) < len(content):
        write_line(stream, record_row(record))
        return
    for char, escaped in (b"\\", rb"\\"), (b'"', rb"\""), (b"\n", rb"\n"), (b"\t", rb"\t"):
        content = content.replace(char, escaped)
    stream.write(b'{"text": "%b"}\n' % content)


def trace_entry(file: str, line: int, action: str, reason: str, **shown: str) -> dict[str, Any]:
    """A line of the trace. reason: with the rule's name. shown: a detail, and texts."""
    rule, _, why = reason.partition(": ")
    entry = {"file": file, "line": line, "action": action, "rule": rule, "reason": why}
    return {name: value for name, value in entry.items() if value != ""} | {
        name: text[:SAMPLE_CHARACTERS] for name, text in shown.items() if text
    }


def changed_part(before: str, after: str) -> dict[str, str]:
    """Both texts from shortly before the first difference on."""
    same = next((i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), None)
    start = max(0, (min(len(before), len(after)) if same is None else same) - 40)
    return {"before": before[start : start + 120], "after": after[start : start + 120]}


class Histogram(dict[tuple[int, int, int], list[int]]):
    """Records and bytes by source, language and length, which is in powers of two of characters."""

    def add(self, key: tuple[int, int, int], records: int, num_bytes: int) -> None:
        found = self.setdefault(key, [0, 0])
        found[0] += records
        found[1] += num_bytes

    def rows(self) -> list[list[int]]:
        return [[*key, *found] for key, found in sorted(self.items())]


class _Traced(Dropped):
    """A reason with what the trace shows of the record. number: in the facts, or -1."""

    number: int
    text: str


class PieceWriter(UncheckedRecords):
    """Cleans the records of a piece as their reader meets them, and writes what becomes of each."""

    def __init__(self, folder: Path, rules: Mapping[str, Rule], stack: ExitStack) -> None:
        super().__init__()
        self.rules = rules

        def new(name: str) -> IO[bytes]:
            return stack.enter_context(open(folder / name, "wb", _BUFFER_BYTES))

        self.output, self.trace = new("records.jsonl"), new("trace.jsonl")
        self.facts = array("q")  # FACTS of each record
        self.compared = {name: rule for name, rule in rules.items() if isinstance(rule, CorpusRule)}
        self.sketch_files = {name: (new(f"{name}.sketches"), new(f"{name}.rows")) for name in self.compared}
        self.sketched = {name: (array("q"), array("q", [0])) for name in self.compared}  # numbers, ends of sketches
        self.cleaned: deque[tuple[int, Record, str, list[str]]] = deque()  # and not yet yielded
        self.samples: Counter[tuple[str, str]] = Counter()
        self.before = Histogram()
        self.num_records = 0
        self.part, self.file = Part(Path(), 0), 0

    def clean(self, record: Record) -> Record | str:
        """Called by the reader with each record that it could read."""
        text = compared_text(record)
        language, length, num_bytes = measured = measures(text)
        self.before.add((self.part.source, language, length.bit_length()), 1, num_bytes)
        steps, result = outcome(self.rules, record)
        compared = [(name, each) for name, each in steps if each is not None]
        number = -1
        if compared or not isinstance(result, Dropped):
            number = len(self.facts) // len(FACTS)
            self.facts.extend((self.file, place_of(record)[1], self.part.source, *measured, 0))
        for name, each in compared:
            self._write_sketch(name, number, each)
        if isinstance(result, Dropped):
            reason = _Traced(result, result.detail)
            reason.number, reason.text = number, text
            return reason
        self.cleaned.append((number, result, text, [name for name, each in steps if each is None]))
        return result

    def keep(self, where: SourceLocation, reasons: Sequence[str]) -> None:
        super().keep(where, reasons)
        self._drop(where, reasons)

    def leave_out(self, where: SourceLocation, reasons: Sequence[str]) -> None:
        super().leave_out(where, reasons)
        self.cleaned.clear()
        self._drop(where, reasons)

    def add(self, error: UserError, file: Path, line: int) -> None:
        super().add(error, file, line)
        self.num_records += 1
        detail = " ".join((error.what if error.got is None else f"{error.what}; got {error.got}").split())
        self._write_trace("broken", line, _NUMBER.sub("N", error.what), detail=detail)

    def write(self, record: Record) -> None:
        """Called with each record that the reader yields. It passes over those of which cleaning left nothing."""
        number, result, text, changed_by = self.cleaned.popleft()
        while result is not record:
            number, result, text, changed_by = self.cleaned.popleft()
        self.num_records += 1
        _write_record(self.output, record)
        self.facts[number * len(FACTS) + 6] = 1
        if changed_by:
            cleaned = compared_text(record)
            self.facts[number * len(FACTS) + 3 : number * len(FACTS) + 6] = array("q", measures(cleaned))
        for name in changed_by:
            self._write_trace("changed", place_of(record)[1], f"{name}: ", number, **changed_part(text, cleaned))

    def _write_sketch(self, name: str, number: int, record: Record) -> None:
        if sketch := self.compared[name].sketch(record):
            (numbers, ends), (sketches, rows) = self.sketched[name], self.sketch_files[name]
            sketches.write(sketch)
            rows.write(sketch[: 8 * self.compared[name].num_keys])
            numbers.append(number)
            ends.append(ends[-1] + len(sketch))

    def _drop(self, where: SourceLocation, reasons: Sequence[str]) -> None:
        self.num_records += len(reasons)
        for reason in reasons:
            if isinstance(reason, _Traced):
                shown = {"detail": reason.detail, "sample": reason.text}
                self._write_trace("dropped", where.line, reason, reason.number, **shown)
            else:
                self._write_trace("dropped", where.line, reason)

    def _write_trace(self, action: str, line: int, reason: str, number: int = -1, **shown: str) -> None:
        """number: of the record in the facts, or -1."""
        if reason.partition(": ")[0] not in self.rules:
            reason = f"reader: {reason}"
        self.samples[action, reason] += 1
        if self.samples[action, reason] > NUM_SAMPLES:
            shown = {name: text for name, text in shown.items() if name not in _TEXTS}
        entry = trace_entry(printable(self.part.path), line, action, reason, **shown)
        write_line(self.trace, {"number": number, **entry})


def clean_piece(rules: Mapping[str, Rule], piece: Piece, kind: Kind, folder: Path, columns: Columns) -> None:
    """Write the folder of a piece. It appears whole, or not at all."""
    unfinished = folder.with_suffix(".unfinished")
    with disk_errors(unfinished), ExitStack() as stack:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        writer = PieceWriter(unfinished, rules, stack)
        with warnings.catch_warnings(record=True) as warned:
            for number, part in enumerate(piece.parts):
                writer.part, writer.file = part, number
                with only(part.lines) if part.lines else nullcontext():
                    read = READERS[kind]([part.path], bad_records=writer, clean=writer.clean, columns=columns)
                    for record in read:
                        writer.write(record)
        counts = {
            "files": [printable(part.path) for part in piece.parts],
            "records": writer.num_records,
            "before": writer.before.rows(),
            "ignored": {name: list(value) for name, value in writer.ignored.items()},
            "warnings": sorted({str(warning.message) for warning in warned}),
        }
        write_json(unfinished / "counts.json", counts)
        columns_of_facts = np.array(writer.facts).reshape(-1, len(FACTS)).T
        arrays: dict[str, Any] = dict(zip(FACTS, columns_of_facts, strict=True))
        np.savez(unfinished / "facts.npz", **arrays)
        for name in writer.compared:
            numbers, ends = map(np.array, writer.sketched[name])
            np.savez(unfinished / f"{name}.npz", numbers=numbers, ends=ends)
    for name, rule in writer.compared.items():
        _write_columns(unfinished / f"{name}.rows", unfinished / f"{name}.keys.npy", rule.num_keys)
    unfinished.rename(folder)
    for part in piece.parts:
        if part.lines and part.lines.content:
            part.lines.content.unlink(missing_ok=True)


def _write_columns(rows: Path, columns: Path, num_keys: int) -> None:
    """From (records, keys) to (keys, records), as the comparison reads one key of all records at a time."""
    num_records = rows.stat().st_size // (8 * num_keys)
    written = np.lib.format.open_memmap(columns, "w+", np.uint64, (num_keys, num_records))
    if num_records:
        written[:] = np.memmap(rows, np.uint64, "r", shape=(num_records, num_keys)).T
        written.flush()
    rows.unlink()


def finish_piece(rules: Mapping[str, Rule], folder: Path, dropped: Mapping[int, Dropped], shard: Path) -> None:
    """Write the shard of a piece, without the records that comparing left out, and its whole trace and counts.

    dropped: by number in the facts, why comparing leaves a record out, with the rule's name.
    """
    facts = dict(np.load(folder / "facts.npz"))
    counts, after = read_json(folder / "counts.json"), Histogram()
    totals, examples = Counter[str](), list[dict[str, Any]]()
    kept_numbers = np.flatnonzero(facts["kept"])
    measured = (facts[name][kept_numbers].tolist() for name in FACTS[2:6])

    def write(entry: dict[str, Any]) -> None:
        key = "\t".join((entry["action"], entry["rule"], entry.get("reason", "")))
        totals[key] += 1
        if totals[key] <= NUM_SAMPLES:
            examples.append(entry)
        else:
            entry = {name: value for name, value in entry.items() if name not in _TEXTS}
        write_line(trace, entry)

    def write_dropped(number: int, sample: str) -> None:
        file, line, why = counts["files"][facts["part"][number]], int(facts["line"][number]), dropped[number]
        write(trace_entry(file, line, "dropped", why, detail=why.detail, sample=sample))

    with disk_errors(shard), ExitStack() as stack:
        shard.parent.mkdir(parents=True, exist_ok=True)
        trace = stack.enter_context(open(folder / "whole_trace.jsonl", "wb"))
        output = stack.enter_context(open(shard, "wb", _BUFFER_BYTES))
        first_trace = stack.enter_context(open(folder / "trace.jsonl", encoding="utf-8"))
        records = stack.enter_context(open(folder / "records.jsonl", "rb"))
        for entry in map(json.loads, first_trace):
            if (number := entry.pop("number")) not in dropped:
                write(entry)
            elif entry["action"] == "dropped":
                write_dropped(number, entry.get("sample", ""))
        for number, record, *about in zip(kept_numbers.tolist(), records, *measured, strict=True):
            if number in dropped:
                write_dropped(number, record[: 4 * SAMPLE_CHARACTERS].decode("utf-8", "ignore"))
            else:
                output.write(record)
                source, language, length, size = about
                after.add((source, language, length.bit_length()), 1, size)
    kept = sum(records for records, _ in after.values())
    write_json(
        folder / "whole_counts.json",
        counts | {"after": after.rows(), "totals": dict(totals), "examples": examples, "kept": kept},
    )
