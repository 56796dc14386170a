"""Out of memory: the same samples in the same order, in smaller passes; and a validation never ends a run."""

import warnings
from dataclasses import replace

import pytest
import torch
from reliability_batches import make_batch
from test_bad_steps import make, same

from penjing.base.errors import UserError, is_out_of_memory
from penjing.loader.batch_source import Source
from penjing.objective.next_token import NextToken
from penjing.train.batch_geometry import micro_sizes
from penjing.train.loop import TrainState, train
from penjing.train.oom_recovery import ResizableBatchSource, retry_on_oom


class Rows(Source):
    """`size` rows at a time of an endless stream; each row is a batch of its own, put together."""

    def __init__(self, size):
        self.size, self.next = size, 0

    def __next__(self):
        rows = [make_batch(number, rows=1) for number in range(self.next, self.next + self.size)]
        self.next += self.size
        return replace(
            rows[0],
            ids_BT=torch.cat([row.ids_BT for row in rows]),
            document_BT=torch.cat([row.document_BT for row in rows]),
            target_N=torch.cat([row.target_N for row in rows]),
            weight_N=torch.cat([row.weight_N for row in rows]),
            num_tokens=8 * self.size,
        )

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


class Small(NextToken):
    """A device with room for so many rows at once, from some call on."""

    def __init__(self, room, begins=0):
        super().__init__()
        self.room, self.begins, self.calls, self.seen = room, begins, 0, []

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls > self.begins and len(batch.ids_BT) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.seen.append(batch.ids_BT)
        return super().__call__(model, batch)


@pytest.mark.parametrize(("rows", "room", "passes"), [(8, 8, 1), (8, 4, 2), (8, 3, 4), (8, 1, 8), (6, 2, 3), (9, 3, 3)])
def test_passes_become_smaller_and_the_rows_stay(rows, room, passes):
    objective = Small(room, begins=1)  # the first step still fits, as it does until memory is broken into pieces
    feed = ResizableBatchSource(Rows, rows)
    parts, model, _ = make(objective=objective, batches=feed, steps=4)
    parts = replace(parts, optimizers=[torch.optim.SGD([{"params": list(model.parameters()), "peak": 0.1}], lr=0.1)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(parts, TrainState())
    assert feed.split == passes
    assert any("out of memory" in str(one.message) for one in said) == (passes > 1)
    seen = torch.cat(objective.seen)
    assert torch.equal(seen, torch.cat([make_batch(number, rows=1).ids_BT for number in range(4 * rows)]))
    expected, reference, _ = make(batches=ResizableBatchSource(Rows, rows), steps=4)
    expected = replace(
        expected, optimizers=[torch.optim.SGD([{"params": list(reference.parameters()), "peak": 0.1}], lr=0.1)]
    )
    train(expected, TrainState())
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_below_a_prime_comes_the_next_divisor_of_the_share():
    """Two passes of 28 of a share of 56: 28, 14, 7, then 4 and not 1. Each step still has the same 56 rows."""
    objective, feed = Small(5), ResizableBatchSource(Rows, 28, sizes=micro_sizes(56))
    parts, model, _ = make(objective=objective, batches=feed, accumulate=2, steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(parts, TrainState())
    assert (feed.micro_size, feed.split) == (4, 7)
    assert {len(ids_BT) for ids_BT in objective.seen} == {4}
    rows = torch.cat(objective.seen)
    assert torch.equal(rows, torch.cat([make_batch(number, rows=1).ids_BT for number in range(3 * 56)]))


def test_the_run_is_the_one_begun_with_small_passes_bit_for_bit():
    parts, model, _ = make(objective=Small(2), batches=ResizableBatchSource(Rows, 8), steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(parts, TrainState())
    other, reference, _ = make(batches=ResizableBatchSource(Rows, 2), accumulate=4, steps=4)
    train(other, TrainState())
    assert same(list(model.parameters()), list(reference.parameters()))


def test_one_row_that_does_not_fit_is_an_error_that_says_so():
    parts, _, _ = make(objective=Small(0), batches=ResizableBatchSource(Rows, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match="out of memory even with a micro-batch of 1"):
            train(parts, TrainState())


def test_units_that_belong_together_stay_in_one_pass():
    feed = ResizableBatchSource(Rows, 12, sizes=micro_sizes(12, 3))
    start = feed.state()
    sizes = []
    while feed.shrink(start):
        sizes.append(feed.micro_size)
    assert sizes == [6, 3]
    parts, _, _ = make(objective=Small(2), batches=ResizableBatchSource(Rows, 12, sizes=micro_sizes(12, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match="out of memory even with a micro-batch of 3"):
            train(parts, TrainState())


def test_a_mixture_balanced_over_passes_is_told_that_they_are_smaller():
    for exact, line in (
        (True, "gradients unchanged"),
        (False, "balance loss is computed over each pass"),
    ):
        parts, _, _ = make(objective=Small(2), batches=ResizableBatchSource(Rows, 4, exact=exact), steps=1)
        with pytest.warns(UserWarning, match=line):
            train(parts, TrainState())


def test_what_is_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_other_errors_are_not_tried_again():
    tries = []

    def work():
        tries.append(1)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        retry_on_oom(work, lambda said: None)
    assert tries == [1]


@pytest.mark.parametrize("room", [4, 1, 0])
def test_a_validation_shrinks_or_is_left_out(room):
    from types import SimpleNamespace

    from penjing.parallel.single import Single
    from penjing.train.config import BatchSettings, Run
    from penjing.train.oom_recovery import validate_with_retry

    sizes = []

    class Stage:
        run = Run(batch=BatchSettings(size=8, micro_size=8))

        def validate(self):
            size = self.run.batch.micro_size
            sizes.append(size)
            if size > room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return {"val_loss": 1.0}

    stage = SimpleNamespace(run=Stage.run, strategy=Single(torch.device("cpu")))
    stage.validate = lambda: Stage.validate(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figures = validate_with_retry(stage)
    assert sizes == {4: [8, 4], 1: [8, 4, 2, 1], 0: [8, 4, 2, 1]}[room]
    assert figures == ({"val_loss": 1.0} if room else {})
