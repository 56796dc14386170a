"""LAMBADA (arXiv:1606.06031): the last word of a passage, right if each of its tokens is the most likely one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penjing.data.formats.files import lines
from penjing.eval.benchmark import Benchmark, Row
from penjing.eval.task import LogLikelihood, Result, perplexity


class Lambada(Benchmark):
    name = "lambada"
    patterns = (
        "lambada_openai.jsonl",
        "lambada_openai/default/test*.parquet",
        "lambada_test_en.jsonl",
        "lambada_test.jsonl",
        "lambada/plain_text/test*.parquet",
        "lambada_test_plain_text.txt",
    )
    chance = "0"

    def numbered(self, path: Path) -> Iterator[tuple[int, Any]]:
        """The authors' file has a passage on each line."""
        if path.suffix != ".txt":
            return super().numbered(path)
        return ((at, {"text": line.strip()} if isinstance(line, str) else line) for at, line in lines(path) if line)

    def request(self, row: Row, where: str) -> LogLikelihood:
        text, word = (row["context"], row["continuation"]) if "context" in row else row["text"].rsplit(" ", 1)
        return LogLikelihood(text=text, choices=(f" {word}",), answer=0, language="en", where=where, begins=False)

    def score(self, request: LogLikelihood, result: Result) -> float:
        return result.greedy[0]

    def figures(self, graded: Sequence[Any]) -> dict[str, float]:
        """The perplexity of a last word."""
        return {"perplexity": perplexity(-sum(one.result.logps[0] for one in graded) / len(graded))}
