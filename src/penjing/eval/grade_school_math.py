"""GSM8K (arXiv:2110.14168): word problems with a number as the answer, after five solved ones."""

import re
from collections.abc import Sequence
from typing import Any

from penjing.eval.benchmark import Benchmark, Row
from penjing.eval.task import Continuation, Result

NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
MARKED = re.compile(r"#### (-?[0-9.,]+)")


class Gsm8k(Benchmark):
    name = "gsm8k"
    patterns = ("gsm8k_test.jsonl", "gsm8k/main/test*.parquet", "grade_school_math/data/test.jsonl")
    shot_patterns = ("gsm8k_train.jsonl", "gsm8k/main/train*.parquet", "grade_school_math/data/train.jsonl")
    chance = "0"
    shots = 5

    def request(self, row: Row, where: str) -> Continuation:
        return Continuation(
            text=f"Question: {row['question']}\nAnswer:",
            answer=row["answer"],
            until=("Question:", "</s>", "<|im_end|>"),
            language="en",
            where=where,
            begins=False,
        )

    def score(self, request: Continuation, result: Result) -> float:
        """The number after ####, as the solved examples have it."""
        found = MARKED.search(result.text)
        return float(found is not None and _plain(found[1]) == _wanted(request))

    def figures(self, graded: Sequence[Any]) -> dict[str, float]:
        """With the last number of the text, wherever it stands."""
        right = sum(
            bool(numbers := NUMBER.findall(one.result.text)) and _plain(numbers[-1]) == _wanted(one.request)
            for one in graded
        )
        return {"acc_last_number": right / len(graded)}


def _wanted(request: Continuation) -> str:
    return _plain(request.answer.rpartition("#### ")[2])


def _plain(number: str) -> str:
    """Without separators and signs of money."""
    return number.strip().replace(",", "").replace("$", "").removesuffix(".")
