"""What rules that judge the quality of a document share: only documents are judged, by thresholds of their language."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from importlib.util import find_spec

from penjing.base.errors import missing_extra
from penjing.data.clean.rule import Dropped, Record, Rule
from penjing.data.clean.text_scan import Scan, scan
from penjing.data.formats.schema import Document


class DocumentRule(Rule):
    """A rule that leaves out documents. Conversations pass: whoever wrote an answer meant it."""

    @abstractmethod
    def judge(self, text: str, counts: Scan) -> str | None:
        """Why the document is left out; None if it is kept."""

    def __call__(self, record: Record) -> Record | str:
        reason = self.judge(record.text, scan(record.text)) if isinstance(record, Document) else None
        return reason or record


def is_chinese(counts: Scan) -> bool:
    """Whether the thresholds for Chinese hold: a third of the words is a Chinese character."""
    return 3 * counts.han > counts.words


def is_code(counts: Scan) -> bool:
    """Whether a thirtieth of the characters are symbols such as braces: 99 of 100 web pages have less than 0.02."""
    return 30 * counts.symbols > counts.visible


def first_above(measures: Iterable[tuple[str, float, float, float]]) -> Dropped | None:
    """Of (reason, number, of how many, limit) the first whose share is above its limit."""
    for reason, number, total, limit in measures:
        if number > limit * total:
            return Dropped(reason, f"{number / total if total else 1:.3f}, at most {limit:g}")
    return None


def needs(package: str) -> None:
    """Raises UserError if the package of the extra `data` is not installed."""
    if find_spec(package) is None:
        raise missing_extra(package)
