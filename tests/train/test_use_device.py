"""Where a model answers and is measured: the device and dtype of chat, eval and generate."""

from __future__ import annotations

import pytest
import torch

from penjing.base.errors import UserError
from penjing.model.linear import Linear
from penjing.train.load_model import use_device


class Moved(torch.nn.Module):
    """Notes where it is moved to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(4, 4)
        self.places: list[torch.device] = []

    def to(self, place):
        self.places.append(place)
        return self


@pytest.mark.parametrize(
    ("has_bfloat16", "dtype", "wanted"),
    [
        (True, "auto", torch.bfloat16),
        (False, "auto", torch.float16),  # V100, T4, RTX 20
        (True, "float32", torch.float32),
        (True, "float16", torch.float16),
    ],
)
def test_a_gpu_is_used_where_there_is_one_in_the_dtype_of_training(monkeypatch, has_bfloat16, dtype, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if has_bfloat16 else (7, 5))
    model = Moved()
    assert use_device(model, "auto", dtype) == (torch.device("cuda", 0), wanted)
    assert model.places == [torch.device("cuda", 0)]
    assert model.layer.compute_dtype == (None if wanted == torch.float32 else wanted)


def test_a_cpu_stays_in_float32_unless_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    model = Moved()
    assert use_device(model) == (torch.device("cpu"), torch.float32) and model.layer.compute_dtype is None
    use_device(model, "cpu", "bfloat16")
    assert model.layer.compute_dtype == torch.bfloat16


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "auto"), ("quantum", "auto"), ("cpu", "int3")])
def test_what_is_not_there_is_one_line(monkeypatch, device, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError):
        use_device(Moved(), device, dtype)


def test_float16_on_a_cpu_is_said_to_be_slow(recwarn):
    use_device(Moved(), "cpu", "float32")
    assert not recwarn
    use_device(Moved(), "cpu", "float16")
    assert "float32" in str(recwarn.pop(UserWarning).message)
