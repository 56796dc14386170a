"""Runs on sources in given shares: resumed exactly, measured by source, with only new files encoded."""

import json
import random
from collections import Counter

import pytest
import torch
from short_runs import cut_back, train, weights_of
from user_errors import raises_user_error

from penjing.data.token_shards import TokenShards
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.train.load_model import read_settings
from penjing.train.stages.next_token import make_rows

WORDS = {"a": ["the", "cat", "sat", "mat"], "b": ["red", "green", "blue", "white"], "c": ["one", "two", "three"]}
TINY = [
    "model.preset=tiny",
    "model.vocab_size=300",
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.head_dim=16",
    "model.intermediate_size=32",
    "data.seq_len=16",
    "batch.size=4",
    "data.val_fraction=0.1",
    "eval.every=0",
    "checkpoint.every=3",
    "checkpoint.keep_last=9",
    "compute.device=cpu",
    "log.every=1",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("mix"), random.Random(0)
    for name, words in WORDS.items():
        texts = [" ".join(rng.choices(words, k=rng.randint(5, 20))) for _ in range(200)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer((" ".join(words) * 30 for words in WORDS.values()), 300).save(folder / "tokenizer")
    return folder


def words(files, out, names, *more):
    listed = ",".join(str(files / f"{name}.jsonl") for name in names)
    return [*TINY, f"tokenizer.path={files / 'tokenizer'}", f"data.train={listed}", f"out={out}", *more]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_mixed_run_resumes_exactly(files, tmp_path):
    mix = ["data.weights=1,3", "data.final_weights=1,0", "data.final_fraction=0.5", "max_steps=9"]
    said = train("pretrain", *words(files, tmp_path / "whole", "ab", *mix))
    cut_back(tmp_path / "whole", tmp_path / "resumed", 3)
    train("pretrain", *words(files, tmp_path / "resumed", "ab", *mix))
    whole, resumed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())
    assert [one["name"][-7:] for one in plan["sources"]] == ["a.jsonl", "b.jsonl"]
    assert [one["share"] for one in plan["sources"]] == pytest.approx([0.625, 0.375], abs=0.06)
    assert "a.jsonl" in said and "epochs" in said


def test_a_source_has_at_most_its_epochs(files, tmp_path):
    """The plan says so, resuming is exact, and too few are an error before the run."""
    limited = ["data.weights=1,9", "data.max_epochs=0,0.1", "max_steps=9"]
    train("pretrain", *words(files, tmp_path / "whole", "ab", *limited))
    cut_back(tmp_path / "whole", tmp_path / "resumed", 3)
    train("pretrain", *words(files, tmp_path / "resumed", "ab", *limited))
    whole, resumed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    a, b = json.loads((tmp_path / "whole" / "plan.json").read_text())["sources"]
    assert 0.09 < b["epochs"] <= 0.1 and a["share"] + b["share"] == pytest.approx(1) and a["share"] > 0.3
    with raises_user_error(where="data.max_epochs", got="b.jsonl"):
        train("pretrain", *words(files, tmp_path / "few", "ab", *limited[:1], "data.max_epochs=0.1", "max_steps=90"))
    with raises_user_error(where="data.max_epochs"):
        train("pretrain", *words(files, tmp_path / "few", "ab", "data.max_epochs=1", "max_steps=9"))


def test_the_plan_tells_shares_of_tokens_where_rows_have_padding(tmp_path):
    """Rows of source a are nearly full, those of b half full."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, count in zip(files, (1, 5), strict=True):
        rows = [{"prompt": f"{number}", "response": "the cat sat " * count} for number in range(200)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer(["the cat sat 1 2 3 4 5 6 7 8 9 0"] * 30, 300).save(tmp_path / "tokenizer")
    listed = f"data.train={files[0]},{files[1]}"
    more = ["data.seq_len=64", "data.weights=1,1", "max_steps=50", f"tokenizer.path={tmp_path / 'tokenizer'}"]
    train("pretrain", *TINY, "data.format=chats", listed, f"out={tmp_path / 'run'}", *more)
    a, b = json.loads((tmp_path / "run" / "plan.json").read_text())["sources"]
    assert [a["share"], b["share"]] == pytest.approx([0.5, 0.5], abs=0.02)


def test_validation_is_by_source_and_in_total(files, tmp_path):
    train("pretrain", *words(files, tmp_path / "run", "ab", "data.weights=1,3", "max_steps=2", "eval.every=2"))
    last = metrics(tmp_path / "run")[-1]
    a, b, total = (last[f"val_bits_per_byte{name}"] for name in ("_a", "_b", ""))
    assert min(a, b) < total < max(a, b) and abs(total - b) < abs(total - a)


def test_bits_per_byte_of_sources_are_all_bits_over_all_bytes(files, tmp_path):
    """Of five rows, which no shares divide evenly, of texts whose tokens are of different lengths."""
    mix = ["data.weights=1,1", "max_steps=2", "eval.every=2", "eval.sequences=5"]
    train("pretrain", *words(files, tmp_path / "run", "ab", *mix))
    last = metrics(tmp_path / "run")[-1]
    run = read_settings(tmp_path / "run")
    shards, tokenizer = TokenShards(tmp_path / "run" / "shards" / "validation"), Tokenizer.load(files / "tokenizer")
    rows = make_rows(run, shards, tokenizer, validation=True)
    counts = Counter(rows.place(index)[0] for index in range(5))
    assert sorted(counts.values()) == [2, 3]
    sizes = [part.num_bytes / (part.num_tokens + part.num_documents) for _, _, part in shards.sources()]
    assert abs(sizes[0] / sizes[1] - 1) > 0.05
    num_bytes = [counts[number] * run.data.seq_len * sizes[number] for number in range(2)]
    bits = sum(last[f"val_bits_per_byte_{name}"] * count for name, count in zip("ab", num_bytes, strict=True))
    assert last["val_bits_per_byte"] == pytest.approx(bits / sum(num_bytes), rel=1e-6)


def test_only_a_new_file_is_encoded(files, tmp_path):
    """With the same result as if all were new."""
    short = ["max_steps=1"]
    for folder, steps in (("grown", ["a", "ca", "cab"]), ("new", ["cab"])):
        said = ""
        for names in steps:
            said = train("pretrain", *words(files, tmp_path / folder, names, *short, "checkpoint.every=1"))
            if names != steps[-1]:
                for checkpoint in (tmp_path / folder / "checkpoints").iterdir():
                    checkpoint.rename(tmp_path / f"{folder}-{names}")
        assert ("tokenizing 3 files, 2 of them from the tokens made before" in said) == (folder == "grown")
    for half in ("train", "validation"):
        for name in ("tokens.bin", "ends.npy", "bytes.npy", "shards.json"):
            grown, new = (tmp_path / folder / "shards" / half / name for folder in ("grown", "new"))
            assert grown.read_bytes() == new.read_bytes(), name


def test_nothing_held_out_and_files_of_ones_own(files, tmp_path):
    said = train(
        "pretrain", *words(files, tmp_path / "none", "a", "max_steps=2", "data.validation=none", "eval.every=1")
    )
    assert "no held-out loss" in said and not any("val_loss" in line for line in metrics(tmp_path / "none"))
    assert "val_loss" not in json.loads((tmp_path / "none" / "outcome.json").read_text())
    own = f"data.validation={files / 'b.jsonl'},{files / 'c.jsonl'}"
    train("pretrain", *words(files, tmp_path / "own", "a", "max_steps=2", "eval.every=2", own))
    last = metrics(tmp_path / "own")[-1]
    assert {"val_loss", "val_bits_per_byte", "val_bits_per_byte_b", "val_bits_per_byte_c"} <= last.keys()
    # What is learned does not depend on the held-out files.
    none, other = weights_of(tmp_path / "none"), weights_of(tmp_path / "own")
    assert all(torch.equal(none[name], other[name]) for name in none)


def test_conversations_are_mixed_and_too_long_ones_named(files, tmp_path):
    for name, length in (("x", 3), ("y", 4), ("z", 200)):
        rows = [
            {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "cat " * length}]}
            for n in range(40)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [
        word for word in words(files, tmp_path / "run", "a") if not word.startswith(("data.train", "data.seq_len"))
    ]
    mixed = [f"data.train={tmp_path / 'x.jsonl'},{tmp_path / 'y.jsonl'}", "data.weights=1,4", "data.seq_len=64"]
    train("sft", *chats, *mixed, "max_steps=5")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [one["share"] for one in plan["sources"]] == pytest.approx([0.2, 0.8], abs=0.1)
    with raises_user_error(next_step="data.seq_len"):
        train("sft", *chats, f"data.train={tmp_path / 'z.jsonl'}", "data.seq_len=64", f"out={tmp_path / 'long'}")
