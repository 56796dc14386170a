"""Small models that say something, and what stands around them in a run; many folders of tests use these."""

import torch

from penjing.infer.sample import Rows
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer
from penjing.parallel.single import Single
from penjing.train.checkpointer import Checkpointer
from penjing.train.config import CheckpointSettings

CPU = torch.device("cpu")


def sizes(vocabulary, width, layers, heads, kv, head, mlp, context=64):
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("intermediate_size", "max_position_embeddings")
    return dict(zip(names, (vocabulary, width, layers, heads, kv, head, mlp, context), strict=True))


SHAPE = sizes(24, 16, 2, 2, 1, 8, 24)


def small_model(*, seed=0, noise=0.3, sharpen=1, **changes):
    """A model of SHAPE with these changes. With noise, as a fresh model's blocks say nothing: they begin at zero.

    sharpen: makes matrices so many times larger, and what is foretold surer.
    """
    model = Transformer(ModelConfig(**{**SHAPE, **changes}))
    initialise(model, seed)
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
        parameter.data *= sharpen if parameter.ndim > 1 else 1
    return model


def drawn_model(*, seed, noise, **shape):
    """Every weight drawn, norms around 1: biases and corrections say something too."""
    model = Transformer(ModelConfig(**shape))
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        drawn = torch.randn(value.shape, generator=generator)
        value.copy_(noise * drawn if value.ndim > 1 else 0.3 * drawn + 1)
    return model.eval()


def rows_of(samplings, score_temperature=1.0):
    """Rows that are drawn so, in this order."""
    rows = Rows.empty(len(samplings))
    for row, sampling in enumerate(samplings):
        rows.put(row, sampling, score_temperature)
    return rows


class NumberTokenizer:
    """Writes ids as numbers; 0 ends an answer."""

    stop = frozenset({0})

    def decode(self, ids):
        return " ".join(map(str, ids))


def make_checkpointer(folder, model, optimizers=(), *, stateful=None, record=lambda incident: None):
    """What saves such a model, on one CPU."""
    return Checkpointer(
        folder,
        CheckpointSettings(),
        Single(CPU),
        model=model,
        optimizers=list(optimizers),
        stateful=stateful or {},
        record=record,
    )
