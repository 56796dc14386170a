"""Public benchmarks read from files as they are published, and their scores."""

import json
import math
import random
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from rich.console import Console
from small_models import small_model
from user_errors import raises_user_error

from penjing.data.tokenizer.train import train_tokenizer
from penjing.eval.core import CORE, Core
from penjing.eval.exams import CEval, Cmmlu, Mmlu
from penjing.eval.grade_school_math import Gsm8k
from penjing.eval.lambada import Lambada
from penjing.eval.minimal_pairs import Blimp, ZhoBlimp
from penjing.eval.multiple_choice import ArcChallenge, ArcEasy, HellaSwag, OpenBookQA, Piqa, WinoGrande
from penjing.eval.scorer import Graded, grade
from penjing.eval.scores import paired_change, summary
from penjing.eval.suite import Suite
from penjing.eval.task import Continuation, Result, Task
from penjing.infer.requests import Completion
from penjing.workflows.evaluate import EvalOptions, evaluate

TEXTS = ["A dog barks and two dogs bark at the old cat.", "两只狗在叫，一只猫坐着。"] * 20
PAIRS = [
    ("agreement", "syntax", "A dog barks.", "A dog bark."),
    ("agreement", "syntax", "Two dogs bark at the cat.", "Two dogs barks at the cat."),
    ("order", "semantics", "The old cat sat.", "Old the cat sat."),
]


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return small_model(vocab_size=tokenizer.size, max_position_embeddings=256, sharpen=3)


# --- minimal pairs ----------------------------------------------------------------------------------------------------


def blimp_rows(kind):
    return [
        {"sentence_good": good, "sentence_bad": bad, "UID": uid, "field": field, "pairID": "0"}
        for uid, field, good, bad in PAIRS
        if uid == kind
    ]


def test_blimp_in_each_published_form(tmp_path):
    """One file, a file for each paradigm as in the authors' repository, and the hub's tables."""
    rows = [{"uid": uid, "field": field, "good": good, "bad": bad} for uid, field, good, bad in PAIRS]
    write_jsonl(tmp_path / "one/blimp_some.jsonl", rows)
    for kind in ("agreement", "order"):
        write_jsonl(tmp_path / f"git/blimp/data/{kind}.jsonl", blimp_rows(kind))
        write_parquet(tmp_path / f"hub/blimp/{kind}/train-00000-of-00001.parquet", blimp_rows(kind))
    for folder in ("one", "git", "git/blimp", "hub"):
        found = [(one.kind, one.group, *one.choices, one.answer) for one in Blimp(tmp_path / folder).requests()]
        assert found == [(uid, field, f" {good}", f" {bad}", 0) for uid, field, good, bad in PAIRS], folder


def test_a_paradigm_without_a_name_has_that_of_its_file(tmp_path):
    row = {"sentence_good": "两只狗在叫。", "sentence_bad": "两狗只在叫。"}
    write_jsonl(tmp_path / "zhoblimp/classifier.jsonl", [row])
    write_parquet(tmp_path / "hub/zhoblimp/classifier/train-0.parquet", [row])
    hidden = tmp_path / "zhoblimp/.cache/huggingface/download/classifier.jsonl.lock"  # beside what `hf download` writes
    hidden.parent.mkdir(parents=True)
    for beside in (hidden, tmp_path / "zhoblimp/._classifier.jsonl"):  # and beside files of a Mac
        beside.touch()
    for folder in (tmp_path, tmp_path / "zhoblimp", tmp_path / "hub"):
        [one] = ZhoBlimp(folder).requests()
        assert (one.kind, one.choices) == ("classifier", (row["sentence_good"], row["sentence_bad"]))


def test_the_files_that_were_looked_for_are_named(tmp_path):
    with raises_user_error(where=tmp_path, wanted="blimp/**/*.parquet"):
        Suite(names=["blimp"], data=tmp_path)
    with raises_user_error(where=tmp_path / "gone"):
        Suite(names=["blimp"], data=tmp_path / "gone")
    (tmp_path / "file").touch()
    with raises_user_error(where=tmp_path / "file", wanted="a folder"):
        Suite(names=["blimp"], data=tmp_path / "file")
    with raises_user_error(where="task blimp", next_step="--data DIR"):
        Suite(names=["blimp"])
    write_jsonl(tmp_path / "blimp.jsonl", [{"good": "A dog barks."}])
    with raises_user_error(where=f"{tmp_path / 'blimp.jsonl'}:1"):
        list(Blimp(tmp_path).requests())


def test_all_files_are_read_before_a_model_is_asked(tmp_path):
    """Else a broken one would cost the scores of the tasks before it."""
    write_jsonl(tmp_path / "arc_easy.jsonl", [GOLD])
    write_jsonl(tmp_path / "blimp.jsonl", [{"good": "A dog barks."}])
    suite = Suite(names=["arc_easy", "blimp"], data=tmp_path)
    with raises_user_error(where="blimp.jsonl:1"):
        evaluate([tmp_path / "no run"], suite, [], Console(quiet=True), EvalOptions())


def test_a_uniform_model_scores_chance_by_tokens_and_its_own_row_by_sums(tmp_path, tokenizer):
    """By sums a uniform model prefers the sentence of fewer tokens. That score stands in the row of every model."""
    write_jsonl(tmp_path / "blimp.jsonl", [row for kind in ("agreement", "order") for row in blimp_rows(kind)])
    task = Blimp(tmp_path)
    uniform, other = (small_model(vocab_size=tokenizer.size, max_position_embeddings=64) for _ in range(2))
    with torch.no_grad():
        uniform.embed.weight.zero_()
    row = summary("blimp", task, grade(task, task.requests(), uniform, tokenizer))
    tokens = [[len(tokenizer.encode(f" {text}")) for text in pair[2:]] for pair in PAIRS]
    wanted = sum(1.0 if good < bad else 0.5 if good == bad else 0.0 for good, bad in tokens) / 3
    assert row["acc_token"] == row["chance"] == 0.5
    assert row["score"] == row["acc"] == row["uniform"] == pytest.approx(wanted)
    assert row["ties"] == pytest.approx(sum(good == bad for good, bad in tokens) / 3)
    again = summary("blimp", task, grade(task, task.requests(), other, tokenizer))
    assert again["uniform"] == row["uniform"]
    assert [(part["name"], part["asked"]) for part in row["groups"]] == [("syntax", 2), ("semantics", 1)]
    assert [(part["name"], part["asked"]) for part in row["kinds"]] == [("agreement", 2), ("order", 1)]


def test_change_between_two_models_is_paired(tmp_path, tokenizer, model):
    write_jsonl(tmp_path / "blimp.jsonl", [row for kind in ("agreement", "order") for row in blimp_rows(kind)])
    task = Blimp(tmp_path)
    graded = grade(task, task.requests(), model, tokenizer)
    assert paired_change(graded, graded) == (0.0, 0.0)


def test_limit_spreads_over_all(tmp_path):
    rows = [{"good": f"{number} dogs bark.", "bad": "x", "uid": "one"} for number in range(10)]
    write_jsonl(tmp_path / "blimp.jsonl", rows)
    asked = [one.choices[0].split()[0] for one in Suite(names=["blimp"], data=tmp_path, limit=3).requests("blimp")]
    assert asked == ["0", "3", "6"]


# --- questions with choices -------------------------------------------------------------------------------------------

ARC = {"question": "What barks?", "choices": {"text": ["a cat", "a dog"], "label": ["1", "2"]}, "answerKey": "2"}
STEM = {"stem": "What barks?", "choices": [{"text": "a cat", "label": "A"}, {"text": "a dog", "label": "B"}]}
PIQA = {"goal": "Wake a dog.", "sol1": "Sing.", "sol2": "Sleep.", "label": 0}
HELLASWAG = {
    "activity_label": "Dogs",
    "ctx_a": "A dog [title] runs.",
    "ctx_b": "the dog",
    "endings": ["barks  at us.", "[step] flies."],
    "label": "1",
}
WINOGRANDE = {"sentence": "The cat fled from the dog as _ was loud.", "option1": "cat", "option2": "dog", "answer": "2"}
GOLD = {"query": "Question: What barks?\n", "choices": ["a cat", "a dog"], "gold": 1}
ARC_WANTED = ("Question: What barks?\nAnswer:", [" a cat", " a dog"], 1)
PUBLISHED = [
    (ArcEasy, "ARC-Easy/test-00000-of-00001.parquet", ARC, ARC_WANTED),
    (ArcChallenge, "ARC-V1/ARC-Challenge/ARC-Challenge-Test.jsonl", {"question": STEM, "answerKey": "B"}, ARC_WANTED),
    (ArcEasy, "arc_easy.jsonl", GOLD, ARC_WANTED),
    (
        OpenBookQA,
        "openbookqa/main/test-0.parquet",
        {**ARC, "question_stem": "It barks:"},
        ("It barks:", [" a cat", " a dog"], 1),
    ),
    (OpenBookQA, "openbook_qa.jsonl", {**GOLD, "query": "It barks:"}, ("It barks:", [" a cat", " a dog"], 1)),
    (Piqa, "piqa/plain_text/validation-0.parquet", PIQA, ("Question: Wake a dog.\nAnswer:", [" Sing.", " Sleep."], 0)),
    (
        HellaSwag,
        "hellaswag/data/validation-0.parquet",
        HELLASWAG,
        ("Dogs: A dog. runs. The dog", [" barks at us.", "  flies."], 1),
    ),
]


@pytest.mark.parametrize(("kind", "name", "row", "wanted"), PUBLISHED)
def test_choices_in_each_published_form(tmp_path, kind, name, row, wanted):
    (write_parquet if name.endswith(".parquet") else write_jsonl)(tmp_path / name, [row])
    [one] = kind(tmp_path).requests()
    assert (one.text, list(one.choices), one.answer) == wanted


@pytest.mark.parametrize(
    ("kind", "name", "row"),
    [
        (ArcEasy, "arc_easy.jsonl", {**GOLD, "gold": -1}),
        (Piqa, "piqa/test/valid.jsonl", {**PIQA, "label": -1}),
        (WinoGrande, "winogrande.jsonl", {**WINOGRANDE, "answer": "0"}),
        (Mmlu, "mmlu/all/test-0.parquet", {"question": "?", "subject": "law", "choices": [*"abcd"], "answer": -1}),
        (Mmlu, "mmlu/all/test-0.parquet", {"question": "?", "subject": "law", "choices": [*"abcd"], "answer": ""}),
    ],
)
def test_a_row_whose_answer_is_secret_is_not_scored(tmp_path, kind, name, row):
    (write_parquet if name.endswith(".parquet") else write_jsonl)(tmp_path / name, [row])
    with raises_user_error(where=f"{Path(name).name}:1"):
        list(kind(tmp_path).requests())


@pytest.mark.parametrize(
    ("kind", "name", "row"),
    [
        (ArcEasy, "arc_easy.jsonl", {**GOLD, "choices": [None, "a dog"]}),
        (ArcEasy, "arc_easy.jsonl", {**GOLD, "query": "\ud800 barks?"}),
        (ZhoBlimp, "zhoblimp.jsonl", {"good": "狗在叫。", "bad": ""}),
        (Core, "copa.jsonl", {"query": "A dog", "choices": [1, 2], "gold": 1}),
        (Gsm8k, "gsm8k_test.jsonl", {"question": "How many?", "answer": 3}),
    ],
)
def test_a_row_without_texts_to_compare_is_named(tmp_path, kind, name, row):
    write_jsonl(tmp_path / name, [row])
    with raises_user_error(where=f"{name}:1"):
        list(kind(tmp_path, shots=0).requests())


@pytest.mark.parametrize("name", ["physicaliqa-train-dev/dev", "piqa/data/valid"])
def test_piqa_with_labels_in_a_file_beside_it(tmp_path, name):
    rows = [{name: value for name, value in PIQA.items() if name != "label"}] * 2
    path, labels = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-labels.lst"
    for part in (path, path.with_name("train.jsonl")):
        write_jsonl(part, rows)
        part.with_name(f"{part.stem}-labels.lst").write_text("1\n0\n")
    first, second = Piqa(tmp_path, shots=2).requests()
    assert (first.answer, second.answer) == (1, 0)
    assert first.text.count("Answer: Sing.") == first.text.count("Answer: Sleep.") == 1
    labels.write_text("1\n")
    with raises_user_error(where=labels.name):
        list(Piqa(tmp_path).requests())
    labels.unlink()
    with raises_user_error(where=f"{path.name}:1"):
        list(Piqa(tmp_path).requests())


def test_a_sentence_of_winogrande_without_a_blank_is_not_scored(tmp_path):
    write_jsonl(tmp_path / "winogrande_1.1/dev.jsonl", [WINOGRANDE, {**WINOGRANDE, "sentence": "A cat fled."}])
    with raises_user_error(where="dev.jsonl:2", got="blank"):
        list(WinoGrande(tmp_path).requests())


def test_winogrande_asks_for_the_ending_after_each_name(tmp_path, tokenizer, model):
    write_parquet(tmp_path / "winogrande_xl/validation-0.parquet", [WINOGRANDE])
    task = WinoGrande(tmp_path)
    [one] = task.requests()
    assert one.texts == ["The cat fled from the dog as cat", "The cat fled from the dog as dog"]
    assert (set(one.choices), one.answer) == ({" was loud."}, 1)
    row = {"context_options": one.texts, "continuation": "was loud.", "gold": 1}
    write_jsonl(tmp_path / "gold/winogrande.jsonl", [row])
    [same] = WinoGrande(tmp_path / "gold").requests()
    assert (same.texts, same.choices, same.answer) == (one.texts, one.choices, 1)
    [graded] = grade(task, [one], model, tokenizer)
    for text, logp in zip(one.texts, graded.result.logps, strict=True):
        before, ids = tokenizer.encode(text), tokenizer.encode(f"{text} was loud.")
        with torch.no_grad():
            logp_TV = model(torch.tensor([ids]))[0].double().log_softmax(-1)
        # Without a token that begins a document, as lm-evaluation-harness asks.
        wanted = sum(float(logp_TV[place - 1, ids[place]]) for place in range(len(before), len(ids)))
        assert logp == pytest.approx(wanted, abs=1e-4)


def test_solved_examples_are_others_and_always_the_same(tmp_path):
    rows = [{"query": f"Number {number}?", "choices": ["no", f"{number}"], "gold": 1} for number in range(6)]
    write_jsonl(tmp_path / "arc_easy.jsonl", rows)
    asked = [list(ArcEasy(tmp_path, shots=3).requests()) for _ in range(2)]
    assert asked[0] == asked[1]
    draw = random.Random(1234)  # lm-evaluation-harness's rule, by its seed
    for number, one in enumerate(asked[0]):
        drawn = [row for row in draw.sample(rows, 4) if row != rows[number]][:3]
        before = "".join(f"Question: {row['query']}\nAnswer: {row['choices'][1]}\n\n" for row in drawn)
        assert one.text == f"{before}Question: Number {number}?\nAnswer:"
    with raises_user_error(where="task arc_easy", got="6", wanted="7"):
        list(ArcEasy(tmp_path, shots=6).requests())


# --- exams ------------------------------------------------------------------------------------------------------------

CSV = ',Question,A,B,C,D,Answer\n0,狗怎么叫？,汪汪,喵喵,咩咩,哞哞,A\n1,"猫，\n怎么叫？",汪汪,喵喵,咩咩,哞哞,B\n'
ASKED = "狗怎么叫？\nA. 汪汪\nB. 喵喵\nC. 咩咩\nD. 哞哞\n答案："


def test_cmmlu_in_folders_and_as_an_archive(tmp_path):
    for part in ("test", "dev"):
        (tmp_path / "git/CMMLU/data" / part).mkdir(parents=True)
        (tmp_path / "git/CMMLU/data" / part / "arts.csv").write_text(CSV, encoding="utf-8")
    (tmp_path / "zip").mkdir()
    with zipfile.ZipFile(tmp_path / "zip/cmmlu_v1_0_1.zip", "w") as archive:
        archive.writestr("test/arts.csv", CSV)
        archive.writestr("dev/arts.csv", CSV)
    for folder in ("git", "zip"):
        first, _ = Cmmlu(tmp_path / folder).requests()
        assert first.text == f"以下是关于艺术学的单项选择题，请直接给出正确答案的选项。\n\n{ASKED}"
        assert (first.kind, first.answer, list(first.choices)) == ("arts", 0, [" A", " B", " C", " D"])
        _, second = Cmmlu(tmp_path / folder, shots=1).requests()
        assert second.text.count(f"\n\n{ASKED} A\n\n猫，\n怎么叫？\nA. 汪汪") == 1
        with raises_user_error(got="2 of arts", wanted="3 in its dev file"):
            list(Cmmlu(tmp_path / folder, shots=3).requests())


def test_ceval_and_mmlu_as_published(tmp_path):
    (tmp_path / "ceval-exam/val").mkdir(parents=True)
    (tmp_path / "ceval-exam/val/law_val.csv").write_text(
        "id,question,A,B,C,D,answer\n0,问？,1,2,3,4,D\n", encoding="utf-8"
    )
    [one] = CEval(tmp_path).requests()
    assert (one.kind, one.answer) == ("law", 3) and one.text.startswith("以下是中国关于法学的单项选择题，")
    (tmp_path / "data/test").mkdir(parents=True)
    (tmp_path / "data/test/high_school_biology_test.csv").write_text('"What, then?",a,b,c,d,C\n')
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(tmp_path / "data", arcname="data")
    row = {"question": "What, then?", "subject": "high_school_biology", "choices": [*"abcd"], "answer": 2}
    write_parquet(tmp_path / "hub/mmlu/all/test-0.parquet", [row])
    write_parquet(tmp_path / "hub/mmlu/high_school_biology/test-0.parquet", [row])
    [by_authors], [of_hub] = Mmlu(tmp_path).requests(), Mmlu(tmp_path / "hub").requests()
    assert replace(by_authors, where="") == replace(of_hub, where="")
    assert by_authors.text.endswith("about high school biology.\n\nWhat, then?\nA. a\nB. b\nC. c\nD. d\nAnswer:")


@pytest.mark.parametrize(
    ("text", "line"), [("Why?,a,b,c,d,A\nWhy?,a\n", 2), ("Why?,a,b,c,d,Z\n", 1), ("Gr\xfc\xdf?,a,b,c,d,A\n", 1)]
)
def test_a_broken_row_of_mmlu_is_named(tmp_path, text, line):
    (tmp_path / "mmlu/data/test").mkdir(parents=True)
    (tmp_path / "mmlu/data/test/law_test.csv").write_text(text, encoding="latin-1")
    with raises_user_error(where=f"law_test.csv:{line}"):
        list(Mmlu(tmp_path).requests())


def test_an_archive_is_unpacked_only_where_files_are_missing(tmp_path):
    (tmp_path / "cmmlu.zip").write_bytes(b"no archive")
    with raises_user_error(where="cmmlu.zip"):
        Cmmlu(tmp_path)
    (tmp_path / "cmmlu/test").mkdir(parents=True)
    (tmp_path / "cmmlu/test/arts.csv").write_text(CSV, encoding="utf-8")
    assert len(list(Cmmlu(tmp_path).requests())) == 2


def test_an_archive_that_was_cut_is_named(tmp_path):
    (tmp_path / "law_test.csv").write_text("".join(f"{random.random()}?,a,b,c,d,A\n" for _ in range(2000)))
    with tarfile.open(tmp_path / "whole.tgz", "w:gz") as archive:
        archive.add(tmp_path / "law_test.csv", arcname="data/test/law_test.csv")
    whole = (tmp_path / "whole.tgz").read_bytes()
    (tmp_path / "data.tar").write_bytes(whole[: len(whole) // 2])
    with raises_user_error(where="data.tar"):
        Mmlu(tmp_path)


# --- words and numbers ------------------------------------------------------------------------------------------------


def test_lambada_is_right_if_each_token_is_the_most_likely_one(tmp_path, tokenizer, model):
    text = "A dog barks and two dogs bark at the old"
    ids = tokenizer.encode(text)
    with torch.no_grad():
        logits_V = model(torch.tensor([ids]))[0, -1]
    words = [" cat", " dogs"]
    write_jsonl(tmp_path / "lambada_test_en.jsonl", [{"text": text + word} for word in words])
    task = Lambada(tmp_path)
    graded = grade(task, task.requests(), model, tokenizer)
    assert [one.request.choices for one in graded] == [(" cat",), (" dogs",)]
    for word, one in zip(words, graded, strict=True):
        first, *others = tokenizer.encode(text + word)[len(ids) :]
        if not others:
            assert one.score == float(int(logits_V.argmax()) == first)
    logps = [one.result.logps[0] for one in graded]
    assert summary("lambada", task, graded)["figures"]["perplexity"] == pytest.approx(math.exp(-sum(logps) / 2))
    assert graded[0].request.chance == 0 and "ties" not in summary("lambada", task, graded)


def test_lambada_as_its_authors_publish_it(tmp_path):
    (tmp_path / "lambada_test_plain_text.txt").write_text("a dog and a cat\n\ntwo dogs bark\n")
    asked = [(one.text, one.choices) for one in Lambada(tmp_path).requests()]
    assert asked == [("a dog and a", (" cat",)), ("two dogs", (" bark",))]
    write_parquet(tmp_path / "lambada/plain_text/test-0.parquet", [{"text": "a dog and a cat", "domain": None}])
    assert [(one.text, one.choices) for one in Lambada(tmp_path).requests()] == asked[:1]


def test_gsm8k_reads_the_number_after_its_mark(tmp_path):
    rows = [{"question": f"How many dogs are {n} dogs?", "answer": f"Count them.\n#### {n},000"} for n in range(1, 7)]
    write_jsonl(tmp_path / "gsm8k_test.jsonl", rows[:1])
    write_jsonl(tmp_path / "gsm8k_train.jsonl", rows[1:])
    task = Gsm8k(tmp_path)
    [one] = task.requests()
    assert one.text.count("Count them.") == 5 and one.text.endswith("How many dogs are 1 dogs?\nAnswer:")
    said = {"So\n#### 1000": (1, 1), "#### 1,000.": (1, 1), "It is $1,000": (0, 1), "#### 10": (0, 0), "": (0, 0)}
    for text, (strict, flexible) in said.items():
        graded = Graded(one, Result(text=text), task.score(one, Result(text=text)))
        assert (graded.score, task.figures([graded])["acc_last_number"]) == (strict, flexible), text


def test_a_continuation_ends_at_its_mark_and_at_the_context(tokenizer, model):
    asked = Continuation(text="A dog", answer="", max_new_tokens=12)
    [free] = grade(Task(), [asked], model, tokenizer)
    assert free.result.is_truncated and len(free.text) > 3
    end = free.text[2:4]
    [stopped] = grade(Task(), [replace(asked, until=[end])], model, tokenizer)
    assert stopped.text == free.text[: free.text.index(end)] and not stopped.result.is_truncated
    long = replace(asked, text="A dog barks. " * 200)
    [cut] = grade(Task(), [long], model, tokenizer)
    assert cut.result.is_truncated and cut.text


def test_a_mark_of_more_tokens_than_characters_is_seen(tokenizer, model, monkeypatch):
    mark = "题目结束了，下面是新的问题："
    ids = tokenizer.encode(f"A dog.{mark} A cat.")

    def write(model, requests, **how):
        taken = next(count for count, new in enumerate(ids, start=1) if requests[0].should_stop(0, new))
        return [[Completion(ids=ids[:taken], finish_reason="stop")]]

    monkeypatch.setattr("penjing.eval.scorer.sample_batch", write)
    asked = Continuation(text="A cat", answer="A dog.", until=[mark], max_new_tokens=64)
    [graded] = grade(Task(), [asked], model, tokenizer)
    assert graded.is_correct and not graded.result.is_truncated


# --- CORE -------------------------------------------------------------------------------------------------------------


def test_core_by_hand(tmp_path, tokenizer, model):
    """Two of its tasks, with chances that do and do not differ between v1 and v2."""
    five = [{"query": f"Dog {n}?", "choices": [*"ABCDE"], "gold": n % 5} for n in range(12)]
    write_jsonl(tmp_path / "commonsense_qa.jsonl", five)
    write_jsonl(tmp_path / "copa.jsonl", [{"query": "A dog", "choices": ["barks.", "bark at us."], "gold": 0}])
    write_jsonl(
        tmp_path / "winograd_wsc.jsonl", [{"context_options": ["A cat", "A dog"], "continuation": "barks.", "gold": 1}]
    )
    write_jsonl(tmp_path / "squad.jsonl", [{"context": f"{n} ", "continuation": f"{n}"} for n in range(11)])
    task = Core(tmp_path)
    requests = list(task.requests())
    graded = [Graded(one, Result(text=""), float(one.group != "commonsense_qa")) for one in requests]
    v1, v2 = (task.figures(graded)[f"{version}_of_4_tasks"] for version in ("v1", "v2"))
    assert v1 == pytest.approx((3 + (0 - 0.2) / 0.8) / 4) and v2 == pytest.approx((3 + (0 - 0.403) / 0.597) / 4)
    [note] = task.notes()
    assert "4 of 22" in note and "hellaswag_zeroshot" in note and "copa" not in note
    by_group = {one.group: one for one in requests}
    assert by_group["copa"].text == "A dog " and by_group["winograd"].texts == ["A cat ", "A dog "]
    shuffled = list(range(11))
    random.Random(1337).shuffle(shuffled)
    shown = random.Random(1234).sample([shuffled[place] for place in range(1, 11)], 10)
    first = next(one for one in requests if one.group == "squad")
    assert first.text == "".join(f"{n} {n}\n\n" for n in shown) + f"{shuffled[0]}"
    assert first.choices == [f" {shuffled[0]}"]
    # Of the choices only what differs is scored, and by the mean over its tokens.
    [copa] = grade(task, [by_group["copa"]], model, tokenizer)
    ids = [[tokenizer.begin, *tokenizer.encode(f"A dog {choice}")] for choice in by_group["copa"].choices]
    same = next(place for place, (one, two) in enumerate(zip(*ids, strict=False)) if one != two)
    assert copa.result.num_tokens == tuple(len(each) - same for each in ids)
    [schema] = grade(task, [by_group["winograd"]], model, tokenizer)
    assert len(set(schema.result.num_tokens)) == 1


def test_a_choice_with_which_the_other_begins_is_scored_too(tmp_path, tokenizer, model):
    write_jsonl(tmp_path / "copa.jsonl", [{"query": "A dog", "choices": ["barks", "barks at us"], "gold": 1}])
    task = Core(tmp_path)
    [one] = grade(task, task.requests(), model, tokenizer)
    ids = [tokenizer.encode(f"A dog {choice}") for choice in ("barks", "barks at us")]
    assert ids[1][: len(ids[0])] == ids[0], "a case of what is tested"
    assert one.result.num_tokens == (1, 1 + len(ids[1]) - len(ids[0])) and one.result.logps[0] < 0


def test_core_names_the_file_that_has_too_few_examples(tmp_path):
    write_jsonl(tmp_path / "squad.jsonl", [{"context": f"{n} ", "continuation": f"{n}"} for n in range(10)])
    with raises_user_error(where="squad.jsonl", got="10", wanted="11"):
        list(Core(tmp_path).requests())
    (tmp_path / "squad.jsonl").write_text("")
    with raises_user_error(where="squad.jsonl", got="0", wanted="1"):
        list(Core(tmp_path, shots=0).requests())


def test_a_limit_counts_for_each_task_of_core(tmp_path):
    """CORE is a mean over tasks, of which one has 32 rows and one 10,570."""
    for file, rows in (("squad", 40), ("bigbench_repeat_copy_logic", 3), ("coqa", 4)):
        write_jsonl(
            tmp_path / f"{file}.jsonl", [{"context": f"{n} ", "continuation": f"{n}"} for n in range(rows + 11)]
        )
    found = [one.group for one in Suite(names=["core"], data=tmp_path, limit=15).requests("core")]
    assert {name: found.count(name) for name in found} == {
        "bigbench_repeat_copy_logic": 14,
        "squad": 15,
        "coqa": 15,
    }


def test_core_has_22_tasks_and_three_chances_differ():
    assert len(CORE) == 22
    changed = {name: (task.chance, task.chance_v2) for name, task in CORE.items() if task.chance_v2 is not None}
    assert changed == {
        "commonsense_qa": (20, 40.3),
        "agi_eval_lsat_ar": (20, 25),
        "bigbench_language_identification": (9.1, 25),
    }
