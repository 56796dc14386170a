"""Rollouts as a source of batches, and whole runs: exact resume, any number of ranks, degenerate groups."""

from __future__ import annotations

import copy
import io
import json
import re
import shutil
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from small_models import NumberTokenizer, small_model
from user_errors import raises_user_error

from penjing.agent_tools.box import Result
from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.data.chat.turn_parser import ParsedTurn, ToolCall
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.formats import Message
from penjing.infer.requests import InjectedTokens
from penjing.infer.tool_loop import ToolExchange, last_turn
from penjing.loader.group_sampler import EpochOrder
from penjing.loader.shared_prompt_batch import Answer, Group
from penjing.model.value_head import ScalarHead
from penjing.objective.policy import Policy, PolicyObjective, Rollout, Value
from penjing.parallel.single import Single
from penjing.rl.prompts import Prompt, read
from penjing.rl.rewards.base import RewardInput
from penjing.rl.rollout_buffer import RolloutBuffer, collate, concat, select, split
from penjing.rl.rollout_source import RolloutSampler, RolloutSource
from penjing.rl.stage import PolicyStage
from penjing.train.stages.reference import answer_log_probs
from penjing.workflows.train import execute, resolve_run

CPU = torch.device("cpu")


@dataclass
class EvenTokens:
    """1 for each token of even id; for prompts of `spoiled` length the same whatever was said."""

    spoiled: int = -1
    names = ("even",)
    weights = (1.0,)

    def __call__(self, answers):
        return np.array([[self.one(answer) for answer in answers]], dtype=np.float64).reshape(1, -1)

    def one(self, answer):
        if len(answer.messages[0].content) % 3 == self.spoiled:
            return 0.5
        return sum(int(token) % 2 == 0 for token in answer.text.split())

    def total(self, score_RN):
        return score_RN[0]


def make_prompts(number=10):
    generator = np.random.default_rng(0)
    return [
        Prompt(
            ids=tuple(generator.integers(1, 24, 3 + index % 5).tolist()),
            messages=(Message(role="user", content="x" * index),),
            truths=("1",),
            kind="",
            record={},
            where="",
        )
        for index in range(number)
    ]


def make_source(
    settings, *, model=None, strategy=None, micro=2, rank=0, world=1, scorer=None, reference=None, turns=None
):
    sampler = RolloutSampler(
        settings=settings,
        model=model or small_model(),
        tokenizer=NumberTokenizer(),
        scorer=scorer or EvenTokens(),
        strategy=strategy or Single(CPU),
        seq_len=64,
        reference=reference,
        tool_loop=turns or (GivesNumbers() if settings.rollout.max_turns > 1 else None),
    )
    return RolloutSource(sampler, make_prompts(), seed=5, prompts_per_step=4, micro_units=micro, rank=rank, world=world)


class GivesNumbers:
    """After a turn in which an odd token was said three tokens are given; the model has three turns at most."""

    def after(self, ids):
        return [1, 2, sum(ids) % 24] if any(token % 2 for token in ids) else None

    def __call__(self, turns):
        found = [self.after(turn.ids) if turn.number < 3 else None for turn in turns]
        return [
            ids
            and InjectedTokens(
                ids, ToolExchange(turn=self.said(turn.ids), results=(Result(text="", worked=sum(ids) % 2 == 0),))
            )
            for turn, ids in zip(turns, found, strict=True)
        ]

    def said(self, ids):
        calls = (ToolCall(name="number"),) if self.after(ids) else ()
        return ParsedTurn(reasoning="", content=" ".join(map(str, ids)), calls=calls)

    def exchanges(self, written):
        return (*written.notes, ToolExchange(turn=self.said(last_turn(written))))


TURNS = {"max_new_tokens": 24, "max_turns": 3, "tools": ("calculator",)}


def policy(**changes):
    rollout = {"num_generations": 3, "max_new_tokens": 6, **changes.pop("rollout", {})}
    return Policy(rollout=Rollout(**rollout), **changes)


TIMES = ("rollout_seconds", "scoring_seconds", "rollout_tokens_per_second")


def same(one, other):
    for name in ("ids_BT", "target_N", "scored_N", "weight_N"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.values.keys() == other.values.keys()
    for name in one.values:
        torch.testing.assert_close(one.values[name], other.values[name], rtol=1e-4, atol=1e-5)
    for name in one.figures.keys() - set(TIMES):
        torch.testing.assert_close(one.figures[name], other.figures[name])


def test_batches_hold_what_was_sampled():
    model = small_model()
    source = make_source(policy(), model=model)
    batch = next(source)
    assert batch.num_answers == 6
    logp = answer_log_probs(model, batch)
    torch.testing.assert_close(batch.values["behaviour"], logp, rtol=1e-4, atol=1e-5)
    assert float(batch.figures["advantage"].sum()) == pytest.approx(0, abs=1e-5)
    assert {
        "reward",
        "reward_std",
        "frac_zero_reward_std",
        "answer_tokens",
        "truncated_fraction",
    } <= batch.figures.keys()
    assert set(TIMES) <= batch.figures.keys()
    again = next(source)
    assert not torch.equal(batch.target_N[:6], again.target_N[:6])


def test_what_the_model_was_given_is_read_and_not_learned():
    """Tokens between two turns have weight 0; no loss of the family, no divergence and no figure knows them."""
    model = small_model()
    source = make_source(policy(rollout=TURNS), model=model, micro=4)
    batch = next(source)
    one = source.sampler.sample(source.prompts, [0, 1], [[1, 2, 3], [4, 5, 6]])
    assert 0 < (batch.weight_N == 0).sum() < len(batch.weight_N) / 2
    given = batch.target_N[batch.weight_N == 0].view(-1, 3)
    assert (given[:, :2] == torch.tensor([1, 2])).all()
    assert not batch.values["behaviour"][batch.weight_N == 0].any()
    said = batch.weight_N == 1
    torch.testing.assert_close(
        batch.values["behaviour"][said], answer_log_probs(model, batch)[said], rtol=1e-4, atol=1e-5
    )
    assert float(batch.length_A().sum()) == float(said.sum())
    assert (one.turns_PA > 1).any()
    assert (one.calls_PA >= one.turns_PA - 1).all()  # the calls of a last turn are counted, and nobody answers them
    assert (one.failed_PA <= one.calls_PA).all()
    assert one.calls_PA.any()
    figures = one.metrics(range(2), ["even"], 1, turns=True)
    assert figures["answer_turns"] == one.turns_PA.mean()
    assert figures["answer_tokens"] == one.sampled_PAM.sum() / 6
    for loss in ("grpo", "dr_grpo", "dapo", "gspo", "cispo"):
        settings = policy(rollout=TURNS, loss=loss, kl_coef=0.3)
        objective = PolicyObjective(settings)
        logp_N, entropy_N = torch.randn(2, len(batch.target_N), generator=torch.Generator().manual_seed(0)) - 2
        reference_N = logp_N + 0.1 * torch.randn(len(logp_N), generator=torch.Generator().manual_seed(1))
        found = []
        for spoil in (0.0, 3.0):
            spoiled = spoil * (batch.weight_N == 0)
            mine_N = (logp_N + spoiled).requires_grad_()
            values = {"behaviour": batch.values["behaviour"] - spoiled, "reference": reference_N + 2 * spoiled}
            total, parts = objective.loss_from_log_probs(mine_N, entropy_N + spoiled, replace(batch, values=values))
            total.backward()
            assert not mine_N.grad[~said].any()
            found.append((total.detach(), parts, mine_N.grad))
        torch.testing.assert_close(found[0], found[1])


def test_rounds_without_a_call_show_their_turns_too():
    """Otherwise means over several steps would take them for rounds of no turns at all."""

    class GivesNothing(GivesNumbers):
        def after(self, ids):
            return None

    batch = next(make_source(policy(rollout=TURNS), turns=GivesNothing()))
    assert batch.figures["answer_turns"].tolist() == [1.0] * batch.num_answers
    assert not batch.figures["tool_calls"].any()
    assert "answer_turns" not in next(make_source(policy())).figures


def test_a_batch_of_turns_equals_its_answers_one_by_one():
    """Packed with its prompt and siblings, an answer with given tokens scores as it does alone in a plain row."""
    model = small_model()
    source = make_source(policy(rollout={**TURNS, "steps_per_rollout": 2}), model=model, micro=4)
    batch = next(source)
    packed_logp = answer_log_probs(model, batch)
    one, first = source._round, 0
    for place in range(4):
        prompt = source.prompts[int(one.prompt_P[place])].ids
        for answer in range(3):
            ids = one.id_PAM[place, answer, : one.length_PA[place, answer]].tolist()
            with torch.no_grad():
                logp_TV = model(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1 : -1].log_softmax(-1)
            alone = logp_TV.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(packed_logp[first : first + len(ids)], alone, rtol=1e-4, atol=1e-5)
            first += len(ids)


def test_rewards_see_the_whole_trajectory():
    seen = []

    class Sees(EvenTokens):
        def __call__(self, answers):
            seen.extend(answers)
            return super().__call__(answers)

    source = make_source(policy(rollout={**TURNS, "steps_per_rollout": 2}), scorer=Sees(), micro=4)
    next(source)
    one = source._round
    assert len(seen) == 24
    for answer, turns, said, calls in zip(
        seen, one.turns_PA.flat, one.sampled_PAM.sum(-1).flat, one.calls_PA.flat, strict=True
    ):
        assert len(answer.turns) == turns
        assert sum(len(turn.turn.calls) for turn in answer.turns) == calls
        assert answer.num_tokens == said - (not answer.truncated)
        last = answer.turns[-1].turn.content.split()
        assert answer.text.split() == last[: len(answer.text.split())]
        assert answer.answer_text == answer.turns[-1].turn.content
    assert max(len(answer.turns) for answer in seen) > 1


def test_tools_and_rewards_may_take_any_time():
    """The watchdog of several ranks is told so (train/watchdog.py)."""
    strategy, untimed, during = Single(CPU), [], []

    @contextmanager
    def told():
        untimed.append(True)
        yield
        untimed.pop()

    class SlowTools(GivesNumbers):
        def __call__(self, turns):
            during.append(bool(untimed))
            return super().__call__(turns)

    class SlowReward(EvenTokens):
        def __call__(self, answers):
            during.append(bool(untimed))
            return super().__call__(answers)

    strategy.untimed = told
    next(make_source(policy(rollout=TURNS), strategy=strategy, turns=SlowTools(), scorer=SlowReward()))
    assert len(during) > 1 and all(during)


def test_the_weights_of_now_are_asked():
    """With one update for each round every step samples anew; the shown behaviour is the changed model's."""
    model = small_model()
    source = make_source(policy(), model=model, micro=4)
    next(source)
    with torch.no_grad():
        model.embed.weight.mul_(1.7)
    batch = next(source)
    torch.testing.assert_close(batch.values["behaviour"], answer_log_probs(model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rollout",
    [
        {},
        {"steps_per_rollout": 2, "num_epochs": 2},
        {"old_logprobs": "recomputed", "temperature": 0.7, "steps_per_rollout": 2},
        {"steps_per_rollout": 2, "num_epochs": 2, **TURNS},
    ],
)
@pytest.mark.parametrize("degenerate", ["keep", "resample"])
def test_a_restored_source_goes_on_exactly(rollout, degenerate):
    """Weights change after each batch: a round that is under way comes from the state and not from the model."""
    settings = policy(rollout=rollout, degenerate=degenerate)
    model, scorer = small_model(), EvenTokens(spoiled=1)
    source = make_source(settings, model=model, scorer=scorer)
    expected, states, weights = [], [], []
    for _ in range(12):
        states.append(json.dumps(source.state()))
        weights.append(copy.deepcopy(model.state_dict()))
        expected.append(next(source))
        with torch.no_grad():
            model.embed.weight.mul_(1.02)
    for place in (0, 1, 3, 4, 7, 10):
        other = small_model()
        resumed = make_source(settings, model=other, scorer=scorer)
        resumed.restore(json.loads(states[place]))
        for number in range(place, 12):
            other.load_state_dict(weights[number])
            same(next(resumed), expected[number])


class Pair(Single):
    """One of two ranks, in threads."""

    def __init__(self, rank, shared):
        super().__init__(CPU)
        self.rank, self.world, self.shared = rank, 2, shared

    def all_reduce(self, value):
        self.shared["values"][self.rank] = value
        self.shared["barrier"].wait(30)
        total = self.shared["values"][0] + self.shared["values"][1]
        self.shared["barrier"].wait(30)
        return total


@pytest.mark.parametrize("degenerate", ["keep", "drop", "resample"])
@pytest.mark.parametrize("rollout", [{}, {"old_logprobs": "recomputed"}, TURNS])
def test_two_ranks_sample_and_learn_what_one_does(degenerate, rollout):
    settings = policy(degenerate=degenerate, rollout={"steps_per_rollout": 2, **rollout}, kl_coef=0.1, loss="dapo")
    frozen, scorer = small_model(), EvenTokens(spoiled=1)

    def reference(batch):
        return answer_log_probs(frozen, batch)

    def make(model, **changes):
        return make_source(settings, model=model, scorer=scorer, reference=reference, **changes)

    shared = {"values": [None, None], "barrier": threading.Barrier(2)}
    taken = {0: [], 1: []}

    def work(rank):
        source = make(small_model(), strategy=Pair(rank, shared), micro=1, rank=rank, world=2)
        taken[rank] = [next(source) for _ in range(8)]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    one = make(small_model(), micro=4)
    objective = PolicyObjective(settings)
    for step in range(4):
        whole = next(one)
        parts = [taken[rank][2 * step + number] for number in (0, 1) for rank in (0, 1)]
        gradients = []
        for batches in ([whole], parts):
            model = small_model()
            units = sum(objective.weight(batch) for batch in batches)
            for batch in batches:
                (objective(model, batch).total / units).backward()
            gradients.append((float(units), [value.grad for value in model.parameters()]))
        assert gradients[0][0] == gradients[1][0]
        for first, second in zip(gradients[0][1], gradients[1][1], strict=True):
            assert (first - second).norm() <= 1e-4 * first.norm() + 1e-7


def test_degenerate_groups_are_kept_dropped_or_replaced():
    scorer = EvenTokens(spoiled=1)
    kept = next(make_source(policy(degenerate="keep"), scorer=scorer, micro=4))
    dropped = next(make_source(policy(degenerate="drop"), scorer=scorer, micro=4))
    replaced = next(make_source(policy(degenerate="resample"), scorer=scorer, micro=4))
    assert kept.num_answers == 12
    silent = sum(bool((kept.figures["advantage"][g * 3 : g * 3 + 3] == 0).all()) for g in range(4))
    assert silent > 0
    assert dropped.num_answers == 12 - 3 * silent
    assert replaced.num_answers == 12
    assert float(kept.figures["frac_zero_reward_std"][0]) == silent / 4
    by_group = replaced.figures["advantage"].view(4, 3)
    assert by_group.abs().sum(1).all()


def test_a_batch_where_nothing_teaches_weighs_nothing():
    class Same(EvenTokens):
        def one(self, answer):
            return 1.0

    with pytest.warns(UserWarning, match="teach nothing and show no rewards"):
        batch = next(make_source(policy(degenerate="drop"), scorer=Same()))
    objective = PolicyObjective(policy())
    assert float(objective.weight(batch)) == 0
    model = small_model()
    loss = objective(model, batch)
    loss.total.backward()
    assert not any(parameter.grad.any() for parameter in model.parameters())
    with pytest.warns(UserWarning, match="too hard or too easy"):
        batch = next(make_source(policy(degenerate="resample", resample_rounds=2), scorer=Same()))
    assert float(objective.weight(batch)) == 0


def test_rounds_can_be_written_joined_and_picked():
    source = make_source(policy())
    next(source)
    one = source._round
    back = RolloutBuffer.from_text(one.to_text())
    two = concat(one, back)
    again = select(two, range(4, 8))
    for name in ("id_PAM", "behaviour_PAM", "score_RPA", "advantage_PA", "prompt_P"):
        assert np.array_equal(getattr(one, name), getattr(back, name))
        assert np.array_equal(getattr(one, name), getattr(again, name))
    assert two.tokens == 2 * one.tokens
    assert isinstance(back.seconds, float)


def test_long_groups_are_split_over_rows():
    answers = [Answer(ids=[1] * length) for length in (10, 20, 5, 30)]
    group = Group(prompt=[2] * 20, answers=answers, figures={"advantage": [1.0, 2.0, 3.0, 4.0], "counts": [1.0] * 4})
    parts = split(group, 50)
    assert [part.figures["advantage"] for part in parts] == [[1.0, 2.0], [3.0], [4.0]]
    assert all(part.num_tokens <= 50 for part in parts)
    batch = collate([group], 50, {"reward": 0.5})
    assert batch.figures["advantage"].tolist() == [1, 2, 3, 4]
    assert batch.figures["reward"].tolist() == [0.5] * 4


def test_each_epoch_has_an_order_of_its_own():
    order = EpochOrder(7, 3)
    epochs = [[order[7 * epoch + place] for place in range(7)] for epoch in range(3)]
    assert all(sorted(each) == list(range(7)) for each in epochs)
    assert epochs[0] != epochs[1]
    assert [EpochOrder(7, 3)[place] for place in (15, 2)] == [epochs[2][1], epochs[0][2]]


def test_only_answers_that_were_ended_count_as_right():
    """As their reward is 0 otherwise: half of `120` is not 1."""

    class Says:
        sampling = None

        def generate(self, prompts, seeds, sampling):
            return [[None]] * len(prompts)

        def reward_input(self, prompt, written):
            truncated = prompt.kind == "cut off"
            return RewardInput(
                messages=prompt.messages, text="1", num_tokens=1, truncated=truncated, truths=prompt.truths, where=""
            )

    stage = object.__new__(PolicyStage)
    stage.strategy, stage.settings, stage.run = Single(CPU), policy(), SimpleNamespace(seed=1)
    stage.sampler, stage.scorer = Says(), EvenTokens()
    stage.held_out = [replace(prompt, kind=kind) for prompt in make_prompts(2) for kind in ("ended", "cut off")]
    figures = stage.validate()
    assert figures["val_exact_match"] == 0.5
    assert figures["val_exact_match_drawn"] == 0.5
    assert (figures["val_exact_match_ended"], figures["val_exact_match_cut off"]) == (1, 0)


# --- whole runs ------------------------------------------------------------------------------------------------------


def train(recipe, *words):
    """`penjing train` without a new process; returns what it said."""
    said = io.StringIO()
    execute(resolve_run(recipe, parse_overrides(words)), Console(file=said, width=200))
    return said.getvalue()


@pytest.fixture(scope="module")
def base(tmp_path_factory, small_run, toy):
    folder = tmp_path_factory.mktemp("answers") / "run"
    words = [word for word in small_run if not word.startswith(("data.", "max_steps"))]
    train("sft", *words, f"data.train={toy / 'sft.jsonl'}", "data.seq_len=256", "max_steps=3", f"out={folder}")
    return folder


@pytest.fixture(scope="module")
def words(base, toy, small_run):
    common = [word for word in small_run if word.startswith(("compute", "eval.sequences", "log"))]
    return [
        *common,
        f"data.train={toy / 'rl.jsonl'}",
        "data.seq_len=256",
        f"init_from={base}",
        "batch.size=4",
        "max_steps=6",
        "checkpoint.every=1",
        "checkpoint.keep_last=9",
        "eval.every=3",
        "objective.rollout.max_new_tokens=8",
        "objective.rollout.num_generations=3",
        "objective.rewards=repetition,length",
        "objective.rollout.steps_per_rollout=2",
        "objective.kl_coef=0.05",
        "optimizer.learning_rate=1e-3",
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("taught") / "run"
    train("grpo", *words, f"out={folder}")
    return folder


def outcome_of(folder):
    return json.loads((folder / "outcome.json").read_text())


def test_a_run_shows_the_curves_people_look_at(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    wanted = {
        "reward", "reward_std", "reward_length", "reward_repetition", "frac_zero_reward_std", "answer_tokens",
        "truncated_fraction", "rollout_seconds", "rollout_tokens_per_second", "ratio", "clipped_low_fraction",
        "clipped_high_fraction", "entropy", "kl", "policy_loss",
    }  # fmt: skip
    assert wanted <= steps[-1].keys()
    assert len(steps) == 6
    before, *_, after = [line for line in lines if "val_reward" in line]
    assert (before["step"], after["step"]) == (0, 6)
    assert "val_exact_match" in after
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["kl"] > 0


def test_the_plan_counts_the_answers_that_the_probe_sampled(whole):
    plan, outcome = json.loads((whole / "plan.json").read_text()), outcome_of(whole)
    # Answers of a model that never stops have the longest length, not half of it.
    assert plan["tokens"] == pytest.approx(outcome["tokens"], rel=0.1)
    assert plan["steps"] == 6 and plan["epochs"] == pytest.approx(6 * 4 / plan["rows_per_epoch"])


def stop_after(folder, step):
    """Leave of a run what there was when it was stopped after this step."""
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.rpartition("-")[2]) > step:
            shutil.rmtree(checkpoint)
    (folder / "outcome.json").unlink()


@pytest.mark.parametrize("step", [1, 4])
def test_a_run_is_taken_up_exactly(whole, words, tmp_path, step):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    stop_after(folder, step)
    train("grpo", *words, f"out={folder}")
    assert outcome_of(folder)["weights_sha256"] == outcome_of(whole)["weights_sha256"]


@pytest.mark.parametrize("reference", ["auto", pytest.param("copy", marks=pytest.mark.nightly)])
def test_adapters_learn_beside_their_reference(words, tmp_path, reference):
    """Which is the model without them, also where the run goes on with adapters that have learned."""
    folder = tmp_path / "run"
    adapters = [*words, "lora.rank=4", f"objective.reference={reference}"]
    train("grpo", *adapters, f"out={folder}")
    expected, divergence = outcome_of(folder)["weights_sha256"], divergences(folder)
    assert divergence[0] == pytest.approx(0, abs=1e-6)
    assert divergence[4] > 1e-6
    stop_after(folder, 4)
    train("grpo", *adapters, f"out={folder}")
    assert divergences(folder)[-2:] == divergence[-2:]
    assert outcome_of(folder)["weights_sha256"] == expected


def divergences(folder):
    """kl of each step, as they were logged."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["kl"] for line in lines if "kl" in line]


def test_ppo_learns_a_value_and_is_taken_up_exactly(words, tmp_path):
    ppo = [word for word in words if not word.startswith("objective.rollout.steps_per_rollout")]
    folder = tmp_path / "run"
    train("ppo", *ppo, f"out={folder}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "value_loss" in line]
    assert len(steps) == 6
    assert {"value", "return", "value_clipped_fraction", "policy_loss", "kl"} <= steps[0].keys()
    assert steps[0]["value"] == 0
    assert steps[-1]["value"] != 0
    assert steps[0]["advantage_square"] == pytest.approx(1, rel=0.01)
    expected = outcome_of(folder)["weights_sha256"]
    stop_after(folder, 3)  # in the middle of a round: two steps each
    train("ppo", *ppo, f"out={folder}")
    assert outcome_of(folder)["weights_sha256"] == expected


def test_advantages_of_ppo_step_over_what_was_given():
    settings = policy(loss="ppo", rollout=TURNS)
    head = ScalarHead(small_model())
    torch.nn.init.normal_(head.scalar, generator=torch.Generator().manual_seed(0))
    source = make_source(settings, model=head.model)
    source.sampler = replace(source.sampler, values=head)
    one = source.sampler.sample(
        source.prompts, [0, 1, 2, 3], [[4 * place + each for each in (1, 2, 3)] for place in range(4)]
    )
    assert (one.turns_PA > 1).any()
    said = one.sampled_PAM.astype(bool)
    assert not one.gain_PAM[~said].any()
    assert not one.return_PAM[~said].any()
    place, answer = np.argwhere(one.turns_PA > 1)[0]
    mine = said[place, answer]
    values = one.value_PAM[place, answer, mine]
    rewards = np.zeros_like(values)
    rewards[-1] = one.reward_PA[place, answer]
    last, expected = 0.0, np.zeros_like(values)
    for token in range(len(values) - 1, -1, -1):
        after = values[token + 1] if token + 1 < len(values) else 0.0
        last = rewards[token] + after - values[token] + 0.95 * last
        expected[token] = last + values[token]
    np.testing.assert_allclose(one.return_PAM[place, answer, mine], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rollout", [{}, TURNS])
def test_ppo_sums_over_any_split(rollout):
    settings = policy(loss="ppo", rollout={"steps_per_rollout": 2, **rollout})
    head = ScalarHead(small_model())
    torch.nn.init.normal_(head.scalar, generator=torch.Generator().manual_seed(0))
    objective = PolicyObjective(settings)
    found = []
    for micro in (4, 1):
        source = make_source(settings, model=head.model, micro=micro)
        source.sampler = replace(source.sampler, values=head)
        batches = [next(source) for _ in range(4 // micro)]
        units = sum(objective.weight(batch) for batch in batches)
        head.zero_grad()
        for batch in batches:
            loss = objective(head, batch)
            (loss.total / units).backward()
        assert {"value_loss", "value"} <= loss.parts.keys()
        found.append([value.grad.clone() for value in head.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-4 * one.norm() + 1e-7
    with raises_user_error(where="objective.value", got="objective.loss=grpo"):
        policy(value=Value(gae_lambda=0.5))
    with raises_user_error(where="objective.rollout.temperature", got=0.5):
        policy(loss="ppo", rollout={"temperature": 0.5})


def corpus(path):
    return Corpus(DataSettings(train=(str(path),), format="prompts", val_fraction=0.3))


def test_prompts_are_read_and_held_out(toy, base, tmp_path):
    from penjing.data.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(base / "tokenizer")
    made = read(corpus(toy / "rl.jsonl"), tokenizer, max_prompt_tokens=200)
    assert made.train
    assert made.held_out
    assert all(prompt.truths for prompt in made.train)
    texts = {prompt.messages[-1].content for prompt in made.train}
    assert not texts & {prompt.messages[-1].content for prompt in made.held_out}
    short = read(corpus(toy / "rl.jsonl"), tokenizer, max_prompt_tokens=40)
    assert short.skipped > 0
    with raises_user_error(where="data.seq_len", wanted="prompts of at most 2 tokens, or longer rows"):
        read(corpus(toy / "rl.jsonl"), tokenizer, max_prompt_tokens=2)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"conversations": [{"role": "user", "content": "a"}], "gt": {"x": 1}}\n')
    with raises_user_error(where="broken.jsonl:1", got="{'x': 1}"):
        read(corpus(broken), tokenizer, max_prompt_tokens=200)


def test_a_prompt_that_turns_out_broken_is_set_aside_with_the_others(base, tmp_path, monkeypatch):
    from penjing.data.formats import BadRecords
    from penjing.data.tokenizer.tokenizer import Tokenizer
    from penjing.rl import prompts

    def refuses(tokenizer, messages, *rest, **more):
        if messages[0].content == "b":
            raise UserError("the template refuses it", where="chat template")
        return render(tokenizer, messages, *rest, **more)

    render = prompts.render
    monkeypatch.setattr(prompts, "render", refuses)
    path, listed = tmp_path / "prompts.jsonl", tmp_path / "bad_records.jsonl"
    asked = [("a", {"x": 1}), ("b", "1"), *((name, "1") for name in "cdefgh")]
    rows = [{"conversations": [{"role": "user", "content": name}], "gt": truth} for name, truth in asked]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, bad_records = Tokenizer.load(base / "tokenizer"), BadRecords(0.5, listed)
    made = read(corpus(path), tokenizer, max_prompt_tokens=200, bad_records=bad_records)
    assert len(made.train) + len(made.held_out) == 6
    assert (bad_records.good, bad_records.bad) == (6, 2)
    assert [json.loads(line)["line"] for line in listed.read_text().splitlines()] == [1, 2]
    with raises_user_error(got="25.00%"):
        read(corpus(path), tokenizer, max_prompt_tokens=200, bad_records=BadRecords(0.1))


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        ("exact", r"prompts.jsonl:2: the reward exact needs a reference answer; got none, as 1 of 4 prompts"),
        ("numeric", r"prompts.jsonl:2: the reward numeric needs a reference answer"),
        ("code", r"prompts.jsonl:1: the reward code needs tests; got none, as 4 of 4 prompts"),
    ],
)
def test_prompts_that_a_reward_could_not_judge_are_found_before_the_first_step(words, tmp_path, reward, line):
    path = tmp_path / "prompts.jsonl"
    rows = [{"conversations": [{"role": "user", "content": name}], "gt": "1"} for name in "abcd"]
    del rows[1]["gt"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine = [word for word in words if not word.startswith(("data.train", "objective.rewards"))]
    with pytest.raises(UserError) as caught:
        train("grpo", *mine, f"data.train={path}", f"objective.rewards={reward}", f"out={tmp_path / 'run'}")
    if "shut in" in str(caught.value):
        pytest.skip(str(caught.value))
    assert re.search(line, str(caught.value))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("objective.rewards=exakt", {"next_step": "exact"}),
        ("data.seq_len=8", {"where": "data.seq_len", "got": 8}),
        ("objective.reference=adapter_off", {"where": "objective.reference"}),
        ("data.format=chats", {"where": "data.format", "wanted": "prompts"}),
        ("objective.rollout.tools=calculator", {"where": "objective.rollout.max_turns", "got": 1}),
        ("objective.rollout.max_turns=2", {"where": "objective.rollout.max_turns", "got": 2}),
        ("objective.tool.seconds=9", {"where": "objective.tool"}),
        (
            "objective.reward.judge_tries=5",
            {"where": "objective.reward.judge_tries"},
        ),
        ("objective.reward.pattern=.", {"where": "objective.reward.pattern"}),
    ],
)
def test_what_cannot_be_is_refused(words, tmp_path, word, facts):
    with raises_user_error(**facts):
        train("grpo", *words, word, f"out={tmp_path / 'run'}")


def test_a_run_with_tools_is_taken_up_exactly(words, toy, tmp_path):
    tools = [
        "objective.rollout.tools=calculator,sum=calculator",
        "objective.rollout.max_turns=3",
        "objective.rollout.thinking=off",
        "objective.rewards=tools,length",
        "data.seq_len=1000",
        "checkpoint.every=1",
    ]
    common = [word for word in words if not word.startswith(("objective.rewards", "data.seq_len"))]
    folder = tmp_path / "run"
    said = train("grpo", *common, *tools, f"out={folder}")
    assert "calculator, sum; 3 turns" in said
    expected = outcome_of(folder)["weights_sha256"]
    stop_after(folder, 3)  # in the middle of a round
    train("grpo", *common, *tools, f"out={folder}")
    assert outcome_of(folder)["weights_sha256"] == expected


def test_prompts_show_their_tools_or_those_of_the_run(base, tmp_path):
    from penjing.data.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(base / "tokenizer")
    listed = json.dumps([{"name": "weather", "parameters": {}}])  # as MiniMind's files have it
    rows = [
        {"conversations": [{"role": "system", "content": "", "tools": listed}, {"role": "user", "content": "a?"}]},
        {"conversations": [{"role": "user", "content": "b?"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({**row, "gt": ["1"]}) + "\n" for row in rows))
    default_tools = [{"name": "calculator", "parameters": {}}]
    made = read(corpus(path), tokenizer, max_prompt_tokens=500, default_tools=default_tools, thinking=True)
    texts = sorted(tokenizer.decode(prompt.ids) for prompt in (*made.train, *made.held_out))
    assert any('"weather"' in text and '"calculator"' not in text for text in texts)
    assert any('"calculator"' in text and "b?" in text for text in texts)
    assert all(text.endswith("<think>\n") for text in texts)
    assert made.tools == {"weather", "calculator"}
