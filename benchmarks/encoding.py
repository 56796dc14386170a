"""How fast texts become ids: by gigatoken as a run uses it, and by tokenizers. docs/data.md quotes the record.

Run: python benchmarks/encoding.py TOKENIZER english=FILE chinese=FILE --out results/encoding_DATE.json

Each trial is a process of its own, which has seen none of the text. Both encoders take turns. MB of UTF-8 per CPU
second of all threads, imports and the check of samples included; of the rounds the median and the range.
Every id is compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from compare.table import spread
from compare.trial_process import alternate, run_json

from penjing.base.files import sha256_text, write_json
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.tokenizer import bulk
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.plan.hardware import environment

ENCODERS = ("gigatoken", "tokenizers")
BATCH = 512  # texts, as in training


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("texts", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--megabytes", type=float, default=8, help="of each text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--trial", choices=ENCODERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser.parse_args(words)


def trial(asked: argparse.Namespace) -> dict[str, Any]:
    """Encode one text by one encoder, in this process."""
    left, texts = asked.megabytes * 1e6, list[str]()
    for text in Corpus(DataSettings(train=(asked.texts[0].partition("=")[2],), max_bad_fraction=1)).texts():
        texts.append(text)
        left -= len(text.encode())
        if left < 0:
            break
    if asked.trial == "tokenizers":
        bulk.find_spec = lambda name: None
    tokenizer = Tokenizer.load(asked.tokenizer)
    began, wall = time.process_time(), time.perf_counter()
    encoder = bulk.BulkEncoder(tokenizer)
    ids = [row for start in range(0, len(texts), BATCH) for row in encoder.encode(texts[start : start + BATCH])]
    seconds, wall = time.process_time() - began, time.perf_counter() - wall
    num_bytes = sum(len(text.encode()) for text in texts)
    ids_hash = sha256_text(json.dumps([row.tolist() for row in ids]))
    return {"mb_per_cpu_second": num_bytes / 1e6 / seconds, "wall_seconds": wall, "bytes": num_bytes, "ids": ids_hash}


def main() -> None:
    asked = parse()
    if asked.trial:
        print(json.dumps(trial(asked)))
        return
    record: dict[str, Any] = {
        **environment(torch.device("cpu"), torch.float32),
        "ids": Tokenizer.load(asked.tokenizer).size,
    }
    for named in asked.texts:
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ENCODERS}
        for number in range(asked.rounds):
            for name in alternate(ENCODERS, number):
                words = [str(asked.tokenizer), named, "--megabytes", str(asked.megabytes), "--trial", name]
                rounds[name].append(run_json([sys.executable, "-W", "ignore", __file__, *words], where=name))
        results = [result for part in rounds.values() for result in part]
        speeds = {name: spread([result["mb_per_cpu_second"] for result in part]) for name, part in rounds.items()}
        record[named.partition("=")[0]] = {
            "bytes": results[0]["bytes"],
            "ids_equal": len({result["ids"] for result in results}) == 1,
            "mb_per_cpu_second": speeds,
            "ratio": speeds["gigatoken"]["median"] / speeds["tokenizers"]["median"],
        }
        print(named, json.dumps(record[named.partition("=")[0]]), flush=True)
    if asked.out:
        write_json(asked.out, record)


if __name__ == "__main__":
    main()
