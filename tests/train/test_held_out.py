"""Figures on what was held out, on devices that know no float64."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from penjing.base import config
from penjing.base.config import parse_overrides
from penjing.data.token_shards import Shards
from penjing.data.tokenize_dataset import is_held_out
from penjing.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from penjing.objective.base import Loss
from penjing.parallel.single import Single
from penjing.train.config import Run
from penjing.train.stages import distill
from penjing.train.stages import next_token as tokens
from penjing.train.stages.distill import DistillStage
from penjing.train.stages.teacher_model import judge

ENGINE = Single(torch.device("cpu"))


class OnApple(torch.Tensor):
    """Stands for a tensor of an Apple GPU."""

    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


class Objective:
    """Its sums are on such a device: six nats over three tokens in every batch."""

    def __call__(self, model, batch):
        total = torch.tensor(6.0).as_subclass(OnApple)
        return Loss(total, {"nats": total})

    def weight(self, batch):
        return torch.tensor(3.0).as_subclass(OnApple)


def test_a_model_s_loss(monkeypatch):
    monkeypatch.setattr(tokens, "NextToken", Objective)
    stage = object.__new__(tokens.NextTokenStage)
    stage.strategy, stage._model = ENGINE, None
    stage.run = SimpleNamespace(data=SimpleNamespace(kind="chats"))
    stage._validation_batches = lambda: iter([None, None])
    assert stage.validate() == {"validation_loss_nats_per_token": 2.0}


def test_a_student_s_divergence():
    assert judge(Objective(), None, iter([None, None]), ENGINE, ["nats"]) == {"validation_nats": 2.0}


def test_bits_per_byte_count_the_token_that_ends_a_text(tmp_path):
    """A model that takes all ids for equally likely pays log2(ids) for every token and for the end of every text."""
    texts = [f"text number {number} of a few, each with its own end" for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts, 300).save(tmp_path / "tokenizer")
    words = (
        f"data.train={tmp_path / 'texts.jsonl'}",
        f"tokenizer.folder={tmp_path / 'tokenizer'}",
        f"out={tmp_path / 'out'}",
        "data.row_tokens=16",
        "data.validation_fraction=0.3",
        "model.vocabulary_size=512",
    )
    run = config.resolve(Run, parse_overrides(words))
    stage = tokens.NextTokenStage(run, ENGINE, lambda text: None)

    def uniform(ids_BT, document_BT, *, scored_N, target_N, weight_N):
        return math.log(512) * weight_N.sum()

    stage.begin(uniform, ENGINE)
    figures = stage.validate()
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    held_out = Shards(tmp_path / "out" / "shards" / "validation")
    said = [text for text in texts if is_held_out(text, held_out.meta["held_out_below"])]
    assert 0 < len(said) < 40 and len(said) == held_out.num_documents
    units = sum(len(tokenizer.encode(text)) + 1 for text in said)
    wanted = 9 * units / sum(len(text.encode()) for text in said)
    assert figures["validation_loss_nats_per_token"] == pytest.approx(math.log(512), rel=1e-6)
    assert figures["validation_bits_per_byte"] == pytest.approx(wanted, rel=1e-6)


def test_a_student_s_bits_per_byte(monkeypatch):
    """Nats over log 2, for each target, times targets for each byte."""
    stage = object.__new__(DistillStage)
    stage.strategy, stage._model, stage.objective = ENGINE, None, lambda: None
    stage.run = SimpleNamespace(data=SimpleNamespace(kind="documents"))
    stage._data, stage._held_out = SimpleNamespace(targets_per_byte=0.25), lambda: iter(())
    figures = {"validation_loss_nats_per_token": math.log(2) * 3.0}
    monkeypatch.setattr(distill, "judge", lambda *given: dict(figures))
    assert stage.validate()["validation_bits_per_byte"] == pytest.approx(0.75)
