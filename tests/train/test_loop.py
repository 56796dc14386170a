"""The loop learns, divides by the right number, and stops when the loss is no number."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import small_model

from penjing.base.errors import UserError
from penjing.loader.batch import Batch
from penjing.loader.batch_source import Source
from penjing.objective.next_token import NextToken
from penjing.optim.adamw import AdamW
from penjing.optim.schedule import Constant, WarmupStableDecay
from penjing.parallel.grad_scaler import LossScaler
from penjing.parallel.single import Single
from penjing.track.base import Tracker, Trackers
from penjing.train.loop import TrainingContext, TrainState, train
from penjing.train.nonfinite_guard import NonFiniteGuard, PendingStep
from penjing.train.throughput import Meter

LOOP = Path(__file__).parents[2] / "src/penjing/train/loop.py"


class Repeat(Source):
    """The same batches over and over."""

    def __init__(self, batches):
        self.batches, self.index = batches, 0

    def __next__(self):
        self.index += 1
        return self.batches[(self.index - 1) % len(self.batches)]

    def state(self):
        return {}

    def restore(self, state):
        pass


class Memory(Tracker):
    def __init__(self):
        self.seen = []

    def log(self, step, figures):
        self.seen.append((step, dict(figures)))


def batch(rows, tokens=12, scored=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (rows, tokens), generator=generator)
    target = torch.randint(0, 50, (rows * tokens,), generator=generator)
    chosen = torch.arange(rows * tokens) if scored is None else torch.arange(scored)
    return Batch(
        ids_BT=ids,
        document_BT=torch.zeros_like(ids),
        scored_N=chosen,
        target_N=target[chosen],
        weight_N=torch.ones(len(chosen)),
        num_tokens=rows * tokens,
    )


def parts(batches, *, steps, accumulate=1, rate=3e-3):
    model = small_model(noise=0, vocab_size=50, hidden_size=32, head_dim=16, intermediate_size=96)
    strategy = Single(torch.device("cpu"))
    memory = Memory()
    made = TrainingContext(
        strategy=strategy,
        model=strategy.wrap(model),
        objective=NextToken(),
        source=Repeat(batches),
        optimizers=AdamW(learning_rate=rate, weight_decay=0.0).build(model),
        schedule=Constant(),
        trackers=Trackers([memory]),
        meter=Meter(1.0, None),
        num_steps=steps,
        accumulate=accumulate,
        max_grad_norm=1.0,
    )
    return made, model, memory


def descent(model):
    return [torch.optim.SGD([{"params": list(model.parameters()), "peak": 0.5}], lr=0.5)]


def test_overfits_one_batch():
    made, _, memory = parts([batch(2)], steps=150, rate=1e-2)
    train(made, TrainState())
    assert memory.seen[0][1]["loss"] > 3.5
    assert memory.seen[-1][1]["loss"] < 0.1


def test_ragged_accumulation_is_exact():
    """Micro-batches of 5 and 19 scored positions give the gradients of one batch of 24, not the mean of two means."""
    small, large = batch(2, scored=5, seed=1), batch(2, scored=19, seed=2)
    together = Batch(
        ids_BT=torch.cat((small.ids_BT, large.ids_BT)),
        document_BT=torch.zeros(4, 12, dtype=torch.long),
        scored_N=torch.cat((small.scored_N, large.scored_N + 24)),
        target_N=torch.cat((small.target_N, large.target_N)),
        weight_N=torch.ones(24),
        num_tokens=48,
    )
    cut, cut_model, cut_memory = parts([small, large], steps=3, accumulate=2)
    whole, whole_model, whole_memory = parts([together], steps=3)
    # Plain gradient steps: AdamW would blow up the rounding of gradients near zero.
    train(replace(cut, optimizers=descent(cut_model)), TrainState())
    train(replace(whole, optimizers=descent(whole_model)), TrainState())
    for mine, theirs in zip(cut_model.parameters(), whole_model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    for (_, mine), (_, theirs) in zip(cut_memory.seen, whole_memory.seen, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)


def test_a_step_moves_no_further_than_the_clipped_norm():
    """Plain descent: the weights move by the rate times the norm of the gradients, which is clipped to 0.25."""
    made, model, memory = parts([batch(2)], steps=1)
    before = torch.cat([value.detach().flatten() for value in model.parameters()])
    train(replace(made, optimizers=descent(model), max_grad_norm=0.25), TrainState())
    after = torch.cat([value.detach().flatten() for value in model.parameters()])
    assert memory.seen[0][1]["grad_norm"] > 0.3
    assert float((after - before).norm()) == pytest.approx(0.5 * 0.25, rel=1e-4)


def test_each_step_has_the_rate_of_its_place():
    """Two steps of warm-up out of four, then down to nothing over two: 1/2, 1, 1 and 1/2 of the peak."""
    made, model, memory = parts([batch(2)], steps=4)
    optimizers, used = descent(model), []
    plain_step = optimizers[0].step
    optimizers[0].step = lambda: used.append(optimizers[0].param_groups[0]["lr"]) or plain_step()
    schedule = WarmupStableDecay(warmup_ratio=0.5, decay_ratio=0.5)
    train(replace(made, optimizers=optimizers, schedule=schedule), TrainState())
    assert used == [0.25, 0.5, 0.5, 0.25]
    assert [figures["learning_rate"] for _, figures in memory.seen] == used


def test_gradients_travel_between_ranks_with_the_last_pass_of_a_step():
    made, _, _ = parts([batch(2)], steps=2, accumulate=3)
    told, plain = [], made.strategy.micro_step
    made.strategy.micro_step = lambda *, last: told.append(last) or plain(last=last)
    train(made, TrainState())
    assert told == [False, False, True] * 2


def test_what_was_summed_before_a_checkpoint_goes_on_in_one_rank():
    """Else the means after it would count it once for each rank."""
    saved = {"step": 3, "sums": {"loss": 12.0}, "units": 6.0}
    shares = []
    for rank in (0, 1):
        strategy = Single(torch.device("cpu"))
        strategy.rank = rank
        restored = TrainState()
        restored.restore(saved, strategy)
        assert (restored.step, restored.units) == (3, 6.0)
        shares.append(restored.sums["loss"].item())
    assert shares == [12.0, 0.0]


def test_a_loss_that_is_no_number_ends_the_run_with_a_clear_line():
    bad = replace(batch(2), weight_N=torch.full((24,), float("nan")))
    made, _, _ = parts([bad], steps=3)
    with pytest.raises(UserError, match=r"not finite in 3 steps in a row, up to step 3.*learning_rate"):
        train(made, TrainState())


def test_what_is_due_happens_at_its_step_and_at_the_end():
    happened = []
    made, _, _ = parts([batch(2)], steps=7)
    made = replace(
        made,
        validate_every=3,
        save_every=2,
        sample_every=5,
        validate=lambda: happened.append("validate") or {"val_loss": 1.0},
        save=lambda state, wait: happened.append(("save", state["step"])) is None,
        sample=lambda step: happened.append(("sample", step)),
    )
    figures = train(made, TrainState())
    saves = [entry[1] for entry in happened if entry[0] == "save"]
    assert saves == [2, 4, 6, 7]
    assert happened.count("validate") == 3
    assert [entry for entry in happened if entry[0] == "sample"] == [("sample", 5), ("sample", 7)]
    assert figures == {"val_loss": 1.0}


def test_a_run_that_saves_nothing_on_its_way_saves_its_end():
    saves = []
    made, _, _ = parts([batch(2)], steps=2)
    train(replace(made, save=lambda state, wait: saves.append((state["step"], wait)) is None), TrainState())
    assert saves == [(2, True)]


def test_a_bad_step_has_no_part_in_the_figures():
    """Of three steps the second's loss is no number: what is logged is the mean of the other two."""
    fine, bad = batch(2), replace(batch(2), weight_N=torch.full((24,), float("nan")))
    alone, alone_model, alone_memory = parts([fine], steps=2)
    train(replace(alone, optimizers=descent(alone_model), log_every=2), TrainState())
    made, model, memory = parts([fine, bad, fine], steps=3)
    train(replace(made, optimizers=descent(model), log_every=3), TrainState())
    found, wanted = memory.seen[-1][1], alone_memory.seen[-1][1]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["skipped_steps"] == 1


def test_what_may_take_any_time_is_told_beforehand():
    told = []
    made, _, _ = parts([batch(2)], steps=3)
    made = replace(
        made,
        validate_every=2,
        save_every=3,
        validate=lambda: told.append("validate") or {},
        save=lambda state, wait: told.append("save") is None,
        report_progress=lambda step, longest_seconds: told.append((step, longest_seconds > 0)),
    )
    train(made, TrainState())
    first, last = [(0, False), (1, True), (2, False), "validate"], [(3, False), "validate", (3, False), "save"]
    assert told == [*first, (2, True), *last]


def test_figures_of_earlier_weights_do_not_stand_for_the_last():
    made, _, memory = parts([batch(2)], steps=4)
    found = iter([{"val_loss": 1.0}, {}])
    made = replace(made, validate_every=2, validate=lambda: next(found))
    assert train(made, TrainState()) == {}
    assert [step for step, figures in memory.seen if "val_loss" in figures] == [2]


def test_a_step_that_is_not_yet_known_to_be_bad_is_looked_at_before_it_is_saved():
    class Late(NonFiniteGuard):
        """As on a GPU: the host learns of a step while the next one runs."""

        def observe(self, step, bad, loss, norm, samples):
            self.flush()
            if step == 2:
                bad = torch.ones(())
            self._waiting.append(PendingStep(step, torch.stack([bad, torch.zeros(()), loss, norm]), samples, None))
            return "go on"

    saves = []
    made, _, _ = parts([batch(2)], steps=5)
    made = replace(made, save_every=2, guard=Late(), save=lambda state, wait: saves.append(state["step"]) is None)
    train(made, TrainState())
    assert saves == [3, 4, 5]


def test_the_scale_of_the_loss_is_shown():
    made, _, memory = parts([batch(2)], steps=1)
    scaler = LossScaler(torch.device("cpu"), init_scale=8.0)
    train(replace(made, extra_metrics=[scaler.metrics]), TrainState())
    assert memory.seen[-1][1]["loss_scale"] == 8.0


def test_the_loop_stays_short():
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) < 250
