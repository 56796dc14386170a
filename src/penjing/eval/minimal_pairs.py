"""Minimal pairs: which of two sentences is the more probable one.

BLiMP (arXiv:1912.00582): 67 paradigms of English grammar, 1,000 pairs each. ZhoBLiMP (arXiv:2411.06096): 118 paradigms
of Chinese. The probability of a sentence is that of all its tokens.
"""

from typing import ClassVar

from penjing.eval.benchmark import Benchmark, Row, name_of_file
from penjing.eval.task import LogLikelihood


class Blimp(Benchmark):
    name = "blimp"
    patterns = ("blimp*.jsonl", "blimp/**/*.jsonl", "blimp/**/*.parquet")
    chance = "50"
    language: ClassVar[str] = "en"
    before: ClassVar[str] = " "  # each sentence, as in lm-evaluation-harness

    def request(self, row: Row, where: str) -> LogLikelihood:
        good, bad = (row[name] if name in row else row[f"sentence_{name}"] for name in ("good", "bad"))
        if not (good and bad):
            raise ValueError("an empty sentence")
        kind = next((row[name] for name in ("UID", "uid", "paradigm") if row.get(name)), "") or name_of_file(where)
        return LogLikelihood(
            text="",
            choices=(self.before + good, self.before + bad),
            answer=0,
            kind=str(kind),
            group=str(row.get("field") or row.get("phenomenon") or ""),
            language=self.language,
            where=where,
        )


class ZhoBlimp(Blimp):
    name = "zhoblimp"
    patterns = ("zhoblimp*.jsonl", "zhoblimp/**/*.json*", "zhoblimp/**/*.parquet")
    language = "zh"
    before = ""
