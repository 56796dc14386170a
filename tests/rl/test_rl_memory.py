"""Where memory does not suffice to write answers: fewer at once, the same ones; and a round's cost in a checkpoint."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from small_models import small_model
from test_rl_stage import TURNS, base, make_source, policy, same, stop_after, train, words
from user_errors import raises_user_error

from penjing.infer.engine import Engine
from penjing.rl import rollout_source as source_file
from penjing.rl.rollout_buffer import RolloutBuffer
from penjing.train.stages.reference import answer_log_probs

__all__ = ["base", "words"]  # fixtures


class Device:
    """One that holds so many sequences at once; `asked` is what was tried."""

    def __init__(self, monkeypatch, most):
        self.most, self.asked = most, []
        step = Engine.step

        def limited(engine):
            self.asked.append(engine.capacity)
            if engine.capacity > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return step(engine)

        monkeypatch.setattr(Engine, "step", limited)


def said_in(work):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("changes", [{}, TURNS])
@pytest.mark.parametrize("most", [5, 1])
def test_fewer_slots_write_the_same_answers(monkeypatch, changes, most):
    settings = policy(rollout=changes)
    whole = make_source(settings)
    expected = [next(whole) for _ in range(4)]
    assert "slots" not in whole.position()
    device = Device(monkeypatch, most)
    source = make_source(settings)
    found = []
    said = said_in(lambda: found.extend(next(source) for _ in range(4)))
    for mine, theirs in zip(found, expected, strict=True):
        same(mine, theirs)
        assert torch.equal(mine.values["behaviour"], theirs.values["behaviour"])  # to the last bit
    slots = {5: 3, 1: 1}[most]  # of the 12 answers of a round; 6, 3 (1): a half each time
    assert source.sampler.slots == slots
    assert len([line for line in said if "out of memory" in line]) == 1
    assert len({number for number in device.asked if number > most}) == {5: 2, 1: 3}[most]
    # The second round did not try again, and neither does a run that is taken up from its state.
    assert device.asked.count(12) == 1
    state = json.loads(json.dumps(source.state()))
    resumed = make_source(settings)
    resumed.restore(state)
    assert resumed.sampler.slots == slots
    device.asked.clear()
    next(resumed)
    assert set(device.asked) == {slots}
    # Going back to before memory ran out does not bring the slots back.
    resumed.restore({**state, "slots": 64})
    assert resumed.sampler.slots == slots


def test_one_slot_that_does_not_fit_is_an_error_with_its_remedy(monkeypatch):
    device = Device(monkeypatch, 0)
    with raises_user_error(where="objective.rollout.max_new_tokens", got=6) as caught:
        next(make_source(policy()))
    assert caught.value.where == "objective.rollout.max_new_tokens"
    assert device.asked == [12, 6, 3, 1]


def test_a_reference_scores_fewer_rows_at_once():
    frozen, settings = small_model(), policy(kl_coef=0.1, rollout={"num_generations": 24})  # several rows a prompt
    rows, most = [], 9

    def reference(batch):
        rows.append(len(batch.ids_BT))
        if rows[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return answer_log_probs(frozen, batch)

    expected = next(make_source(settings, reference=reference))
    assert max(rows) > 1
    most = 1
    source = make_source(settings, reference=reference)
    same(next(source), expected)
    assert source.sampler.scored_rows == 1
    most = 0
    with raises_user_error(where="data.seq_len", got=64):
        next(make_source(settings, reference=reference))


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_run_goes_on_with_fewer_slots(words, tmp_path, monkeypatch, recipe):
    """Its passes stay as large as they were; the run says it and keeps it, also where it is taken up."""
    short = [*words, "max_steps=5", "eval.every=0"]  # a round is two steps or four
    device = Device(monkeypatch, 7)
    folder = tmp_path / "run"
    said = said_in(lambda: train(recipe, *short, f"out={folder}"))
    assert [line for line in said if "max_concurrent is now 6" in line]
    assert not [line for line in said if "micro-batch" in line]
    assert {number for number in device.asked if number > 7} == {24, 12}
    incidents = [json.loads(line) for line in (folder / "incidents.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["slots"]) for one in incidents] == [("out of memory", 6)]
    stop_after(folder, 4)
    device.asked.clear()
    train(recipe, *short, f"out={folder}")
    assert max(device.asked) == 6


def test_a_round_is_compressed_for_checkpoints_alone(words, tmp_path, monkeypatch):
    written = []
    to_text = RolloutBuffer.to_text
    monkeypatch.setattr(RolloutBuffer, "to_text", lambda one: written.append(one) or to_text(one))
    short = [*words, "max_steps=5", "eval.every=0", "checkpoint.every=99"]
    train("grpo", *short, f"out={tmp_path / 'run'}")
    assert len(written) == 1  # two steps a round: the last checkpoint lies in the middle of one
    assert isinstance(written[0].id_PAM, np.ndarray)


def test_a_place_is_as_good_as_a_state():
    settings = policy(rollout={"steps_per_rollout": 2})
    source = make_source(settings)
    next(source)
    place, state = source.position(), json.loads(json.dumps(source.state()))
    expected = next(source)
    for known in (place, state):
        other = make_source(settings)
        other.restore(known)
        batch = next(other)
        assert torch.equal(batch.ids_BT, expected.ids_BT)
        assert all(torch.equal(batch.values[name], expected.values[name]) for name in expected.values)
    assert source_file.SCORED_ROWS > 1
