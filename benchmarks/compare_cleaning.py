"""Cleaning by penjing, datatrove and data-juicer, with the same kinds of rules: megabytes per second of one core.

    python benchmarks/compare_cleaning.py --english FILE... --chinese FILE... --datatrove PYTHON --data-juicer PYTHON

PYTHON: an interpreter of an environment of its own, as their requirements exclude ours:
`pip install "datatrove[io,processing]" spacy jieba` and `pip install py-data-juicer aiohttp ftfy`. Without one, penjing
is measured alone.

Each reads JSON lines, repairs broken characters, judges repetition, words, symbols and lines, masks personal data, and
writes JSON lines, in one process, without duplicates and languages, for which the others download models. datatrove's
limits are its own for English; for Chinese they are so wide that texts pass all filters, as its own leave out nearly
all. Seconds are those of the CPU, of a process and its children, for a large and a small file: their difference has no
start-up. The faster a contestant, the more text it gets, or it would be done too soon to be timed; texts are repeated,
which no rule here notices. Contestants alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from compare.run import write
from compare.table import ResultTable, spread, with_range
from compare.trial_process import alternate

from penjing.data.formats import read_documents
from penjing.plan.hardware import environment

RULES = ("mojibake", "unicode", "lines", "length", "symbols", "repetition", "personal_data")
TIMES = {"penjing": 40, "data-juicer": 5, "datatrove": 1}  # as much text as --megabytes
MAX_CHARS = {"english": 4000, "chinese": 1300}  # of a document: about 4 kB

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.formatters import FTFYFormatter, PIIFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.typeshelper import Languages
language, source, out = sys.argv[1:]
repetition, quality, web = {"language": Languages.english}, {"language": Languages.english}, {}
if language == "chinese":
    repetition = {
        "language": Languages.mandarin_chinese, "dup_line_frac": 1, "dup_para_frac": 1, "dup_line_char_frac": 1,
        "dup_para_char_frac": 1, "top_n_grams": ((2, 1), (3, 1), (4, 1)),
        "dup_n_grams": ((5, 1), (6, 1), (7, 1), (8, 1), (9, 1), (10, 1)),
    }
    quality = {
        "language": Languages.mandarin_chinese, "min_avg_word_length": 0, "max_avg_word_length": 9,
        "max_non_alpha_words_ratio": 0, "min_stop_words": 0,
    }
    web = {"line_punct_thr": 0, "new_line_ratio": 9, "char_duplicates_ratio": 1, "short_line_thr": 9}
steps = [
    JsonlReader(source, glob_pattern="*.jsonl", compression=None), FTFYFormatter(),
    GopherRepetitionFilter(**repetition), GopherQualityFilter(**quality), FineWebQualityFilter(**web),
    PIIFormatter(), JsonlWriter(out, compression=None),
]
LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=out + "/log", skip_completed=False).run()
"""
DATA_JUICER = """
project_name: comparison
dataset_path: {source}
export_path: {out}/kept.jsonl
np: 1
use_cache: false
process:
  - fix_unicode_mapper:
  - whitespace_normalization_mapper:
  - clean_email_mapper:
  - clean_ip_mapper:
  - text_length_filter: {{min_len: 50, max_len: 100000}}
  - alphanumeric_filter: {{tokenization: false}}
  - special_characters_filter:
  - average_line_length_filter:
  - maximum_line_length_filter: {{max_len: 100000}}
  - character_repetition_filter: {{rep_len: 10}}
  - word_repetition_filter: {{lang: {language}, tokenization: false, rep_len: 10}}
"""


def documents(files: list[Path], language: str) -> list[str]:
    """The texts of the files, cut to about 4 kB."""
    size = MAX_CHARS[language]
    texts = (document.text for document in read_documents(files))
    return [text[start : start + size] for text in texts for start in range(0, len(text), size)]


def command(name: str, language: str, source: Path, out: Path, asked: argparse.Namespace) -> list[str]:
    """source: a folder with one file of JSON lines. out: a new folder."""
    if name == "penjing":
        pipeline = out / "rules.toml"
        pipeline.write_text("\n".join(f"[rules.{rule}]" for rule in RULES))
        words = ["data", "clean", str(source), "--out", str(out / "kept"), "--pipeline", str(pipeline)]
        return [sys.executable, "-m", "penjing", *words, "--workers", "1"]
    if name == "datatrove":
        (out / "job.py").write_text(DATATROVE)
        return [asked.datatrove, str(out / "job.py"), language, str(source), str(out / "kept")]
    short = {"english": "en", "chinese": "zh"}[language]
    (out / "job.yaml").write_text(DATA_JUICER.format(source=source / "text.jsonl", out=out / "kept", language=short))
    return [str(Path(asked.data_juicer).parent / "dj-process"), "--config", str(out / "job.yaml")]


def cpu_seconds(words: list[str]) -> float:
    """Of the process and of all its descendants. Raises CalledProcessError."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, printed.decode(errors="replace")[-2000:])
    return usage.ru_utime + usage.ru_stime


def kept(out: Path) -> int:
    """Documents in the files that a contestant wrote."""
    files = [path for path in (out / "kept").rglob("*.jsonl") if not {"log", "_cleaning"} & set(path.parts)]
    return sum(path.read_bytes().count(b"\n") for path in files if "stats" not in path.name)


def trial(name: str, language: str, texts: list[str], asked: argparse.Namespace) -> dict[str, Any]:
    seconds, sizes, left = [], [], 0
    for part in (texts, texts[: len(texts) // 10]):
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "source", Path(folder) / "out"
            source.mkdir()
            out.mkdir()
            lines = [
                json.dumps({"text": text, "id": str(number)}, ensure_ascii=False) for number, text in enumerate(part)
            ]
            (source / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            seconds.append(cpu_seconds(command(name, language, source, out, asked)))
            sizes.append(sum(len(text.encode()) for text in part))
            left = left or kept(out)
    rate = (sizes[0] - sizes[1]) / (seconds[0] - seconds[1]) / 1e6
    return {"cpu_seconds": seconds, "bytes": sizes, "kept_share": left / len(texts), "megabytes_per_cpu_second": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for language in MAX_CHARS:
        parser.add_argument(f"--{language}", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--datatrove", metavar="PYTHON")
    parser.add_argument("--data-juicer", metavar="PYTHON")
    parser.add_argument("--megabytes", type=float, default=1, help="of datatrove's large file (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="RECORD")
    asked = parser.parse_args()
    contestants = ["penjing", *["datatrove"] * bool(asked.datatrove), *["data-juicer"] * bool(asked.data_juicer)]
    result: dict[str, Any] = {**environment(torch.device("cpu"), torch.float32), "rules": RULES, "trials": {}}
    rows = []
    for language in MAX_CHARS:
        if not (files := getattr(asked, language)):
            continue
        texts = documents(files, language)
        share = asked.megabytes * 1e6 / sum(len(text.encode()) for text in texts)
        given = {name: list(islice(cycle(texts), int(len(texts) * times * share))) for name, times in TIMES.items()}
        trials: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
        result["trials"][language] = trials
        for number in range(asked.trials):
            for name in alternate(contestants, number):
                trials[name].append(trial(name, language, given[name], asked))
                last = trials[name][-1]
                print(f"{language} {name}: {last['megabytes_per_cpu_second']:.1f} MB/s, kept {last['kept_share']:.0%}")
        for name, each in trials.items():
            rate = spread([one["megabytes_per_cpu_second"] for one in each])
            rows.append(
                [language, name, with_range(rate, lambda value: f"{value:.1f}"), f"{each[0]['kept_share']:.0%}"]
            )
        if asked.out:
            write(result, asked.out, ["python", "benchmarks/compare_cleaning.py", *sys.argv[1:]])
    print("\n" + ResultTable(["language", "program", "MB per CPU second", "documents kept"], rows).markdown())


if __name__ == "__main__":
    main()
