"""What `penjing data clean` costs: MB per CPU second of its parts, and time and memory as the corpus grows.

Run: python benchmarks/data_clean.py --english FILE... --chinese FILE... --out results/data_clean_DATE.json

Each corpus is made of random sentences of the files, in documents of about 2 kB, of which one in ten is a near copy of
an earlier one. CPU seconds count, so other programs disturb little. Of the parts the same corpus is cleaned with the
named rules, by one process; of the curve with all default rules, by as many as `--workers`, and what is left is then
encoded, as the data of a run of one step. Memory is the sum over all processes (Pss), read five times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from compare.run import write

from penjing.data.clean.pipeline import Pipeline
from penjing.data.formats import read_documents
from penjing.plan.hardware import environment

COMPARING = ["exact_duplicates", "near_duplicates"]
DOCUMENT_BYTES = 2000


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--english", type=Path, nargs="+", default=[], help="files whose sentences are used")
    parser.add_argument("--chinese", type=Path, nargs="+", default=[])
    parser.add_argument(
        "--parts-mb", type=float, default=50, help="corpus of the parts; 0: none (default: %(default)s)"
    )
    parser.add_argument("--curve-mb", type=float, nargs="*", default=[100, 300], help="(default: %(default)s)")
    parser.add_argument("--tokenizer", type=Path, required=True, help="that encodes what the curve's cleaning left")
    parser.add_argument("--workers", type=int, default=2, help="processes of the curve (default: %(default)s)")
    parser.add_argument("--memory-gb", type=float, default=2.0, help="(default: %(default)s)")
    parser.add_argument("--work", type=Path, default=None, help="folder for corpora; else a temporary one")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser.parse_args(words)


def sentences(files: list[Path]) -> list[str]:
    text = "\n".join(document.text for document in read_documents(files))
    return [sentence for sentence in re.split(r"(?<=[.!?。！？])\s*", text) if sentence]


def write_corpus(path: Path, texts: list[str], joined: str, num_bytes: float, seed: int = 1) -> None:
    rng, recent = random.Random(seed), list[list[str]]()
    with open(path, "w", encoding="utf-8") as stream:
        while stream.tell() < num_bytes:
            if recent and rng.random() < 0.1:
                chosen = list(rng.choice(recent))
                chosen[rng.randrange(len(chosen))] = rng.choice(texts)
            else:
                chosen, size = [], 0
                while size < DOCUMENT_BYTES:
                    chosen.append(rng.choice(texts))
                    size += len(chosen[-1].encode())
                recent = [*recent[-1000:], chosen]
            stream.write(json.dumps({"text": joined.join(chosen)}, ensure_ascii=False) + "\n")


def tree_bytes(root: int) -> int:
    """Pss of a process and its children, which counts shared pages once."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if root in (parent, int(folder.name)):
                line = next(line for line in (folder / "smaps_rollup").open() if line.startswith("Pss:"))
                total += int(line.split()[1]) * 1024
        except (OSError, StopIteration, ValueError):
            continue  # it has just ended
    return total


def timed(words: list[str]) -> dict[str, Any]:
    """Seconds and memory of a command of penjing."""
    command = [sys.executable, "-m", "penjing", *words]
    started, before = time.monotonic(), os.times()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_bytes(process.pid))
        time.sleep(0.2)
    after = os.times()
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return {
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(time.monotonic() - started, 1),
        "peak_memory_bytes": peak,
    }


def clean(corpus: Path, rules: list[str], out: Path, workers: int, memory_gb: float) -> dict[str, Any]:
    pipeline = out.with_name("rules.toml")
    pipeline.write_text("".join(f"[rules.{name}]\n" for name in rules))
    words = ["data", "clean", str(corpus), "--out", str(out), "--format", "documents", "--pipeline", str(pipeline)]
    spent = timed([*words, "--workers", str(workers), "--memory-gb", str(memory_gb)])
    counts = json.loads((out / "_cleaning" / "counts.json").read_text())
    size = corpus.stat().st_size / 1e6
    rate = {"megabytes": round(size, 1), "mb_per_cpu_second": round(size / spent["cpu_seconds"], 2)}
    return {**rate, **spent, "records": counts["records"], "kept": counts["kept"]}


def encode(cleaned: Path, tokenizer: Path, out: Path) -> dict[str, Any]:
    words = ["train", "tiny", f"data.train={cleaned}", f"tokenizer.path={tokenizer}", f"out={out}", "max_steps=1"]
    spent = timed([*words, "data.packing=concat", "eval.every=0", "eval.sequences=8", "sample.every=0"])
    size = sum(path.stat().st_size for path in cleaned.glob("*.jsonl")) / 1e6
    return {"megabytes": round(size, 1), "mb_per_cpu_second": round(size / spent["cpu_seconds"], 2), **spent}


def main(words: list[str] | None = None) -> None:
    asked = parse(words)
    default = list(Pipeline.load(["default"]).rules)
    own = [name for name in default if name not in COMPARING]
    record: dict[str, Any] = {
        **environment(torch.device("cpu"), torch.float32),
        "rules": default,
        "workers": asked.workers,
        "parts": [],
        "curve": [],
    }
    for language, files, joined in (("English", asked.english, " "), ("Chinese", asked.chinese, "")):
        texts = sentences(files) if files else []
        for megabytes in [asked.parts_mb, *asked.curve_mb] if texts else ():
            is_part = megabytes == asked.parts_mb
            jobs = {"all": default}
            if is_part:
                jobs = {"reading and writing": COMPARING[:1], "default rules": own, "near duplicates": COMPARING[1:]}
            if not megabytes:
                continue
            with tempfile.TemporaryDirectory(dir=asked.work) as name:
                corpus = Path(name) / "corpus.jsonl"
                write_corpus(corpus, texts, joined, megabytes * 1e6)
                for number, (what, rules) in enumerate(jobs.items()):
                    out = Path(name) / f"{number}" / "clean"
                    out.parent.mkdir()
                    found = {"language": language, "what": what}
                    found |= clean(corpus, rules, out, 1 if is_part else asked.workers, asked.memory_gb)
                    if not is_part:
                        corpus.unlink()
                        found["encoding"] = encode(out, asked.tokenizer, Path(name) / "run")
                    shutil.rmtree(out.parent)
                    record["parts" if is_part else "curve"].append(found)
                    print(json.dumps(found), flush=True)
                    if asked.out:
                        write(record, asked.out, ["python", "benchmarks/data_clean.py", *(words or sys.argv[1:])])


if __name__ == "__main__":
    main()
