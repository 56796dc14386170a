"""One token's way: from line 17 of a file, through a training run as everybody starts it, into a checkpoint.

The run is `penjing train pretrain` with its own packing, prefetch, Muon and loop. Then we walk the same way by hand,
from floor to floor, and compare each value with what is worked out here or with what the run left on the disk. We
follow the token 书, the seventh of its sentence.
"""

from __future__ import annotations

import json
import math
import tomllib

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from penjing.base import config
from penjing.base.seeds import derive
from penjing.data.formats import read_documents
from penjing.data.packing.best_fit import BestFitRows
from penjing.data.token_shards import TokenShards
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.kernels.orthogonalize import ROUNDS
from penjing.loader.batch_source import PackedSource
from penjing.loader.prefetch import Prefetch
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer
from penjing.objective.next_token import NextToken

PEOPLE = ["小明", "小红", "奶奶"]
THINGS = ["一只猫", "一只狗", "一朵花", "一条船", "一盏灯", "一本书", "一把伞"]
LINES = [f"{person}看见{thing}。" for thing in THINGS for person in PEOPLE]
SENTENCE = "小红看见一本书。"
SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
}
SEED, ROW_TOKENS, IDS = 5, 18, 400


@pytest.fixture
def run(penjing, tmp_path):
    """The folder of a run of two steps with four rows each, on 21 stories, one JSON record a line. Ours is line 17."""
    stories = tmp_path / "stories.jsonl"
    stories.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    shape = [f"model.{name}={value}" for name, value in {"vocab_size": IDS, **SHAPE}.items()]
    given = ["tokenizer.max_han_per_token=1", f"data.seq_len={ROW_TOKENS}", "data.val_fraction=0.05", "batch.size=4"]
    cpu = [
        "compute.device=cpu",
        "compute.dtype=float32",
        f"seed={SEED}",
        "max_steps=2",
        "checkpoint.every=1",
        "log.every=1",
    ]
    penjing("train", "pretrain", f"data.train={stories}", f"out={tmp_path / 'run'}", *shape, *given, *cpu)
    return tmp_path / "run"


def by_hand_muon(weight, gradient):
    """One first step of Muon: the gradient's nearest orthogonal matrix, at a rate of 0.02, made larger for tall ones.

    The momentum was zero. It becomes 5 % of the gradient, and Nesterov looks 5 % of the way from there to the gradient:
    both have the gradient's direction, and the orthogonal matrix forgets how long it was.
    """
    x = gradient.double()
    singular = torch.linalg.svdvals(x)
    x = x / (1.02 * singular.pow(8).sum() ** (1 / 8))  # no singular value is above 1 now
    for a, b, c in ROUNDS:
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    assert 0.65 < torch.linalg.svdvals(x)[0] < 1.35
    rows, columns = weight.shape
    return weight - 0.02 * max(1.0, rows / columns) ** 0.5 * x.float()


def by_hand_adamw(weight, gradient):
    """One first step of AdamW, at a rate of 0.003: both moments are the gradient's own."""
    return weight - 0.003 * gradient / (gradient.abs() + 1e-8)


def test_follow_a_token(run):
    # data/formats reads the file, and knows where each story came from.
    documents = list(read_documents([run.parent / "stories.jsonl"]))
    assert (documents[16].text, documents[16].line) == (SENTENCE, 17)

    # data/tokenizer has learned which bytes go together. With max_han_per_token=1 that is a token for each character
    # met often.
    tokenizer = Tokenizer.load(run / "tokenizer")
    ids = tokenizer.encode(SENTENCE)
    assert [tokenizer.token(index) for index in ids] == list(SENTENCE)
    book = ids[6]
    assert tokenizer.token(book) == "书"

    # data/token_shards has the ids of all stories one after the other, but for those held out by their hash.
    shards, held_out = TokenShards(run / "shards" / "train"), TokenShards(run / "shards" / "validation")
    assert shards.num_documents + held_out.num_documents == 21
    assert shards.num_tokens == 8 * shards.num_documents
    story = next(
        number
        for number, (start, end) in enumerate(zip(shards.start_D, shards.end_D, strict=True))
        if shards.token_N[start:end].tolist() == ids
    )

    # data/packing opens each story with the end-of-text token, which makes 9 positions, and lays two whole stories into
    # every row of 18. Every epoch has its own order of rows. Ours is the second of its row.
    rows = BestFitRows(shards, ROW_TOKENS, end_of_text=tokenizer.end_of_text, seed=derive(SEED, "order"))
    place = next(index for index in range(rows.rows_per_epoch) if story in rows.documents(index))
    assert rows.documents(place) == [story - 1, story]
    row = rows.row(place)
    assert row.ids_T[9:].tolist() == [tokenizer.end_of_text, *ids]
    assert row.target_T[9:].tolist() == [*ids, tokenizer.end_of_text]
    assert row.document_T.tolist() == [0] * 9 + [1] * 9

    # loader makes batches ready in a thread of its own. A step of four rows is two batches of two on a CPU; ours is
    # among them, and 书 is to be said at its position 15, having seen 小红看见一本.
    source = Prefetch(PackedSource(rows, micro_size=2), torch.device("cpu"))
    batches = [next(source), next(source)]
    source.close()
    ours, line = batches[place // 2], place % 2
    assert ours.ids_BT.shape == (2, ROW_TOKENS)
    assert ours.target_N.view(2, ROW_TOKENS)[line, 15] == book
    assert [batch.num_tokens for batch in batches] == [36, 36]

    # model/transformer: embed, one block, norm, head. A number for each token that could come next.
    model = Transformer(config.resolve(ModelConfig, tomllib.loads((run / "run.toml").read_text())["model"]))
    initialise(model, derive(SEED, "weights"))
    logits_BTV = model(ours.ids_BT, ours.document_BT)
    assert logits_BTV.shape == (2, ROW_TOKENS, IDS)

    # objective/next_token: -log p of what really came next, in nats, added up. The plain twin is cross entropy.
    objective = NextToken()
    nats = objective(model, ours).total
    logits_BTV.retain_grad()
    plain = cross_entropy(logits_BTV.flatten(0, 1), ours.target_N, reduction="sum")
    torch.testing.assert_close(nats, plain)
    # Its gradient: every token is pushed down by its probability, and 书 up by all that it lacks.
    plain.backward()
    probability_V = logits_BTV[line, 15].softmax(-1)
    pushed_V = probability_V.clone()
    pushed_V[book] -= 1
    torch.testing.assert_close(logits_BTV.grad[line, 15], pushed_V)

    # train/loop adds the gradients of both batches, of the mean over all 72 tokens.
    model.zero_grad()
    total = sum(objective(model, batch).total for batch in batches)
    (total / 72).backward()
    loss = float(total.detach()) / 72
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in logged if line["step"] == 1)
    assert first["loss"] == pytest.approx(loss)
    # A model that knows nothing yet gives every token about the same chance, 1 / V.
    assert loss == pytest.approx(math.log(IDS), abs=0.1)
    # If they are longer than 1 together they are shortened to it.
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert first["grad_norm"] == pytest.approx(norm)
    gradients = {name: gradient / max(1.0, norm) for name, gradient in gradients.items()}

    # optim: Muon takes the blocks' matrices, AdamW the embedding and the norms. The checkpoint has what came of it.
    # A block begins as the identity, with zeros in its two outputs: at first only these hear of the loss.
    saved = load_file(run / "checkpoints" / "step-00000001" / "model.safetensors")
    assert saved.keys() == gradients.keys()
    moved = {name for name, gradient in gradients.items() if gradient.count_nonzero()}
    matrices = {name for name, gradient in gradients.items() if name.startswith("blocks.") and gradient.dim() == 2}
    assert {name.split(".")[-2] for name in moved & matrices} == {"o_proj", "down_proj"}
    for name, before in model.state_dict().items():
        by_hand = by_hand_muon if name in matrices else by_hand_adamw
        after = by_hand(before, gradients[name]) if name in moved else before
        torch.testing.assert_close(saved[name], after, atol=2e-5, rtol=1e-4)

    # The model has learned: 书 is more likely now than it was.
    model.load_state_dict(saved)
    learned_V = model(ours.ids_BT, ours.document_BT)[line, 15]
    assert learned_V.softmax(-1)[book] > probability_V[book]
    # It foretells 书 from its own story alone: change the story before it, or what comes later, and nothing changes.
    changed_BT = ours.ids_BT.clone()
    changed_BT[line, :9] = changed_BT[line, 16:] = tokenizer.end_of_text
    torch.testing.assert_close(model(changed_BT, ours.document_BT)[line, 15], learned_V)
    # From what came before 书 in its story: change a token of that, and something does.
    changed_BT[line, 11] = book
    assert not torch.allclose(model(changed_BT, ours.document_BT)[line, 15], learned_V)
