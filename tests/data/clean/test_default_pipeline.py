"""The shipped pipeline: it leaves clean texts as they are, repairs, removes planted dirt, and masks personal data."""

import json
import random
import time
from collections import Counter
from pathlib import Path

import planted_dirt as planted
import pytest

import penjing
from penjing.data.clean.pipeline import Pipeline
from penjing.data.formats import Chat, Document, Message

SOURCE = Path(penjing.__file__).parent
REFRAIN = """采采芣苢，薄言采之。采采芣苢，薄言有之。
采采芣苢，薄言掇之。采采芣苢，薄言捋之。
采采芣苢，薄言袺之。采采芣苢，薄言襭之。"""
SONG = "Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, merrily,\nLife is but a dream."
HAIKU = "古池や\n蛙飛び込む\n水の音"


@pytest.fixture(scope="module")
def clean():
    names = [name for name in Pipeline.load(["default"]).rules if name not in ("exact_duplicates", "near_duplicates")]
    clean = Pipeline.load(names).make(Counter())
    return lambda text: clean(Document(text=text, source="a", line=1))


@pytest.fixture(scope="module")
def texts(toy):
    """Clean texts by language."""
    lines = [json.loads(line)["text"] for line in (toy / "pretrain.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [text.strip() for text in lines if len(text) > 120]
    chinese = [text for text in lines if 2 * sum("一" <= char <= "鿿" for char in text) > len(text)]
    english = [text for text in lines if text.isascii()]
    return {"zh": chinese[:60], "en": english[:60]}


def text_of(result):
    return result if isinstance(result, str) else result.text


def test_clean_texts_stay_as_they_are(clean, toy):
    rows = [json.loads(line)["text"] for line in (toy / "pretrain.jsonl").read_text(encoding="utf-8").splitlines()]
    changed = [(text, result) for text in rows if text_of(result := clean(text)) != text]
    assert len(rows) == 400 and not changed, changed[:3]


@pytest.mark.parametrize(
    "text",
    [
        REFRAIN,
        SONG,
        "Hello there, world!",
        "床前明月光，疑是地上霜。",
        "国破山河在",
        "x = [1, 2, 3]\n" * 3,
        "| a | b |\n|---|---|\n| 1 | 2 |\n| three | four |",
        "anna\nben\ncarla\ndora\nemil\nfrida\ngerd\nheinz\nida",
        "E = mc^2, where E is the energy",
        "她说：“今天是2024年5月1日，12:30。”",
        "Home is where the heart is.",
    ],
)
def test_poems_code_lists_and_short_texts_stay_as_they_are(clean, text):
    assert text_of(clean(text)) == text


def test_code_is_kept(clean):
    files = sorted((SOURCE / "kernels").rglob("*.c")) + sorted((SOURCE / "model").glob("*.py"))
    assert len(files) > 10
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert text_of(clean(text)) == text, file


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("kind", planted.REPAIRED)
def test_what_can_be_repaired_is_the_clean_text_again(clean, texts, kind, language):
    rng = random.Random(kind)
    wrong = [text for text in texts[language] if text_of(clean(planted.REPAIRED[kind](text, rng))) != text]
    assert len(wrong) <= 0.05 * len(texts[language]), wrong[:3]


def test_gbk_read_as_latin_letters_is_repaired(clean, texts):
    wrong = [text for text in texts["zh"] if text_of(clean(planted.gbk(text, random.Random(0)))) != text]
    assert len(wrong) <= 0.05 * len(texts["zh"]), wrong[:3]


def test_chinese_read_as_latin_letters_is_repaired_with_a_ratio_sign_and_if_it_happened_twice(clean):
    text = "孙行者近前道∶“师父，天色将晚，前面有一座高山，我们且去借宿一夜。”"
    assert text_of(clean(planted.gbk(text, random.Random(0)))) == text
    assert text_of(clean(text.encode().decode("latin-1").encode().decode("latin-1"))) == text


def test_tags_are_removed_but_not_from_code_and_not_in_quadratic_time(clean, texts):
    for text in texts["en"][:20] + texts["zh"][:20]:
        inner = "".join(f"<p class='a'>{line}</p>\n" for line in text.split("\n"))
        page = f"<div id=b><script>let a = 1</script><!-- no -->{inner}<br/>&amp; more words&nbsp;here</div>"
        assert text_of(clean(page)).split() == [*text.split(), "&", "more", "words", "here"]
    code = "template <class T> bool less(T a, T b) { return a < b && a <b; } // std::vector<int> <T> x"
    assert text_of(clean(code)) == code
    begin = time.process_time()
    clean("<p>" + "<script>" * 40_000 + "words" + "<!--" * 40_000)
    assert time.process_time() - begin < 5


def test_a_web_page_is_its_main_text(clean):
    content = "The garden was quiet, and the children had gone home with their mother before the rain. "
    content += "In the evening they told each other what they had seen: a bird with a blue head, and a snail. "
    content += "Nobody believed the story about the snail, which was said to have been as large as a small dog."
    page = (
        f"<!DOCTYPE html><html><body><nav><a href='/'>Start</a></nav><article><p>{content}</p></article></body></html>"
    )
    assert text_of(clean(page)).strip() == content.strip()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_lines_of_web_pages_are_removed(clean, texts, language):
    rng = random.Random(1)
    wrong = [text for text in texts[language] if text_of(clean(planted.boilerplate(text, rng, language))) != text]
    assert len(wrong) <= 0.05 * len(texts[language]), wrong[:3]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_dirt_of_each_kind_is_left_out(clean, texts, language):
    rng, kept, total = random.Random(2), Counter(), Counter()
    for text in texts[language]:
        for kind, dirt in planted.dropped(text, rng, language).items():
            total[kind] += 1
            kept[kind] += not isinstance(clean(dirt), str)
    assert {kind: number for kind, number in kept.items() if number > 0.05 * total[kind]} == {}
    assert min(total.values()) == len(texts[language]) > 40


@pytest.mark.parametrize("kind", planted.PERSONAL)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_personal_datum_is_masked(clean, texts, kind, language):
    rng = random.Random(kind)
    for text in texts[language] * 5:
        datum = planted.PERSONAL[kind](rng)
        sentence = rng.choice(planted.SENTENCES[language])
        assert (
            text_of(clean(f"{text}\n{sentence.format(datum)}")) == f"{text}\n{sentence.format(f'[{kind.upper()}]')}"
        ), datum


@pytest.mark.parametrize(
    "text",
    [
        "3 + 4000000 = 4000003",
        "450,000-2000=448000",
        "ISBN 978-7-101-00304-8",
        "at 127.0.0.1:8000",
        "路由器的地址是192.168.1.1。",
        "mask 255.255.255.0, gateway 10.0.0.1",
        "v1.2.3",
        "mask 255.255.255.0",
        "items[1::2] and std::vector",
        "1400000+2100000 = 3500000",
        "@user, @-@, a @ b",
        "4111 1111 1111 1112",
        "110105194912310021",
        "key = key.repeat_interleave(query.shape[1])",
        "12:30:45",
    ],
)
def test_numbers_and_names_that_are_no_personal_data_stay(clean, text):
    text = f"This is a sentence about {text} that everyone may read."
    assert text_of(clean(text)) == text


def chat(*turns):
    return Chat(
        messages=tuple(Message(role=role, content=content) for role, content in turns), tools=(), source="a", line=1
    )


LONG = "a question that is long enough to be meant"


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("user", "hi"), ("assistant", "hi")], None),
        ([("system", "be brief"), ("user", LONG), ("assistant", "ok"), ("user", "more"), ("assistant", "ok")], None),
        ([("user", "say it"), ("assistant", "  ")], "empty turn"),
        ([("user", ""), ("assistant", "yes")], "empty turn"),
        ([("user", LONG), ("assistant", f" {LONG}\n")], "repeats the question"),
        ([("user", LONG), ("assistant", "a"), ("user", LONG), ("assistant", "b")], "repeated turn"),
        ([("user", "a"), ("assistant", LONG), ("user", "b"), ("assistant", LONG)], "repeated turn"),
        ([("user", "a"), ("user", "b"), ("assistant", "c")], "roles"),
        ([("user", "a"), ("system", "b"), ("assistant", "c")], "roles"),
        ([("assistant", "welcome"), ("user", "a"), ("assistant", "c")], "without a question"),
    ],
)
def test_conversations_that_no_one_would_have_are_left_out(turns, reason):
    result = Pipeline.load(["chat"]).make(Counter())(chat(*turns))
    assert (reason in result) if reason else result == chat(*turns)


def test_quality_of_conversations_is_not_judged_but_personal_data_are_masked(clean):
    made = Pipeline.load(["length", "symbols", "language", "repetition", "personal_data"]).make(Counter())
    short = chat(("user", "?"), ("assistant", "mail a@b.org"))
    assert made(short) == chat(("user", "?"), ("assistant", "mail [MAIL]"))


def test_blocked_words(tmp_path):
    (tmp_path / "words.txt").write_text("Foo\nbad phrase\n坏词\n\n", encoding="utf-8")
    (tmp_path / "p.toml").write_text(f"[rules.blocked_words]\nfile = '{tmp_path / 'words.txt'}'\n")
    made = Pipeline.load([str(tmp_path / "p.toml")]).make(Counter())

    def kept(text):
        return not isinstance(made(Document(text=text, source="a", line=1)), str)

    assert kept("food is good") and kept("a bad, phrase") and kept("这是好词")
    assert not kept("some FOO here") and not kept("a Bad phrase") and not kept("这是坏词吗")


def test_simplified_is_an_option_that_counts(texts):
    changed = Counter()
    made = Pipeline.load(["simplified"]).make(changed)
    assert text_of(made(Document(text="後來於是歸去", source="a", line=1))) == "后来于是归去"
    assert text_of(made(Document(text="后来", source="a", line=1))) == "后来" and changed == {"simplified": 1}
