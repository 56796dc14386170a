"""Near duplicates found among texts whose true similarity is computed, and texts of evaluation sets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penjing.base.errors import UserError
from penjing.data.clean import ngrams
from penjing.data.clean.decontamination import Decontamination, DecontaminationSettings
from penjing.data.clean.exact_duplicates import ExactDuplicates
from penjing.data.clean.near_duplicates import NearDuplicates, NearDuplicatesSettings
from penjing.data.formats import Chat, Document, Message
from penjing.data.formats.schema import PreferenceRecord

ENGLISH = [f"{first}{last}" for first in "bcdfgklmnprst" for last in ("an", "ell", "irt", "ond", "uck", "ail's", "ow,")]
CHINESE = [chr(code) for code in range(0x4E00, 0x4E00 + 2000)] + list("，。！？")


def jaccard(one: Sequence[str], other: Sequence[str], joined: str) -> float:
    """The plain definition, for lists of words or characters."""
    sets = [{joined.join(words[i : i + 5]) for i in range(len(words) - 4)} for words in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def document(text: str, line: int = 1) -> Document:
    return Document(text=text, source="a.jsonl", line=line)


def pairs(vocabulary: Sequence[str], length: int, num: int) -> list[tuple[list[str], list[str]]]:
    """Texts and copies with words replaced, inserted, deleted and moved, of all similarities from about 0.4 to 1."""
    rng = random.Random(7)
    found = []
    for _ in range(num):
        words = rng.choices(vocabulary, k=rng.randint(length // 2, 2 * length))
        copy, rate = list(words), rng.uniform(0, 0.12)
        for index in reversed(range(len(copy))):
            if rng.random() < rate:
                new = rng.choice(vocabulary)
                copy[index : index + 1] = rng.choice(([new], [], [copy[index], new]))
        if rng.random() < 0.3:
            cut = rng.randrange(len(copy))
            copy = copy[cut:] + copy[:cut]
        found.append((words, copy))
    return found


@pytest.mark.parametrize(("vocabulary", "joined"), [(ENGLISH, " "), (CHINESE, "")], ids=["English", "Chinese"])
def test_recall_and_precision(vocabulary: Sequence[str], joined: str) -> None:
    made = pairs(vocabulary, 200, 600)
    rule = NearDuplicates()
    texts = [joined.join(words) for pair in made for words in pair]
    found = [rule.first_seen(rule.sketch(document(text)), ("", number)) for number, text in enumerate(texts)]
    similar = {2 * number + 1 for number, pair in enumerate(made) if jaccard(*pair, joined) >= 0.8}
    said = {number for number, place in enumerate(found) if place}
    assert all(found[number] == ("", number - 1) for number in said), "they repeat their own original"
    assert len(similar) > 100
    assert len(said & similar) / len(similar) >= 0.97
    assert len(said & similar) / len(said) >= 0.97


def test_sketches_in_c_and_in_python_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(words) for pair in pairs(ENGLISH, 100, 5) for words in pair] + [
        "",
        "。",
        "two words",
        "你好 a中b",
    ]
    texts += ["".join(map(chr, range(start, start + 400))) for start in range(0, 0x11000, 397)] + [
        " \udcff\U0010ffff x"
    ]
    made = [(ngrams.sketch(text, n), ngrams.word_hashes(text, marks=False).tolist()) for text in texts for n in (1, 5)]
    monkeypatch.setattr(ngrams, "c_library", lambda: None)
    again = [(ngrams.sketch(text, n), ngrams.word_hashes(text, marks=False).tolist()) for text in texts for n in (1, 5)]
    assert made == again


def test_short_and_empty_texts() -> None:
    rule = NearDuplicates()
    texts = ["", "", "Good morning", "good  morning", "Good evening", "你好", "你 好", "!", "?"]
    found = [rule.first_seen(rule.sketch(document(text)), ("", line)) for line, text in enumerate(texts)]
    assert found == [None, None, None, ("", 2), None, None, ("", 5), None, None]


def test_a_copy_of_a_dropped_record_is_compared_with_the_kept_one() -> None:
    """A chain of small changes: what is left out is nearly a record that stays."""
    rng = random.Random(1)
    words = rng.choices(ENGLISH, k=300)
    rule, kept = NearDuplicates(), dict[int, list[str]]()
    for line in range(40):
        place = rule.first_seen(rule.sketch(document(" ".join(words))), ("", line))
        if place:
            assert jaccard(kept[place[1]], words, " ") >= 0.8
        else:
            kept[line] = list(words)
        words[rng.randrange(300)] = "new"
    assert 2 < len(kept) < 20


def test_system_messages_do_not_make_conversations_alike() -> None:
    def chat(question: str) -> Chat:
        system = Message(role="system", content="You are a helpful assistant of a shop. " * 30)
        turns = (Message(role="user", content=question), Message(role="assistant", content=f"{question} is cheap."))
        return Chat(messages=(system, *turns), tools=(), source="", line=1)

    rule = NearDuplicates()
    chats = [chat("A red apple of last year"), chat("A green pear from this week"), chat("a red apple of last YEAR")]
    found = [rule.first_seen(rule.sketch(each), ("", line)) for line, each in enumerate(chats)]
    assert found == [None, None, ("", 0)]


def thoughtful(thought: str) -> Chat:
    answer = Message(role="assistant", content="It is 42.", reasoning_content=thought)
    return Chat(
        messages=(Message(role="user", content="How much is six times seven?"), answer), tools=(), source="", line=1
    )


def test_conversations_that_differ_in_their_thoughts_are_not_alike() -> None:
    rule = NearDuplicates()
    thoughts = [
        "Six times seven: six times five is thirty, and twelve more.",
        "Seven times six, so seven doubled thrice is the way to go.",
    ]
    places = [
        rule.first_seen(rule.sketch(thoughtful(each)), ("", line)) for line, each in enumerate([*thoughts, thoughts[0]])
    ]
    assert places == [None, None, ("", 0)]


def test_questions_about_one_passage_are_not_alike() -> None:
    def about(question: str, answer: str) -> Chat:
        turns = (Message(role="user", content=question), Message(role="assistant", content=answer))
        return Chat(messages=turns, tools=(), source="", line=1)

    passage = " ".join(random.Random(3).choices(ENGLISH, k=300))
    asked = [
        f"{passage}\n\nWho came?",
        f"{passage}\n\nDid anybody ever leave?",
        f"Translate it.\n{passage}",
        "Hi there",
    ]
    chats = [about(*each) for each in zip(asked, ["Nobody.", "Nobody.", "Personne.", "Hello"], strict=True)]
    chats += [
        about(asked[0], "Everybody else."),
        about(f"{passage} Is it so?", "Yes."),
        about(f"{passage} Is it so?", "No."),
    ]
    chats += [about(asked[0].replace("\n\n", "\n"), "nobody.")]
    rule = NearDuplicates()
    found = [rule.first_seen(rule.sketch(each), ("", line)) for line, each in enumerate(chats)]
    assert found == [None] * 7 + [("", 0)]


def test_answers_with_other_labels_are_not_alike() -> None:
    rated = [
        PreferenceRecord(chats=(thoughtful("So it is."),), is_chosen=(is_chosen,)) for is_chosen in (True, False, False)
    ]
    for rule in (ExactDuplicates(), NearDuplicates()):
        found = [rule.first_seen(rule.sketch(each), ("", line)) for line, each in enumerate(rated)]
        assert found == [None, None, ("", 1)]


def test_the_threshold_is_a_setting() -> None:
    one = [f"w{number}" for number in range(400)]
    other = [*one[:380], *(f"v{number}" for number in range(20))]
    for threshold, is_dropped in ((0.8, True), (0.95, False)):
        rule = NearDuplicates(NearDuplicatesSettings(similarity=threshold))
        rule(document(" ".join(one)))
        assert isinstance(rule(document(" ".join(other))), str) == is_dropped
    with pytest.raises(UserError):
        NearDuplicatesSettings(similarity=0.2)


def test_exact_duplicates_are_equal_to_the_letter() -> None:
    rule = ExactDuplicates()
    found = [rule(document(text, line)) for line, text in enumerate(["a b", "a  b", "A b", "a b"])]
    assert [isinstance(each, str) for each in found] == [False, False, False, True]


# --- decontamination -------------------------------------------------------------------------------------------------

QUESTION = "Which statement best explains why photosynthesis is the foundation of most food webs on the whole planet?"
SHORT = "Water boils at one hundred degrees at sea level."
CHINESE_QUESTION = "近百年来猩红热发病率有明显下降，轻型病人增多，病死率五十年代为二十年代的三十分之一"


@pytest.fixture
def evaluation(tmp_path: Path) -> str:
    path = tmp_path / "exam.jsonl"
    rows = [{"query": QUESTION, "choices": ["sunlight", SHORT]}, {"id": 7, "question": [{"text": CHINESE_QUESTION}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def shout(text: str) -> str:
    return text.upper().replace(" ", "\n").replace("，", ",")


@pytest.mark.parametrize("change", [str, shout], ids=["as it is", "in another form"])
@pytest.mark.parametrize(("text", "line"), [(QUESTION, 1), (SHORT, 1), (CHINESE_QUESTION, 2)])
def test_contaminated_texts_are_left_out(evaluation: str, text: str, line: int, change: Callable[[str], str]) -> None:
    rule = Decontamination(DecontaminationSettings(against=(evaluation,)))
    found = rule(document(f"Some text before. {change(text)} And some after, 也有中文。"))
    assert isinstance(found, str)
    assert "exam.jsonl" in found
    assert f"exam.jsonl:{line}" in getattr(found, "detail", "")


def test_a_thought_that_holds_a_question_is_contaminated(evaluation: str) -> None:
    rule = Decontamination(DecontaminationSettings(against=(evaluation,)))
    assert isinstance(rule(thoughtful(f"I remember: {QUESTION}")), str)
    assert not isinstance(rule(thoughtful("I remember nothing.")), str)


def test_what_overlaps_little_stays(evaluation: str) -> None:
    rule = Decontamination(DecontaminationSettings(against=(evaluation,)))
    texts = [
        " ".join(QUESTION.split()[:12]),
        " ".join(SHORT.split()[:7]),
        CHINESE_QUESTION[:18],
        "",
        "sunlight",
        "近百年来",
    ]
    for text in texts:
        assert rule(document(f"before {text} after")) == document(f"before {text} after")
    longer = Decontamination(DecontaminationSettings(against=(evaluation,), words=20))
    assert longer(document(QUESTION)) != document(QUESTION), "a shorter text is compared by 8 of 13 as many words"


def test_prompts_with_other_references_are_other_prompts() -> None:
    def prompt(**fields: object) -> Chat:
        question = Message(role="user", content="How many apples are in the basket of the last question?")
        return Chat(messages=(question,), tools=(), source="", line=1, fields=fields)

    prompts = [prompt(gt="3", id=1), prompt(gt="4", id=2), prompt(gt="3", id=3), prompt(cases=["x"]), prompt()]
    for rule in (ExactDuplicates(), NearDuplicates()):
        found = [rule.first_seen(rule.sketch(each), ("", line)) for line, each in enumerate(prompts)]
        assert found == [None, None, ("", 0), None, None]
