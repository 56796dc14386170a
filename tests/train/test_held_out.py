"""Figures on what was held out, on devices that know no float64."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from penjing.base import config
from penjing.base.config import parse_overrides
from penjing.data.corpus import place_of
from penjing.data.token_shards import TokenShards
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.objective.base import Loss
from penjing.parallel.single import Single
from penjing.train.config import Run
from penjing.train.stages import distill
from penjing.train.stages import next_token as tokens
from penjing.train.stages.distill import DistillStage
from penjing.train.stages.held_out import held_out_means

ENGINE = Single(torch.device("cpu"))


class OnApple(torch.Tensor):
    """Stands for a tensor of an Apple GPU."""

    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


class Anywhere:
    """A batch of which nothing is asked."""

    def to(self, device):
        return self


class Objective:
    """Its sums are on such a device: six nats over three tokens in every batch."""

    def __call__(self, model, batch):
        total = torch.tensor(6.0).as_subclass(OnApple)
        return Loss(total, {"loss": total})

    def weight(self, batch):
        return torch.tensor(3.0).as_subclass(OnApple)


def test_a_model_s_loss(monkeypatch):
    monkeypatch.setattr(tokens, "NextToken", Objective)
    stage = object.__new__(tokens.NextTokenStage)
    stage.strategy, stage.model = ENGINE, None
    stage.run = config.resolve(Run, parse_overrides(["data.format=chats", "batch.micro_size=1"]))
    stage.held_out = SimpleNamespace(rows_per_epoch=2, row=lambda index: index)
    monkeypatch.setattr(tokens, "collate", lambda rows: Anywhere())
    assert stage.validate() == {"val_loss": 2.0}


def test_a_student_s_divergence():
    found = held_out_means(Objective(), None, [Anywhere(), Anywhere()], ENGINE, ["loss"])
    assert found == {"val_loss": 2.0}


def test_bits_per_byte_count_the_token_that_ends_a_text(tmp_path):
    """A model that takes all ids for equally likely pays log2(ids) for every token and for the end of every text."""
    texts = [f"text number {number} of a few, each with its own end" for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts, 300).save(tmp_path / "tokenizer")
    words = (
        f"data.train={tmp_path / 'texts.jsonl'}",
        f"tokenizer.path={tmp_path / 'tokenizer'}",
        f"out={tmp_path / 'out'}",
        "data.seq_len=16",
        "data.val_fraction=0.3",
        "model.vocab_size=512",
    )
    run = config.resolve(Run, parse_overrides(words))
    stage = tokens.NextTokenStage(run, ENGINE)
    stage.prepare_data()
    stage.prepare_rows()

    def uniform(ids_BT, document_BT, *, score, scored_N):
        return math.log(512) * score.weight_N.sum()

    stage.setup(uniform)
    figures = stage.validate()
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    held_out = TokenShards(tmp_path / "out" / "shards" / "validation")
    said = [text for text in texts if place_of(text) < held_out.meta["held_out_below"]]
    assert 0 < len(said) < 40 and len(said) == held_out.num_documents
    units = sum(len(tokenizer.encode(text)) + 1 for text in said)
    wanted = 9 * units / sum(len(text.encode()) for text in said)
    assert figures["val_loss"] == pytest.approx(math.log(512), rel=1e-6)
    assert figures["val_bits_per_byte"] == pytest.approx(wanted, rel=1e-6)


def test_a_student_s_bits_per_byte(monkeypatch):
    """Nats over log 2, for each target, times targets for each byte."""
    stage = object.__new__(DistillStage)
    stage.strategy, stage.model, stage.objective = ENGINE, None, lambda: None
    stage._data, stage._held_out = object.__new__(tokens.NextTokenStage), lambda: iter(())
    stage._data.run, stage._data.targets_per_byte = config.resolve(Run), 0.25
    figures = {"val_loss": math.log(2) * 3.0}
    monkeypatch.setattr(distill, "held_out_means", lambda *given: dict(figures))
    assert stage.validate()["val_bits_per_byte"] == pytest.approx(0.75)
