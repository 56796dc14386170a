"""The page about a cleaned corpus: what each rule kept, dropped and changed, with examples, and lengths before and
after."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from penjing.base.files import write_text
from penjing.base.formatting import count, megabytes
from penjing.report import charts
from penjing.report.charts import Axis, Series
from penjing.report.html import FILE_NAME, TEMPLATES, Cell, HtmlTable
from penjing.report.text_format import clip, percent

_MOST_ROWS = 60
_WHEN = ("before", "after")
_BYTES_PER_TOKEN = (4, 3 * 1.6, 4)  # of each of the counts' languages, as `data look` estimates


def totals_by(counts: Mapping[str, Any], column: int, names: Sequence[str]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Of each source (column 0) or language (column 1) its name, and before and after cleaning its records, bytes of
    text, and tokens (an estimate); the largest first."""
    before, after = (_sums(counts[when], column) for when in _WHEN)
    rows = [(name, list(zip(before[number], after[number], strict=True))) for number, name in enumerate(names)]
    return sorted(rows, key=lambda row: -row[1][1][0])


def _sums(rows: list[list[int]], column: int) -> dict[int, list[int]]:
    """By the value of a column of a histogram: records, bytes, and estimated tokens."""
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        tokens = round(row[4] / _BYTES_PER_TOKEN[row[1]])
        sums[row[column]] = [x + y for x, y in zip(sums[row[column]], (row[3], row[4], tokens), strict=True)]
    return sums


def _table(counts: Mapping[str, Any], column: int, names: list[str], title: str) -> HtmlTable:
    rows = [
        (
            clip(name, 100),
            *(f"{each:,}" for each in records),
            *map(megabytes, num_bytes),
            percent(num_bytes[1] / num_bytes[0] if num_bytes[0] else None),
            *map(count, tokens),
        )
        for name, (records, num_bytes, tokens) in totals_by(counts, column, names)
        if records[0]
    ]
    after = "after 清洗后"
    headings = (title, "records 条数", after, "bytes 字节", after, "kept 保留", "tokens 词元 (estimate)", after)
    return _html(headings, rows)


def _html(columns: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> HtmlTable:
    return HtmlTable(columns, [list(map(Cell, row)) for row in rows[:_MOST_ROWS]], texts)


def _lengths(counts: Mapping[str, Any]) -> Markup:
    """Records by length: the upper end of each bin, in powers of two of characters."""
    sums = [_sums(counts[when], 2) for when in _WHEN]
    bins = sorted({number for each in sums for number in each})
    series = [
        Series(when, [(float(2**number), float(each[number][0])) for number in range(bins[0], bins[-1] + 1)])
        for when, each in zip(_WHEN, sums, strict=True)
        if bins
    ]
    return charts.line_chart(
        series, title="Records by length", x=Axis("characters", log=True), y=Axis("records", from_zero=True)
    )


def cleaning_context(counts: Mapping[str, Any], pipeline: str) -> dict[str, Any]:
    """What the template shows, already formatted."""
    total = max(1, counts["records"])
    rules = [
        (rule, action, clip(why, 120), f"{number:,}", f"{number / total:.2%}")
        for action, rule, why, number in counts["rules"]
    ]
    names = ("kept", "dropped", "broken", "changed")
    shares = [(name, f"{counts[name]:,} ({counts[name] / total:.2%})") for name in names]
    ignored = counts["ignored"].items()
    return {
        "title": f"Cleaned {counts['made_from']['kind']}",
        "facts_rows": [("records", f"{counts['records']:,}"), *shares],
        "rules": _html(("rule 规则", "records are", "why 原因", "records 条数", "of all 占比"), rules, texts=3),
        "sources": _table(counts, 0, counts["sources"], "source 来源"),
        "languages": _table(counts, 1, counts["languages"], "language 语言"),
        "lengths": _lengths(counts),
        "examples": [_example(example) for example in counts["examples"][: 2 * _MOST_ROWS]],
        "ignored": [f"{name}: {number:,} records, the first {first}" for name, (number, first) in ignored],
        "pipeline": pipeline,
    }


def _example(entry: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: clip(str(entry.get(name, "")), 300) for name in ("detail", "sample", "before", "after")}
    title = ", ".join(str(entry[name]) for name in ("rule", "reason") if entry.get(name))
    return {"title": f"{entry['action']}: {clip(title, 200)}", "place": f"{entry['file']}:{entry['line']}", **texts}


def write_cleaning_report(counts: Mapping[str, Any], folder: Path) -> Path:
    """Write the page beside the resolved pipeline in `folder`, and return its path."""
    pipeline = (folder / "pipeline.toml").read_text(encoding="utf-8")
    page = TEMPLATES.get_template("cleaning.html.jinja").render(cleaning_context(counts, pipeline))
    write_text(folder / FILE_NAME, page)
    return folder / FILE_NAME
