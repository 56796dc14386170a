"""What rules that judge the quality of a document share: only documents are judged, by thresholds of their language."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import make_dataclass
from typing import Any, get_type_hints

from penjing.base.config import NonNegativeFloat
from penjing.data.clean.rule import Dropped, Record, Rule, RuleSettings
from penjing.data.clean.text_scan import Scan, scan
from penjing.data.formats.schema import Document


def by_language(limits: type[RuleSettings], **chinese: float) -> type[RuleSettings]:
    """Settings with two tables of limits: `en`, for all languages but Chinese, and `zh` with other defaults."""
    types: dict[str, Any] = get_type_hints(limits, include_extras=True)
    other = [(name, types.get(name, NonNegativeFloat), value) for name, value in chinese.items()]
    zh: Any = make_dataclass("ChineseLimits", other, bases=(limits,), frozen=True, kw_only=True)
    limits.section, zh.section = f"{limits.section}.en", f"{limits.section}.zh"
    tables = [("en", limits, limits()), ("zh", zh, zh())]
    return make_dataclass("Settings", tables, bases=(RuleSettings,), frozen=True, kw_only=True)


class DocumentRule(Rule):
    """A rule that leaves out documents. Conversations pass: whoever wrote an answer meant it."""

    @abstractmethod
    def judge(self, text: str, counts: Scan) -> str | None:
        """Why the document is left out; None if it is kept."""

    def __call__(self, record: Record) -> Record | str:
        reason = self.judge(record.text, scan(record.text)) if isinstance(record, Document) else None
        return reason or record

    def limits(self, counts: Scan) -> Any:
        """Of settings that `by_language` made, those that hold for the text."""
        return self.settings.zh if is_chinese(counts) else self.settings.en


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
