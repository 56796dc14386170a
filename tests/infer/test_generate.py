"""Generation with a cache, in batches, with every way to end."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from small_models import small_model

from penjing.base.errors import UserError
from penjing.infer import torch_forward as engine
from penjing.infer.generate import generate, make_engine
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling
from penjing.model.cast_cache import cache_casted_weights, casted_weights
from penjing.model.linear import Linear, set_compute_dtype

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3, 2], [3, 1, 4]]
DRAWN = Sampling(temperature=1.5)


@pytest.fixture(params=["qwen3", "llama"])
def model(request):
    # A tied table this wide says the same token over and over.
    return small_model(
        seed=3, noise=0.1, sharpen=6, architecture=request.param, vocab_size=37, hidden_size=24, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, max_position_embeddings=32, rope_theta=1e4,
        tie_word_embeddings=False,
    ).eval()  # fmt: skip


@torch.no_grad()
def by_hand(model, prompt, max_new_tokens, stop=()):
    """Greedy text without a cache: read everything again for every token."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        following = int(model(torch.tensor([ids]))[0, -1].argmax())
        if following in stop:
            break
        ids.append(following)
        if len(ids) == model.config.max_position_embeddings:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_reading_everything_again(model, prompt):
    written = generate(model, [prompt], max_new_tokens=15, stop=())
    assert written == [by_hand(model, prompt, 15)]
    assert len(set(written[0])) > 2, "a text of one token shows little"


def stops_for(model):
    """Ids that end some of the prompts' texts at different places."""
    texts = [by_hand(model, prompt, 15) for prompt in PROMPTS]
    return {texts[1][4], texts[2][9]}


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_batch_writes_what_each_prompt_writes_alone(model, rows):
    stop = stops_for(model)
    expected = [by_hand(model, prompt, 15, stop) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=15, stop=stop, rows=rows) == expected
    assert len({len(text) for text in expected}) > 1, "all ended at the same place: the test shows little"


def test_a_sequence_that_stops_at_once_is_empty(model):
    first = by_hand(model, PROMPTS[0], 1)[0]
    other = by_hand(model, PROMPTS[1], 5, {first})
    assert generate(model, PROMPTS[:2], max_new_tokens=5, stop={first}) == [[], other]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
def test_max_new_tokens_is_exact(model, max_new_tokens):
    written = generate(model, PROMPTS, max_new_tokens=max_new_tokens, stop=())
    assert [len(text) for text in written] == [max_new_tokens] * len(PROMPTS)


@pytest.mark.parametrize("max_new_tokens", [0, -3])
def test_no_tokens_asked_none_written(model, max_new_tokens):
    assert generate(model, PROMPTS, max_new_tokens=max_new_tokens, stop=()) == [[]] * len(PROMPTS)


def test_no_prompts_no_texts(model):
    assert generate(model, [], max_new_tokens=3, stop=()) == []


def test_prompt_and_answer_together_hold_at_most_max_tokens(model):
    prompts = [[1] * 31, [2] * 30, [3, 1, 4], [5] * 20]
    written = generate(model, prompts, max_new_tokens=100, stop=())
    assert [len(prompt) + len(text) for prompt, text in zip(prompts, written, strict=True)] == [32] * 4
    assert written == [by_hand(model, prompt, 100) for prompt in prompts]


def test_a_full_neighbour_does_not_cut_a_short_prompt(model):
    alone = generate(model, [[3, 1, 4]], max_new_tokens=12, stop=())
    assert generate(model, [[1] * 30, [3, 1, 4]], max_new_tokens=12, stop=())[1] == alone[0]


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        ([[1, 2], []], "prompt: is empty; wanted at least one token"),
        ([[1], [2] * 32], "prompt: too long; got 32 tokens; wanted under 32"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(model, prompts, line):
    with pytest.raises(UserError) as caught:
        generate(model, prompts, max_new_tokens=3, stop=())
    assert str(caught.value) == line


def test_drawing_repeats_with_its_seed_and_leaves_the_global_state(model):
    before = torch.get_rng_state()
    texts = [generate(model, PROMPTS, max_new_tokens=12, stop=(), sampling=DRAWN, seed=seed) for seed in (4, 4, 5)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][4], "the same prompt twice in a batch draws twice"
    assert torch.equal(before, torch.get_rng_state())


def test_the_same_prompt_draws_anew_in_the_next_batch(model):
    texts = generate(model, [PROMPTS[0]] * 4, max_new_tokens=12, stop=(), sampling=DRAWN, seed=4, rows=2)
    assert texts[:2] != texts[2:]


def test_no_gradient_is_kept_and_grad_mode_is_left_alone(model):
    with make_engine(model) as engine:
        engine.submit(Request(prompt=PROMPTS[0], max_new_tokens=3))
        while not engine.idle:
            engine.step()
            assert torch.is_grad_enabled()


def test_bfloat16_products_write_too(model):
    set_compute_dtype(model, torch.bfloat16)
    written = generate(model, PROMPTS, max_new_tokens=5, stop=())
    assert [len(text) for text in written] == [5] * len(PROMPTS)


def test_weights_are_cast_once_to_what_every_product_would_cast_them(model, monkeypatch):
    set_compute_dtype(model, torch.bfloat16)
    options = {"max_new_tokens": 15, "stop": ()}
    written = generate(model, PROMPTS, **options)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "cache_casted_weights", lambda model: nullcontext())
        assert generate(model, PROMPTS, **options) == written
    ids_BT, layers = torch.tensor([PROMPTS[1]]), [layer for layer in model.modules() if type(layer) is Linear]
    with torch.no_grad():
        before = model(ids_BT)
    with (
        cache_casted_weights(model),
        cache_casted_weights(model),
    ):  # the second finds nothing to do, and takes nothing away
        pass
    with cache_casted_weights(model):
        assert len(casted_weights(model)) == len(layers) and model.head is not None
        with torch.no_grad():
            assert torch.equal(model(ids_BT), before)
            for layer in layers:
                layer.weight.zero_()
            assert torch.equal(model(ids_BT), before)
        assert not model(ids_BT).any()  # with gradients the weights themselves are asked
    assert not casted_weights(model)


def test_models_are_compiled_again_in_whatever_order_generation_ends():
    import torch._dynamo.eval_frame as dynamo

    first, second = (cache_casted_weights(small_model()) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dynamo._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert dynamo._stance.stance == "default"
