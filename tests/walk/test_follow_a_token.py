"""One token's way: from line 17 of a file through every floor to one step of training.

These are the calls that a training run makes, in their order, with nothing between them. Each is checked against a
value worked out by hand or by a plain twin. We follow the token 书, the seventh of its sentence.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from penjing.data.formats import read_documents
from penjing.data.packing.concat import StreamRows
from penjing.data.token_shards import Shards, ShardWriter
from penjing.data.tokenizer.tokenizer import train_tokenizer
from penjing.loader.batch import collate
from penjing.loader.batch_source import PackedSource
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer
from penjing.objective.next_token import NextToken
from penjing.optim.schedule import Constant
from penjing.parallel.single import Single
from penjing.track.base import Trackers
from penjing.train.loop import TrainingContext, step
from penjing.train.throughput import Meter

PEOPLE = ["小明", "小红", "奶奶"]
THINGS = ["一只猫", "一只狗", "一朵花", "一条船", "一盏灯", "一本书", "一把伞"]
LINES = [f"{person}看见{thing}。" for thing in THINGS for person in PEOPLE]
SENTENCE = "小红看见一本书。"


def test_follow_a_token(tmp_path: Path) -> None:
    # A file of 21 stories, one JSON record a line. Ours is line 17.
    file = tmp_path / "stories.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))

    # text/records reads them, and knows where each came from.
    documents = list(read_documents([file]))
    assert (documents[16].text, documents[16].line) == (SENTENCE, 17)

    # text/tokenizer learns which bytes go together. With han_run=1 that is a token for each character met often.
    tokenizer = train_tokenizer(LINES, 400, han_run=1)
    ids = tokenizer.encode(SENTENCE)
    assert [tokenizer.token(index) for index in ids] == list(SENTENCE)
    book = ids[6]
    assert tokenizer.token(book) == "书"

    # text/shards writes the ids of all stories one after the other, two bytes each, and maps them back.
    writer = ShardWriter(tmp_path / "shards", kind="documents", vocabulary_size=tokenizer.size, about={})
    for document in documents:
        writer.add(tokenizer.encode(document.text), num_bytes=len(document.text.encode()))
    writer.close()
    shards = Shards(tmp_path / "shards")
    assert shards.num_tokens == 21 * 8
    assert shards.token_N[16 * 8 : 17 * 8].tolist() == ids

    # text/pack lays the stories end to end, each opened by the end-of-text token, and cuts a row every 12 tokens.
    # Ours is the 17th of 9 tokens: it opens at 16 x 9 = 144 = 12 x 12, which is where row 12 begins.
    rows = StreamRows(shards, 12, end_of_text=tokenizer.end_of_text, seed=1, shuffle=False)
    assert rows.rows_per_epoch == (21 * 9 - 1) // 12 == 15
    row = rows.row(12)
    following = tokenizer.encode(LINES[17])
    assert row.ids_T.tolist() == [tokenizer.end_of_text, *ids, tokenizer.end_of_text, *following[:2]]
    assert row.target_T.tolist() == [*ids, tokenizer.end_of_text, *following[:3]]
    assert row.document_T.tolist() == [16] * 9 + [17] * 3

    # feed stacks rows to a batch. Here are two: 书 is to be said at position 6 of the first, having seen 小红看见一本.
    batch = collate([rows.row(12), rows.row(13)])
    assert batch.ids_BT.shape == (2, 12)
    assert batch.target_N[6] == book
    assert batch.num_tokens == 24

    # model/transformer: embed, one block, norm, head. A number for each token that could come next.
    model = Transformer(
        ModelConfig(
            vocabulary_size=tokenizer.size,
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_size=8,
            mlp_size=24,
        )
    )
    initialise(model, seed=1)
    logits_BTV = model(batch.ids_BT, batch.document_BT)
    assert logits_BTV.shape == (2, 12, tokenizer.size)
    # 书 is foretold from its own story alone: change what comes later, and nothing changes for it.
    changed_BT = batch.ids_BT.clone()
    changed_BT[0, 7:] = tokenizer.end_of_text
    torch.testing.assert_close(model(changed_BT, batch.document_BT)[0, 6], logits_BTV[0, 6])
    # And the next story, in the same row, knows nothing of 书.
    changed_BT[0] = batch.ids_BT[0]
    changed_BT[0, 7] = tokenizer.end_of_text
    torch.testing.assert_close(model(changed_BT, batch.document_BT)[0, 9:], logits_BTV[0, 9:])

    # objective/next_token: -log p of what really came next, in nats, added up. The plain twin is cross entropy.
    objective = NextToken()
    nats = objective(model, batch).total
    torch.testing.assert_close(nats, cross_entropy(logits_BTV.flatten(0, 1), batch.target_N, reduction="sum"))
    assert objective.weight(batch) == 24
    # A model that knows nothing yet gives every token about the same chance, 1 / V.
    assert abs(nats / 24 - torch.tensor(float(tokenizer.size)).log()) < 0.1

    # train/loop takes one step. Plain descent at rate 0.5 makes it easy to follow: w - 0.5 d(nats / 24) / dw.
    twin = copy.deepcopy(model)
    strategy = Single(torch.device("cpu"))
    source = PackedSource(rows, micro_rows=2)
    source.restore({"next_row": 12})
    descent = torch.optim.SGD([{"params": list(model.parameters()), "peak": 0.5}], lr=0.5)
    parts = TrainingContext(
        strategy=strategy,
        model=strategy.wrap(model),
        objective=objective,
        source=source,
        optimizers=[descent],
        schedule=Constant(),
        trackers=Trackers([]),
        meter=Meter(flops_per_token=0.0, peak_flops_per_second=None),
        num_steps=1,
        accumulate=1,
        clip_norm=0.0,
    )
    taken = step(parts, 0)
    assert (taken.units, taken.tokens) == (24, 24)
    torch.testing.assert_close(taken.sums["loss"], nats.detach())

    cross_entropy(twin(batch.ids_BT, batch.document_BT).flatten(0, 1), batch.target_N).backward()
    for parameter, before in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, before - 0.5 * before.grad)

    # The model has learned: 书 is a little more likely now than it was.
    after_BTV = model(batch.ids_BT, batch.document_BT)
    assert after_BTV[0, 6].softmax(-1)[book] > logits_BTV[0, 6].softmax(-1)[book]
