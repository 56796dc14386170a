"""Settings: which layer wins, and errors that name the key, what was got and the nearest valid key."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt, Lt
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import raises_user_error

from penjing.base import config
from penjing.base.config import (
    PositiveInt,
    convert,
    nested,
    parse_overrides,
    read_toml,
    resolve,
    to_dict,
    to_toml,
    walk,
)
from penjing.base.errors import UserError
from penjing.model.presets import PRESETS
from penjing.train.config import Run


@dataclass(frozen=True, kw_only=True)
class Fast:
    name: Literal["fast"] = "fast"
    rate: float = 1.0
    wings: int = 2


@dataclass(frozen=True, kw_only=True)
class Slow:
    name: Literal["slow"] = "slow"
    rate: float = 0.1
    shells: int = 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    preset: str = "small"
    width: int = 8
    depth: int = 1

    @classmethod
    def named(cls, name: str) -> dict[str, object]:
        shapes: dict[str, dict[str, object]] = {"small": {}, "large": {"width": 64, "depth": 12}}
        if name not in shapes:
            raise UserError("no such shape", where="shape.preset", got=name)
        return {"preset": name, **shapes[name]}


@dataclass(frozen=True, kw_only=True)
class Data:
    files: tuple[str, ...] = ()
    order: Literal["given", "drawn"] = "drawn"
    seq_len: int = 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int = 1
    share: float = 0.5
    verbose: bool = False
    name: str = ""
    shape: Shape = field(default_factory=Shape)
    data: Data = field(default_factory=Data)
    animal: Fast | Slow = field(default_factory=Fast)


def from_words(*words: str, below: dict[str, Any] | None = None) -> Settings:
    return resolve(Settings, below or {}, parse_overrides(words))


def error_of(*words: str, below: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        from_words(*words, below=below)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- which wins


def test_home_is_written_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/mia")
    got = parse_overrides(["out=~/runs/a", "data.train=~/a.jsonl,b~c,~", "sample.prompts=~7"])
    assert got == {"out": "/home/mia/runs/a", "data": {"train": "/home/mia/a.jsonl,b~c,/home/mia"}} | {
        "sample": {"prompts": "~7"}
    }


def test_defaults_then_recipe_then_file_then_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("seed = 3\nshare = 0.3\n[data]\nseq_len = 3\n")
    recipe = {"seed": 2, "share": 0.2, "name": "recipe", "data": {"seq_len": 2, "order": "given"}}
    got = resolve(Settings, recipe, read_toml(tmp_path / "run.toml"), parse_overrides(["seed=4"]))
    assert (got.seed, got.share, got.name, got.verbose) == (4, 0.3, "recipe", False)
    assert (got.data.seq_len, got.data.order, got.data.files) == (3, "given", ())


def test_no_layer_gives_the_defaults() -> None:
    assert resolve(Settings) == Settings()


def test_layers_are_left_as_they_were() -> None:
    recipe = {"shape": "large", "data": {"seq_len": 2}}
    from_words("shape=small", "data.seq_len=5", below=recipe)
    assert recipe == {"shape": "large", "data": {"seq_len": 2}}


# ------------------------------------------------------------------------------------------------------------- choices


def test_a_choice_brings_its_own_settings() -> None:
    assert from_words("animal=slow", "animal.shells=3").animal == Slow(shells=3)
    assert from_words("animal.name=slow", "animal.rate=0.5").animal == Slow(rate=0.5)
    assert from_words("animal.wings=4").animal == Fast(wings=4)


def test_a_setting_of_another_member_is_refused() -> None:
    assert "animal.shells: unknown setting" in error_of("animal.shells=3")
    assert "animal.wings: unknown setting" in error_of("animal.wings=3", below={"animal": {"name": "slow"}})


def test_another_choice_drops_what_was_said_of_the_old_one() -> None:
    below = {"animal": {"name": "fast", "rate": 9.0, "wings": 6}}
    assert from_words("animal=slow", below=below).animal == Slow()


@pytest.mark.parametrize("choice", [{"name": "fast"}, {}])
def test_the_same_choice_again_keeps_what_was_said_of_it(choice: dict[str, str]) -> None:
    assert from_words("animal=fast", below={"animal": {**choice, "wings": 6}}).animal == Fast(wings=6)


def test_a_choice_that_is_not_there_lists_those_that_are() -> None:
    assert error_of("animal=slwo") == "animal.name: no such choice; got 'slwo'; wanted fast or slow"


# ------------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("words", [("shape=large", "shape.depth=6"), ("shape.depth=6", "shape=large")])
def test_a_preset_and_a_change_to_it_in_either_order(words: tuple[str, str]) -> None:
    assert from_words(*words).shape == Shape(preset="large", width=64, depth=6)


@pytest.mark.parametrize(
    "words", [("model=26m", "model.num_hidden_layers=6"), ("model.num_hidden_layers=6", "model=26m")]
)
def test_model_presets_of_a_run(words: tuple[str, str]) -> None:
    model = resolve(Run, {"model": "64m"}, parse_overrides(words)).model
    assert (model.preset, model.num_hidden_layers, model.architecture) == ("26m", 6, PRESETS["26m"]["architecture"])


def test_another_preset_drops_what_a_lower_layer_set() -> None:
    assert from_words("shape=large", below={"shape": {"width": 5}}).shape.width == 64


def test_the_same_preset_again_keeps_what_a_lower_layer_set() -> None:
    assert from_words("shape=large", below={"shape": {"preset": "large", "width": 5}}).shape.width == 5


@pytest.mark.parametrize(
    "words",
    [
        ("shape=small", "shape=large"),
        ("shape=small", "shape.depth=1", "shape=large"),
        ("shape=small", "shape.preset=large"),
        ("shape.preset=small", "shape=large"),
        ("shape=large", "shape.preset=small", "shape=large"),
    ],
)
def test_of_a_setting_given_twice_the_later_wins(words: tuple[str, ...]) -> None:
    assert from_words(*words).shape.preset == "large"
    assert from_words("seed=2", "seed=3").seed == 3


def test_a_preset_spelled_out_is_the_same() -> None:
    assert from_words("shape.preset=large") == from_words("shape=large")


# --------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("1e6", 1_000_000), ("1_000", 1000), ("-2", -2), (str(2**60 + 1), 2**60 + 1)]
)
def test_whole_numbers(text: str, value: int) -> None:
    got = from_words(f"seed={text}").seed
    assert (got, type(got)) == (value, int)


@pytest.mark.parametrize(("text", "value"), [("3e-4", 3e-4), ("2", 2.0), ("-.5", -0.5)])
def test_numbers(text: str, value: float) -> None:
    got = from_words(f"share={text}").share
    assert (got, type(got)) == (value, float)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("1", True), ("yes", True), ("false", False), ("0", False)]
)
def test_yes_and_no(text: str, value: bool) -> None:
    assert from_words(f"verbose={text}", below={"verbose": not value}).verbose is value


def test_lists_and_literals() -> None:
    assert from_words("data.files=a.txt,数据/b.txt").data.files == ("a.txt", "数据/b.txt")
    assert from_words("data.files=", below={"data": {"files": ["a"]}}).data.files == ()
    assert from_words(below={"data": {"files": ["a,b", ""]}}).data.files == ("a,b", "")
    assert from_words("data.order=given").data.order == "given"


def test_a_list_in_brackets_keeps_commas(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/mia")
    words = 'data.files=["a, b", \'c\', "", "~/d", 5]'
    assert from_words(words).data.files == ("a, b", "c", "", "/home/mia/d", "5")
    assert from_words("data.files=[]", below={"data": {"files": ["a"]}}).data.files == ()
    assert from_words("data.files=a[0],[b]").data.files == ("a[0]", "[b]")
    assert from_words("name=[a, ~/b]").name == "[a, ~/b]"
    assert convert(tuple[float, ...], "[1, 0.5]", "weights") == (1.0, 0.5)


@pytest.mark.parametrize("value", ["[a, b]", '["a"', '["a"] "b"', '["a"]\nb = 1', "[" * 5000])
def test_a_list_that_is_none_says_how_to_write_one(value: str) -> None:
    assert "data.files: not a list" in (error := error_of(f"data.files={value}"))
    assert """'data.files=["a", "b"]'""" in error


def test_elements_of_a_list_have_their_type() -> None:
    with raises_user_error(where="weights", got="'x'"):
        convert(tuple[float, ...], '["x"]', "weights")
    assert "data.files" in error_of("data.files=[true]") and "data.files" in error_of("data.files=[[1]]")


def test_a_value_may_contain_an_equals_sign() -> None:
    assert from_words("name=a=b").name == "a=b"


@pytest.mark.parametrize(
    "words",
    [
        ("seed=1.5",),
        ("seed=many",),
        ("seed=",),
        ("seed=inf",),
        ("share=nan",),
        ("share=1e999",),
        ("verbose=maybe",),
        ("data.order=driven",),
        ("data.files.x=1",),
        ("data=1",),
        ("seed.x=1",),
        ("name.x=1",),
        ("shape=huge",),
        ("shape..depth=1",),
        ("animal.=slow",),
        ("=1",),
        ("seed",),
        (".=1",),
    ],
)
def test_what_cannot_be_is_one_clear_line(words: tuple[str, ...]) -> None:
    error_of(*words)


@pytest.mark.parametrize(
    "table",
    [
        {"seed": True},
        {"seed": [1]},
        {"seed": {"a": 1}},
        {"name": ["a"]},
        {"name": True},
        {"verbose": "si\nno"},
        {"data": 5},
        {"data": [{}]},
        {"data": {"files": 5}},
        {"data": {"files": {"a": 1}}},
        {"data": {"files": [["a"]]}},
        {"shape": 26},
        {"shape": {"preset": 26}},
        {"shape": {"preset": ["large"]}},
        {"animal": {"name": 3}},
        {"animal": {"name": ["slow"]}},
        {"animal": {"name": {}}},
    ],
)
def test_a_file_of_wrong_types_is_one_clear_line(table: dict[str, Any]) -> None:
    error_of(below=table)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("sede=1", "Did you mean seed?"),
        ("shap=large", "Did you mean shape?"),
        ("data.seq_le=4", "Did you mean data.seq_len?"),
        ("animal.wing=4", "Did you mean animal.wings?"),
        ("data.order=drwan", "Did you mean drawn?"),
    ],
)
def test_the_nearest_name_is_told(word: str, nearest: str) -> None:
    assert nearest in error_of(word)


def test_a_name_like_no_other_lists_them_all() -> None:
    assert "Settings here: data.files, data.order, data.seq_len" in error_of("data.qqq=4")


def test_a_wrong_value_names_key_got_and_wanted() -> None:
    assert error_of("data.seq_len=long") == "data.seq_len: not a number; got 'long'; wanted a whole number"


NONSENSE = ("nan", "inf", "-inf", "", "[1]", "1 2", True, [1], {"a": 1}, None)
BEYOND = {int: (str(2**63), "1e30", "1" * 5000, "0.5"), float: ("1e38", "-1e300", "1e-320")}  # of int64 and float32


@pytest.mark.parametrize("kind", [int, float])
def test_no_setting_takes_a_number_that_is_none(kind: type) -> None:
    numbers = [setting for setting in walk(Run) if setting.annotation is kind]
    assert len(numbers) > 40
    for setting in numbers:
        for value in (*NONSENSE, *BEYOND[kind]):
            with raises_user_error(where=setting.path):
                resolve(Run, parse_overrides([setting.needs] if setting.needs else []), nested({setting.path: value}))


@pytest.mark.parametrize(
    "content",
    [b"seed = ", b"\xff\xfe", b"seed = 1\nseed = 2", b"seed = " + b"9" * 5000, b"seed = " + b"[" * 100_000],
    ids=["cut", "not UTF-8", "twice", "digits", "nested"],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    for broken in (path, tmp_path / "missing.toml", tmp_path):
        with raises_user_error(where=str(broken)) as caught:
            read_toml(broken)
        assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.symlink_to(path)
    os.mkfifo(tmp_path / "pipe.toml")
    for each in (path, tmp_path / "pipe.toml"):  # a pipe that nobody writes to would keep a reader waiting
        with raises_user_error(where=each.name):
            read_toml(each)


def test_a_text_that_cannot_be_written_down_is_refused() -> None:
    for name in (os.fsdecode(b"\xd6\xd0.txt"), "\ud800"):
        assert "data.files: not valid UTF-8; got " in error_of(below={"data": {"files": [name]}})


# ---------------------------------------------------------------------------------------------------- written and read

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\\n\r\t\x00\x7f\x85\u2028盆景='))


@settings(deadline=None)  # beside other work an example takes seconds
@given(stage=TEXT, train=st.lists(TEXT), name=TEXT, seed=st.integers(0, 2**63 - 1), epochs=st.floats(1e-9, 1e15))
def test_a_run_comes_back_from_its_file(stage: str, train: list[str], name: str, seed: int, epochs: float) -> None:
    run = resolve(
        Run,
        {"stage": stage, "seed": seed, "epochs": epochs, "model": "tiny", "optimizer": "muon", "schedule": "wsd"},
        {
            "data": {"train": train},
            "log": {"run_name": name, "trackers": ("wandb",)},
            "sample": {"prompts": [name, *train]},
        },
    )
    assert (run.stage, run.seed, run.epochs, run.data.train) == (stage, seed, epochs, tuple(train))
    assert resolve(Run, tomllib.loads(to_toml(run))) == run


def test_the_written_file_spells_out_every_setting() -> None:
    written = tomllib.loads(to_toml(Settings(animal=Slow(), shape=Shape(width=9))))
    assert written["animal"] == {"name": "slow", "rate": 0.1, "shells": 1}
    assert written["shape"] == {"preset": "small", "width": 9, "depth": 1}
    assert written.keys() == {one.name for one in fields(Settings)}
    assert to_dict(Settings())["data"] == {"files": (), "order": "drawn", "seq_len": 16}


@dataclass(frozen=True, kw_only=True)
class Ranged(config.Settings, section="here"):
    count: PositiveInt = 1
    share: Annotated[float, Gt(0), Lt(1)] = 0.5


@pytest.mark.parametrize(
    ("values", "where", "wanted"),
    [
        ({"count": 0}, "here.count", ">= 1"),
        ({"share": 1.0}, "here.share", "> 0 and < 1"),
        ({"share": float("nan")}, "here.share", "> 0 and < 1"),
    ],
)
def test_a_value_outside_its_declared_range_is_refused(values, where, wanted):
    with pytest.raises(UserError) as caught:
        Ranged(**values)
    assert (caught.value.where, caught.value.wanted) == (where, wanted)
    assert Ranged(count=1, share=0.999) == Ranged(count=1, share=0.999)
