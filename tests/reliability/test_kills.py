"""kill -9 at any instant, in any stage: the same command goes on, and ends in the same bits."""

import random
import shutil

import pytest
from reliability_harness import by_chance, state_of

STAGES = ("pretrain", "sft", "lora", "dpo", "grpo", "distill")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, server, stages):
    """Of each stage an uninterrupted run: its state, its seconds, and the file calls it makes."""
    known = {}

    def run(stage):
        if stage not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            recipe, words = stages[stage]
            status, seconds, said = server.run(recipe, [*words, f"out={folder}"])
            assert status == 0, said
            known[stage] = (state_of(folder), seconds)
        return known[stage]

    return run


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trials", by_chance(2, deep=34))
@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=() if stage in ("pretrain", "grpo") else pytest.mark.nightly) for stage in STAGES],
)
def test_killed_runs_end_in_the_same_bits(tmp_path, server, stages, whole, count, stage, trials):
    """Up to three kills in each run: half at a random instant, half at a random call that writes, syncs or renames."""
    wanted, seconds = whole(stage)
    recipe, words = stages[stage]
    rng = random.Random(stage)
    killed = 0
    for trial in range(trials):
        folder, kills = tmp_path / f"run{trial}", 0
        while not kills:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was over before it was to be killed
            for _ in range(rng.randint(1, 3)):
                how = (
                    {"kill_after": rng.uniform(0.05, 1.0) * seconds}
                    if trial % 2
                    else {"kill_at_call": rng.randint(1, 160)}
                )
                status, _, said = server.run(recipe, [*words, f"out={folder}"], **how)
                assert status in (0, -9), said
                kills += status == -9
        killed += kills
        status, _, said = server.run(recipe, [*words, f"out={folder}"])
        assert status == 0, said
        assert state_of(folder) == wanted, f"trial {trial}"
        shutil.rmtree(folder)
    count(f"{stage}: runs killed and gone on with", trials)
    count(f"{stage}: kills", killed)
