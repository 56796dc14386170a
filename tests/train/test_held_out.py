"""Figures on what was held out, on devices that know no float64."""

from types import SimpleNamespace

import torch

from penjing.objective.base import Loss
from penjing.parallel.single import Single
from penjing.train import tokens
from penjing.train.taught import judge

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
    stage.engine, stage._model = ENGINE, None
    stage.run = SimpleNamespace(data=SimpleNamespace(kind="chats"))
    stage._validation_batches = lambda: iter([None, None])
    assert stage.validate() == {"validation_loss_nats_per_token": 2.0}


def test_a_student_s_divergence():
    assert judge(Objective(), None, iter([None, None]), ENGINE, ["nats"]) == {"validation_nats": 2.0}
