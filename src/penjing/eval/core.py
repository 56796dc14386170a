"""CORE (DCLM, arXiv:2406.11794, appendix G): the mean of 22 tasks, each centred: (accuracy - chance) / (1 - chance).

Prompts and solved examples are those of nanochat's evaluation: rows are shuffled by Random(1337), and row i is shown
after examples drawn by Random(1234 + i). Choices are compared by log p per token of what differs between them; a
continuation is right if each of its tokens is the most likely one. DCLM changed three chance values in 2025 (v2).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from penjing.base.errors import UserError
from penjing.eval.benchmark import Benchmark, Row, row_errors
from penjing.eval.task import LogLikelihood, Result

ANSWER = "\nAnswer: "


class CoreTask(NamedTuple):
    """chance, chance_v2: in %; v2 is as v1 if not given. delimiter: between question and answer."""

    file: str
    shots: int
    chance: float
    chance_v2: float | None = None
    delimiter: str = " "


CORE = {
    "hellaswag_zeroshot": CoreTask("hellaswag", 0, 25),
    "jeopardy": CoreTask("jeopardy_all", 10, 0, delimiter=ANSWER),
    "bigbench_qa_wikidata": CoreTask("bigbench_qa_wikidata", 10, 0),
    "arc_easy": CoreTask("arc_easy", 10, 25, delimiter=ANSWER),
    "arc_challenge": CoreTask("arc_challenge", 10, 25, delimiter=ANSWER),
    "copa": CoreTask("copa", 0, 50),
    "commonsense_qa": CoreTask("commonsense_qa", 10, 20, 40.3),
    "piqa": CoreTask("piqa", 10, 50, delimiter=ANSWER),
    "openbook_qa": CoreTask("openbook_qa", 0, 25),
    "lambada_openai": CoreTask("lambada_openai", 0, 0),
    "hellaswag": CoreTask("hellaswag", 10, 25),
    "winograd": CoreTask("winograd_wsc", 0, 50),
    "winogrande": CoreTask("winogrande", 0, 50),
    "bigbench_dyck_languages": CoreTask("bigbench_dyck_languages", 10, 0),
    "agi_eval_lsat_ar": CoreTask("agi_eval_lsat_ar", 3, 20, 25),
    "bigbench_cs_algorithms": CoreTask("bigbench_cs_algorithms", 10, 0),
    "bigbench_operators": CoreTask("bigbench_operators", 10, 0),
    "bigbench_repeat_copy_logic": CoreTask("bigbench_repeat_copy_logic", 10, 0),
    "squad": CoreTask("squad", 10, 0),
    "coqa": CoreTask("coqa", 0, 0),
    "boolq": CoreTask("boolq", 10, 62, delimiter=ANSWER),
    "bigbench_language_identification": CoreTask("bigbench_language_identification", 10, 9.1, 25),
}


class Core(Benchmark):
    name = "core"
    patterns = tuple(f"{file}.jsonl" for file in dict.fromkeys(task.file for task in CORE.values()))
    metric = "acc_token"
    limit_by = "group"
    shots = 10  # at most; see CORE

    def __init__(self, data: Path | None = None, *, shots: int | None = None) -> None:
        super().__init__(data, shots=shots)
        found = ((name, self.find([f"{task.file}.jsonl"])) for name, task in CORE.items())
        self.files_of = {name: paths[0] for name, paths in found if paths}

    def requests(self) -> Iterator[LogLikelihood]:
        for name, path in self.files_of.items():
            rows, shots = list(self.rows(path)), min(CORE[name].shots, self.shots)
            if len(rows) <= shots:
                raise UserError("too few examples", where=path, got=len(rows), wanted=shots + 1)
            Random(1337).shuffle(rows)
            for index, (where, _) in enumerate(rows):
                with row_errors(name, where):
                    request = self._request(name, index, rows, shots)
                yield request

    def _request(self, name: str, index: int, rows: Sequence[tuple[str, Row]], shots: int) -> LogLikelihood:
        task = CORE[name]
        places = Random(1234 + index).sample(range(len(rows) - 1), shots) if shots else []
        examples = [rows[place + (place >= index)][1] for place in places]
        before = "".join(_whole(row, task.delimiter) + "\n\n" for row in examples)
        where, row = rows[index]
        if "context_options" in row:
            texts = [before + option + task.delimiter for option in row["context_options"]]
            choices, answer = [row["continuation"]] * len(texts), int(row["gold"])
        elif "choices" in row:
            texts, choices, answer = [], row["choices"], int(row["gold"])
        else:
            texts, choices, answer = [], [row["continuation"]], 0
        text = before + _question(row) + task.delimiter
        if len(choices) == 1:  # the space before a word belongs to it
            text, choices = text.rstrip(), [text[len(text.rstrip()) :] + choices[0]]
        return LogLikelihood(
            text="" if texts else text,
            texts=texts,
            choices=choices,
            answer=answer,
            scored="choice" if len(choices) == 1 else "differing",
            group=name,
            language="en",
            where=where,
        )

    def score(self, request: LogLikelihood, result: Result) -> float:
        return result.greedy[0] if len(request.choices) == 1 else super().score(request, result)

    def figures(self, graded: Sequence[Any]) -> dict[str, float]:
        """CORE with both tables of chance, over the tasks that there are."""
        scores: dict[str, list[float]] = defaultdict(list)
        for one in graded:
            scores[one.request.group].append(one.score)
        part = "" if len(scores) == len(CORE) else f"_of_{len(scores)}_tasks"
        return {
            f"{version}{part}": fmean(_centred(name, version, fmean(own)) for name, own in scores.items())
            for version in ("v1", "v2")
        }

    def notes(self) -> list[str]:
        missing = [name for name in CORE if name not in self.files_of]
        found = f"{len(self.files_of)} of {len(CORE)} tasks found: a mean over a part, not comparable with CORE"
        return [f"{found}; missing: {', '.join(missing)}"] if missing else []


def _centred(name: str, version: str, accuracy: float) -> float:
    task = CORE[name]
    chance = (task.chance if version == "v1" or task.chance_v2 is None else task.chance_v2) / 100
    return (accuracy - chance) / (1 - chance)


def _question(row: Row) -> str:
    if "context_options" in row:
        return str(row["context_options"][int(row["gold"])])
    return str(row["query"] if "choices" in row else row["context"].strip())


def _whole(row: Row, delimiter: str) -> str:
    answer = row["choices"][int(row["gold"])] if "choices" in row else row["continuation"]
    return f"{_question(row)}{delimiter}{answer}"
