"""Which differences a continued run is refused for: what changes what is learned, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penjing.base import config
from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.base.files import sha256_text
from penjing.data.chat import CHAT_TEMPLATE, EARLIER_TEMPLATES
from penjing.train.config import Run
from penjing.train.resume import check_same_run

FACTS = {"data": "a", "tokenizer": "b", "template": "c", "precision": "float32"}


def resolve(*words):
    return config.resolve(Run, parse_overrides(words))


@pytest.fixture
def begun(tmp_path):
    (tmp_path / "run.toml").write_text(config.to_toml(resolve()))
    return SimpleNamespace(folder=tmp_path, state=lambda: dict(FACTS))


@pytest.mark.parametrize(
    "word",
    [
        "batch.size=64",
        "max_grad_norm=0.5",
        "seed=7",
        "epochs=3",
        "max_steps=60",
        "optimizer.learning_rate=0.5",
        "schedule.warmup_ratio=0.3",
        "data.seq_len=128",
        "data.packing=concat",
        "data.val_fraction=0.2",
        "compute.activation_checkpointing=mlp",
        "objective=distill",
    ],
)
def test_what_changes_what_is_learned_is_named(begun, word):
    with pytest.raises(UserError) as refused:
        check_same_run(resolve(word), FACTS, begun, [])
    assert word.partition("=")[0] in str(refused.value)
    allowed = check_same_run(resolve(word), FACTS, begun, [word.partition("=")[0]])
    assert any(word.partition("=")[0] in each.field for each in allowed)


@pytest.mark.parametrize(
    "word",
    [
        "batch.micro_size=1",
        "data.prefetch=0",
        "eval.every=3",
        "checkpoint.keep_last=9",
        "log.every=5",
        "compute.threads=3",
    ],
)
def test_what_does_not_is_free(begun, word):
    assert resolve(word) != resolve()
    assert check_same_run(resolve(word), FACTS, begun, []) == []


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_compared_like_settings(begun, name):
    with pytest.raises(UserError, match=name):
        check_same_run(resolve(), {**FACTS, name: "another"}, begun, [])
    assert check_same_run(resolve(), FACTS, begun, []) == []


def test_a_run_that_has_an_earlier_text_of_our_template_continues(begun):
    begun.state = lambda: FACTS | {"template": next(iter(EARLIER_TEMPLATES))}
    assert check_same_run(resolve(), FACTS | {"template": sha256_text(CHAT_TEMPLATE)}, begun, []) == []
