"""The same tasks by penjing and by lm-evaluation-harness, on the same model: scores and CPU seconds.

    python benchmarks/lm_eval_harness.py RUN --data DIR --lm-eval PYTHON [--through hf,hf1,server] [--out RECORD]

PYTHON: an interpreter that has lm-eval with its extra `hf`, and for the server `api`. DIR: the files in llm-foundry's
form, `blimp*.jsonl` and `cmmlu/`. lm-evaluation-harness reads them by tasks that this file writes, with the prompts of
its own. Through `hf` it loads the model that `penjing export hf` writes, in batches of 64, through `hf1` in its usual
batches of one request; through `server` it asks `penjing serve`.

Seconds are those of the CPU, of a process and its children, less those of a run with 16 requests, which are the start.
"""

from __future__ import annotations

import argparse
import csv
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from compare.run import write
from compare.table import ResultTable
from compare_cleaning import cpu_seconds

from penjing.eval.exam_subjects import CMMLU
from penjing.plan.hardware import environment

CHOICES = "output_type: multiple_choice\ndoc_to_target: gold\ndoc_to_choice: choices\n"
QUESTION = '"{{query.strip()}}\\nAnswer:"'
PAIR = 'output_type: multiple_choice\ndoc_to_text: ""\ndoc_to_target: 0\ndoc_to_choice: "{{[good, bad]}}"\n'
LETTERS = (
    "output_type: multiple_choice\n"
    'doc_to_text: "{{Question.strip()}}\\nA. {{A}}\\nB. {{B}}\\nC. {{C}}\\nD. {{D}}\\n答案："\n'
    "doc_to_choice: [A, B, C, D]\ndoc_to_target: \"{{['A', 'B', 'C', 'D'].index(Answer)}}\"\n"
)
WORD = (
    'output_type: loglikelihood\ndoc_to_text: "{{context}}"\ndoc_to_target: "{{\' \' + continuation}}"\n'
    "metric_list: [{metric: acc, aggregation: mean}, {metric: perplexity, aggregation: perplexity}]\n"
)
TASKS = {
    "blimp": PAIR,
    "arc_easy": f"doc_to_text: {QUESTION}\n{CHOICES}",
    "arc_challenge": f"doc_to_text: {QUESTION}\n{CHOICES}",
    "piqa": f"doc_to_text: {QUESTION}\n{CHOICES}",
    "openbookqa": f"doc_to_text: query\n{CHOICES}",
    "lambada": WORD,
    "cmmlu": LETTERS,
}
FILES = {"blimp": "blimp*.jsonl", "openbookqa": "openbook_qa.jsonl", "lambada": "lambada_openai.jsonl"}
NORMS = {"acc": "acc", "acc_norm": "acc_char", "acc_bytes": "acc_byte"}
SMALL = 16
BATCHES = {"hf": "64", "hf1": "1"}  # requests


def yaml(name: str, file: Path, body: str, more: str = "") -> str:
    metrics = "" if "metric_list" in body else f"metric_list: [{', '.join(f'{{metric: {norm}}}' for norm in NORMS)}]\n"
    return (
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
        f"{body}{metrics}{more}"
    )


def write_tasks(name: str, source: Path, folder: Path, limit: int) -> list[str]:
    """lm-evaluation-harness's tasks over the files in `source`; their names. limit: rows of each file; 0: all."""
    folder.mkdir(parents=True)
    names = []
    files = sorted((source / "cmmlu/test").glob("*.csv")) if name == "cmmlu" else [next(source.glob(file_of(name)))]
    for file in files[: 1 if limit else None]:
        task, more = f"local_{name}", ""
        if name == "cmmlu":
            task = f"local_cmmlu_{file.stem}"
            more = f'description: "以下是关于{CMMLU[file.stem]}的单项选择题，请直接给出正确答案的选项。\\n\\n"\n'
            rows = list(csv.DictReader(file.open(encoding="utf-8")))
        else:
            rows = [json.loads(line) for line in file.open(encoding="utf-8")]
        local = folder / f"{task}.jsonl"
        lines = [json.dumps(row, ensure_ascii=False) for row in rows[: limit or None]]
        local.write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / f"{task}.yaml").write_text(yaml(task, local, TASKS[name], more), encoding="utf-8")
        names.append(task)
    return names


def file_of(name: str) -> str:
    return FILES.get(name, f"{name}.jsonl")


def penjing(run: Path, name: str, data: Path, limit: int) -> tuple[dict[str, Any], float]:
    words = [sys.executable, "-m", "penjing", "eval", str(run), "--tasks", name, "--data", str(data), "--json"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scores.json"
        shell = ["sh", "-c", '"$@" > "$0"', str(out), *words, "--limit", str(limit), "--dtype", "float32"]
        seconds = cpu_seconds(shell)
        return json.loads(out.read_text())["runs"][0]["tasks"][0], seconds


def harness(python: str, model: list[str], name: str, data: Path, limit: int) -> tuple[dict[str, Any], float]:
    with tempfile.TemporaryDirectory() as folder:
        names = write_tasks(name, data, Path(folder) / "tasks", limit)
        words = [
            python,
            "-m",
            "lm_eval",
            *model,
            "--include_path",
            str(Path(folder) / "tasks"),
            "--tasks",
            ",".join(names),
        ]
        seconds = cpu_seconds([*words, "--output_path", str(Path(folder) / "out"), "--device", "cpu"])
        [found] = (Path(folder) / "out").rglob("results_*.json")
        saved = json.loads(found.read_text())
    counts = [saved["n-samples"][task]["effective"] for task in names]
    scores = {}
    for norm, own in {**NORMS, "perplexity": "perplexity"}.items():
        values = [saved["results"][task].get(f"{norm},none") for task in names]
        if all(value is not None for value in values):
            scores[own] = sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
    return {"asked": sum(counts), **scores}, seconds


@contextmanager
def served(run: Path, context: int) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "penjing", "serve", str(run), "--port", str(port), "--dtype", "float32"]
    words += ["--context", str(context)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(240):
            try:
                with urllib.request.urlopen(f"{url}/models", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--lm-eval", required=True, metavar="PYTHON")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--through", default="hf", help="hf, hf1, server, or several (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="RECORD")
    asked = parser.parse_args()
    record: dict[str, Any] = {**environment(torch.device("cpu"), torch.float32), "tasks": {}}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "hf"
        subprocess.run([sys.executable, "-m", "penjing", "export", "hf", str(asked.run), str(exported)], check=True)
        context = json.loads((exported / "config.json").read_text())["max_position_embeddings"]
        start = {"penjing": penjing(asked.run, "arc_easy", asked.data, SMALL)[1]}
        loads = ["--model", "hf", "--model_args", f"pretrained={exported},dtype=float32", "--batch_size"]
        start["hf"] = harness(asked.lm_eval, [*loads, "64"], "arc_easy", asked.data, SMALL)[1]
        record["start_cpu_seconds"] = start
        for name in asked.tasks.split(","):
            own, seconds = penjing(asked.run, name, asked.data, 0)
            one = {"penjing": {**{key: own.get(key) for key in ("asked", "ties")}, **_own_scores(own)}}
            one["penjing"]["cpu_seconds"] = seconds - start["penjing"]
            for way in asked.through.split(","):
                if way in BATCHES:
                    other, seconds = harness(asked.lm_eval, [*loads, BATCHES[way]], name, asked.data, 0)
                    other["cpu_seconds"] = seconds - start["hf"]
                else:
                    with served(asked.run, context) as url:
                        arguments = f"model={asked.run.name},base_url={url}/completions,num_concurrent=8"
                        words = [f"{arguments},tokenizer={exported},max_length={context}"]
                        words = ["--model", "local-completions", "--model_args", *words]
                        other, _ = harness(asked.lm_eval, words, name, asked.data, 0)
                one[f"lm-eval, {way}"] = other
            record["tasks"][name] = one
            for program, scores in one.items():
                cells = [f"{100 * scores[key]:.2f}" if key in scores else "" for key in NORMS.values()]
                seconds_shown = f"{scores['cpu_seconds']:.1f}" if "cpu_seconds" in scores else ""
                rows.append([name, program, str(scores["asked"]), *cells, seconds_shown])
                print(*rows[-1], sep="\t", flush=True)
            if asked.out:
                write(record, asked.out, ["python", "benchmarks/lm_eval_harness.py", *sys.argv[1:]])
    headings = ["task", "program", "asked", *NORMS.values(), "CPU seconds"]
    print("\n" + ResultTable(headings, rows).markdown())


def _own_scores(row: dict[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in NORMS.values() if name in row} or {"acc": row["score"], **row["figures"]}


if __name__ == "__main__":
    main()
