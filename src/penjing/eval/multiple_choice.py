"""Which continuation of a question is the most probable one. Prompts are those of lm-evaluation-harness.

ARC (arXiv:1803.05457), HellaSwag (arXiv:1905.07830), PIQA (arXiv:1911.11641), OpenBookQA (arXiv:1809.02789) and
WinoGrande (arXiv:1907.10641), as their authors publish them, as tables of the Hugging Face hub, or as llm-foundry's
files (`query`, `choices`, `gold`).
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from penjing.base.errors import UserError
from penjing.eval.benchmark import Benchmark, Row
from penjing.eval.task import LogLikelihood

Parts = tuple[str, Sequence[str], int]  # question, choices, answer


class MultipleChoice(Benchmark):
    chance = "25"
    prompt: ClassVar[str] = "Question: {}\nAnswer:"

    def parts(self, row: Row) -> Parts:
        raise NotImplementedError

    def request(self, row: Row, where: str) -> LogLikelihood:
        if "gold" in row:
            question = row["query"].strip().removeprefix("Question: ")
            choices, answer = row["choices"], int(row["gold"])
        else:
            question, choices, answer = self.parts(row)
        if None in choices:
            raise ValueError("a choice is null")
        return LogLikelihood(
            text=self.prompt.format(question),
            choices=[f" {choice}" for choice in choices],
            answer=answer,
            language="en",
            where=where,
            begins=False,
        )


class ArcEasy(MultipleChoice):
    name = "arc_easy"
    patterns = ("arc_easy.jsonl", "ARC-Easy/test*.parquet", "ARC-Easy/ARC-Easy-Test.jsonl")
    shot_patterns = ("ARC-Easy/train*.parquet", "ARC-Easy/ARC-Easy-Train.jsonl")

    def parts(self, row: Row) -> Parts:
        question, choices = row.get("question_stem") or row["question"], row.get("choices", {})
        if isinstance(question, dict):
            question, choices = question["stem"], question["choices"]
        if isinstance(choices, list):
            choices = {name: [choice[name] for choice in choices] for name in ("text", "label")}
        return question, choices["text"], choices["label"].index(row["answerKey"].strip())


class ArcChallenge(ArcEasy):
    name = "arc_challenge"
    patterns = ("arc_challenge.jsonl", "ARC-Challenge/test*.parquet", "ARC-Challenge/ARC-Challenge-Test.jsonl")
    shot_patterns = ("ARC-Challenge/train*.parquet", "ARC-Challenge/ARC-Challenge-Train.jsonl")


class OpenBookQA(ArcEasy):
    name = "openbookqa"
    patterns = ("openbook*qa.jsonl", "openbookqa/main/test*.parquet", "OpenBookQA*/Data/Main/test.jsonl")
    shot_patterns = ("openbookqa/main/train*.parquet", "OpenBookQA*/Data/Main/train.jsonl")
    prompt = "{}"


class Piqa(MultipleChoice):
    name = "piqa"
    patterns = ("piqa.jsonl", "piqa/**/validation*.parquet", "piqa/**/valid*.jsonl", "physicaliqa*/dev.jsonl")
    shot_patterns = ("piqa/**/train*.parquet", "piqa/**/train.jsonl", "physicaliqa*/train.jsonl")
    archives = ("physicaliqa*.zip",)
    chance = "50"

    def rows(self, path: Path) -> Iterator[tuple[str, Row]]:
        """The authors' labels are in a file beside the questions."""
        labels = path.with_name(f"{path.stem}-labels.lst")
        if not labels.is_file():
            yield from super().rows(path)
            return
        try:
            for (where, row), label in zip(super().rows(path), labels.read_text().split(), strict=True):
                yield where, {**row, "label": label}
        except ValueError as error:  # another number of them; not text
            raise UserError(f"not a label for each line of {path.name}: {error}", where=labels) from error

    def parts(self, row: Row) -> Parts:
        return row["goal"], (row["sol1"], row["sol2"]), int(row["label"])


class HellaSwag(MultipleChoice):
    name = "hellaswag"
    patterns = ("hellaswag.jsonl", "hellaswag/**/validation*.parquet", "hellaswag_val.jsonl")
    shot_patterns = ("hellaswag/**/train*.parquet", "hellaswag_train.jsonl")
    prompt = "{}"

    def parts(self, row: Row) -> Parts:
        question = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        return _without_marks(question), [_without_marks(ending) for ending in row["endings"]], int(row["label"])


class WinoGrande(Benchmark):
    """The same ending after each of two names: the probability of the ending counts, not that of the name."""

    name = "winogrande"
    patterns = ("winogrande.jsonl", "winogrande_xl/validation*.parquet", "winogrande*/dev.jsonl")
    shot_patterns = ("winogrande_xl/train*.parquet", "winogrande*/train_xl.jsonl")
    chance = "50"

    def request(self, row: Row, where: str) -> LogLikelihood:
        if "gold" in row:
            texts, ending, answer = row["context_options"], row["continuation"], int(row["gold"])
        else:
            before, blank, ending = row["sentence"].partition("_")
            if not blank:
                raise ValueError("sentence without _, the blank")
            texts, answer = [before + row["option1"], before + row["option2"]], int(row["answer"]) - 1
        return LogLikelihood(
            text="",
            texts=texts,
            choices=[f" {ending.strip()}"] * len(texts),
            answer=answer,
            language="en",
            where=where,
            begins=False,
        )


def _without_marks(text: str) -> str:
    """A text of WikiHow without what is left of its layout."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
