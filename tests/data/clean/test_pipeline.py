"""A pipeline: rules with settings from names, a TOML file or a shipped one; resolved, fingerprinted, and run."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from penjing.base.errors import UserError
from penjing.data.clean import RULES
from penjing.data.clean.pipeline import Pipeline, outcome
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.formats import Document


def toml(folder, text, name="mine.toml"):
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def document(text, line=1):
    return Document(text=text, source="a.txt", line=line)


def test_a_file_sets_rules_their_settings_and_their_order(tmp_path):
    file = toml(tmp_path, '[rules.length]\nen.min_letters = 3\n[rules.language]\nkeep = ["en"]\n[rules.unicode]\n')
    made = Pipeline.load([file])
    assert list(made.rules) == ["length", "language", "unicode"]
    assert made.rules["length"].en.min_letters == 3 and made.rules["length"].zh.min_letters == 2
    assert made.rules["language"].keep == ("en",)
    clean = made.make(Counter())
    assert clean(document("ab")) == "length: too short" and clean(document("abc")) == document("abc")


def test_the_resolved_pipeline_is_read_back_the_same(tmp_path):
    made = Pipeline.load(["default", toml(tmp_path, "[rules.repetition.zh]\ntop_3 = 0.3\n")])
    again = Pipeline.load([toml(tmp_path, made.resolved(), "resolved.toml")])
    assert again.rules == made.rules and list(again.rules) == list(made.rules)
    assert again.resolved() == made.resolved() and again.fingerprint() == made.fingerprint()
    assert made.rules["repetition"].zh.top_3 == 0.3 and "top_3 = 0.3" in made.resolved()


def test_a_later_name_changes_settings_but_not_the_place(tmp_path):
    made = Pipeline.load(["length", "unicode", toml(tmp_path, "[rules.length.en]\nmin_letters = 99\n")])
    assert list(made.rules) == ["length", "unicode"] and made.rules["length"].en.min_letters == 99


def test_every_rule_is_in_the_table_and_the_shipped_pipeline_has_most():
    shipped = Pipeline.load(["default"])
    assert set(RULES) - set(shipped.rules) == {"blocked_words", "decontamination", "simplified"}
    assert Pipeline.load([]).rules == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[rules.langauge]\n", "language"),
        ("[rules.language]\nkep = ['en']\n", "rules.language.keep"),
        ("[rules.length]\nen.min_leters = 3\n", "rules.length.en.min_letters"),
        ("[rules.length]\nen.min_letters = -3\n", "rules.length.en.min_letters"),
        ("[rules.repetition]\nen.top_2 = 1.5\n", "<= 1"),
        ("[rules.lines]\nzh.closed_lines = 2\n", "rules.lines.zh.closed_lines"),
        ("[rules.near_duplicates]\nsimilarity = 0.1\n", "rules.near_duplicates.similarity"),
        ("[rules.decontamination]\nwords = 1\n", "rules.decontamination.words"),
        ("[rules.personal_data]\nmask = ['male']\n", "mail"),
        ("[rule.length]\n", "rules.NAME"),
        ("rules = 3\n", "rules.NAME"),
        ("[rules]\nlength = 3\n", "rules.NAME"),
        ("[rules.length\n", "TOML"),
        ("[rules.blocked_words]\nfile = 'nowhere.txt'\n", "nowhere.txt"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_what_was_meant(tmp_path, text, named):
    file = toml(tmp_path, text)
    with pytest.raises(UserError) as error:
        Pipeline.load([file])
    assert named in error.value.line() and file in error.value.line()


def test_a_name_that_is_nothing_names_the_nearest(tmp_path):
    for name, near in (("defualt", "default"), ("unicod", "unicode")):
        with pytest.raises(UserError, match=near):
            Pipeline.load([name])
    with pytest.raises(UserError, match=r"missing\.toml"):
        Pipeline.load([str(tmp_path / "missing.toml")])


def test_the_fingerprint_knows_settings_and_the_contents_of_files(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("foo\n")
    file = toml(tmp_path, f"[rules.blocked_words]\nfile = '{words}'\n[rules.length]\n")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "a long enough text"}) + "\n")

    def fingerprint(*rules):
        return json.loads(json.dumps(Corpus(DataSettings(train=(str(data),), clean=rules)).fingerprint))

    first = fingerprint(file)
    assert fingerprint(file) == first != fingerprint()
    toml(tmp_path, f"[rules.blocked_words]\nfile = '{words}'\n[rules.length]\nen.min_letters = 3\n")
    assert fingerprint(file) != first
    toml(tmp_path, f"[rules.blocked_words]\nfile = '{words}'\n[rules.length]\n")
    assert fingerprint(file) == first
    words.write_text("bar\n")
    assert fingerprint(file) != first
    assert fingerprint("unicode")["clean"] == ["unicode"] and "clean" not in fingerprint()


DOCS = (Path(__file__).parents[3] / "docs/data.md").read_text(encoding="utf-8")


def test_the_documented_pipeline_works_and_its_limits_are_the_defaults(tmp_path):
    section = DOCS.partition("## Cleaning")[2].partition("\n## ")[0]
    made = Pipeline.load(["default", toml(tmp_path, re.findall(r"```toml\n(.*?)```", section, re.DOTALL)[0])])
    assert made.rules["language"].keep == ("en", "zh", "fr") and made.rules["personal_data"].mask == (
        "mail",
        "phone",
        "key",
    )
    rules, rows = (
        Pipeline.load(["default"]).rules,
        re.findall(r"^\| `(\w+)\.(\w+)` \| (\S+) \| (\S+) \|", section, re.MULTILINE),
    )
    assert len(rows) >= 20
    for rule, setting, *limits in rows:
        assert [str(getattr(getattr(rules[rule], language), setting)) for language in ("en", "zh")] == limits, setting
    assert re.findall(r"^\| `(\w+)` \*? ?\|", section, re.MULTILINE) == [
        *rules,
        "simplified",
        "blocked_words",
        "decontamination",
    ]


def test_what_a_record_alone_decides_does_not_depend_on_the_order():
    texts = [
        "a first text of words",
        "a first text of words",
        "sho",
        "a first text of words\u200b",
        "x",
        "another text here",
    ]
    made = Pipeline.load(["unicode", "exact_duplicates", "length"])
    changed = Counter()
    together = made.make(changed)
    whole = [together(document(text, line)) for line, text in enumerate(texts)]
    rules, elsewhere = made.make_rules(), made.make_rules()
    outcomes = [outcome(elsewhere, document(text, line)) for line, text in reversed(list(enumerate(texts)))]
    assert outcomes[::-1] == [outcome(rules, document(text, line)) for line, text in enumerate(texts)]
    assert changed == {"unicode": 1}
    assert whole[1] == "exact_duplicates: equals an earlier record" and whole[1].detail == "a.txt:0"
    assert [isinstance(result, Document) for result in whole] == [True, False, False, False, False, True]
