"""Choose how a model's passes run in the engine."""

from __future__ import annotations

from penjing.base.errors import UserError
from penjing.infer import cpu_forward
from penjing.infer.forward import Forward, Weights
from penjing.infer.torch_forward import TorchForward
from penjing.model.transformer import Transformer


def make_forward(model: Transformer, *, num_slots: int, max_tokens: int, weights: Weights = "auto") -> Forward:
    """The fastest `Forward` for this model on its device."""
    reason = cpu_forward.supports(model)
    if not reason:
        return cpu_forward.CpuForward(model, num_slots=num_slots, max_tokens=max_tokens, weights=weights)
    if weights != "auto":
        raise UserError(f"only supported by the C kernels for CPUs: {reason}", where="weights", got=weights)
    return TorchForward(model, num_slots=num_slots, max_tokens=max_tokens)
