"""Start embeddings from neighbours in the text, beside a plain computation."""

import numpy as np
import pytest
import torch

from penjing.model import cooccurrence
from penjing.model.cooccurrence import CONTEXT_POWER, PRIOR, SPECTRUM_POWER, STD, WINDOW, cooccurrence_embedding
from penjing.model.init import initialise
from penjing.model.transformer import Transformer

VOCABULARY, WIDTH = 24, 8  # so few ids that the randomized decomposition is exact


def some_text(num_tokens: int = 4000) -> np.ndarray:
    """Tokens of which each has a few usual successors; 22 and 23 never occur."""
    rng = np.random.default_rng(0)
    ids = [0]
    for draw in rng.integers(0, 4, num_tokens):
        ids.append(int(ids[-1] * 5 + draw * draw) % 22)
    return np.array(ids)


def plain_gram(ids_N: np.ndarray) -> np.ndarray:
    """Inner products of the rows, by dense matrices in float64, unscaled."""
    parts = []
    for distance in range(1, WINDOW + 1):
        count = np.zeros((VOCABULARY, VOCABULARY))
        for first, second in zip(ids_N[:-distance], ids_N[distance:], strict=True):
            count[first, second] += 1
        for one in (count, count.T):
            chance = one.sum(0) ** CONTEXT_POWER / (one.sum(0) ** CONTEXT_POWER).sum()
            with np.errstate(divide="ignore", invalid="ignore"):
                pmi = np.log((one + PRIOR * chance) / ((one.sum(1, keepdims=True) + PRIOR) * chance))
            parts.append(np.where(one > 0, np.maximum(pmi, 0), 0) / distance**0.5)
    vectors, values, _ = np.linalg.svd(np.concatenate(parts, 1), full_matrices=False)
    rows = vectors[:, :WIDTH] * values[:WIDTH] ** SPECTRUM_POWER
    return rows @ rows.T


def test_rows_have_the_inner_products_of_the_plain_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooccurrence, "NOISE_STD", 0.0)
    state = torch.get_rng_state()
    embedding_VD = cooccurrence_embedding(some_text(), VOCABULARY, WIDTH, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert embedding_VD.shape == (VOCABULARY, WIDTH) and embedding_VD.dtype == torch.float32
    assert embedding_VD.square().mean().sqrt() == pytest.approx(STD, rel=1e-5)
    expected, found = plain_gram(some_text()), (embedding_VD @ embedding_VD.T).double().numpy()
    assert found == pytest.approx(expected * np.trace(found) / np.trace(expected), abs=1e-5)
    assert torch.equal(embedding_VD, cooccurrence_embedding(some_text(), VOCABULARY, WIDTH, seed=1))


def test_tokens_with_the_same_neighbours_begin_alike() -> None:
    ids_N = some_text()
    twin = np.where((ids_N == 5) & (np.random.default_rng(1).random(len(ids_N)) < 0.5), 23, ids_N)
    embedding_VD = torch.nn.functional.normalize(cooccurrence_embedding(twin, VOCABULARY, WIDTH, seed=1), dim=1)
    likeness_V = embedding_VD @ embedding_VD[23]
    likeness_V[23] = -1
    assert likeness_V.argmax() == 5 and likeness_V[5] > 0.9


def test_a_text_of_one_token_gives_noise_alone() -> None:
    embedding_VD = cooccurrence_embedding(np.zeros(100, np.int64), VOCABULARY, WIDTH, seed=1)
    assert embedding_VD.isfinite().all() and embedding_VD.std() < 2 * cooccurrence.NOISE_STD


@pytest.mark.parametrize(("vocab_size", "width"), [(28, 64), (3, 2)])
def test_a_width_of_more_than_the_ids_and_hardly_any_text(vocab_size: int, width: int) -> None:
    embedding_VD = cooccurrence_embedding(some_text()[:40] % vocab_size, vocab_size, width, seed=1)
    assert embedding_VD.shape == (vocab_size, width) and embedding_VD.isfinite().all()


def test_the_other_weights_are_those_of_a_normal_start_and_the_first_logits_are_small(make_model) -> None:
    config = make_model().config
    normal, made = Transformer(config), Transformer(config)
    initialise(normal, 5)
    embedding_VD = cooccurrence_embedding(some_text() % config.vocab_size, config.vocab_size, config.hidden_size, 1)
    initialise(made, 5, embedding_VD=embedding_VD)
    assert torch.equal(made.embed.weight, embedding_VD)
    for name, value in made.state_dict().items():
        assert name in ("embed.weight", "norm.weight") or torch.equal(value, normal.state_dict()[name]), name
    ids_BT = torch.arange(12)[None] % config.vocab_size
    first, usual = (model(ids_BT).std().item() for model in (made, normal))
    assert first == pytest.approx(usual, rel=0.5)
