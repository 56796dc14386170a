"""A random rank is killed at random moments; with --max-restarts the run continues by itself, to the same bits."""

import importlib.util

import pytest
from rank_kills import STRATEGIES, one_run


@pytest.mark.timeout(20000)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.nightly
def test_ranks_killed_at_random(tmp_path, count, strategy):
    if strategy.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip('needs pip install "penjing[deepspeed]"')
    for number in range(4):
        found = one_run(strategy, tmp_path, 10, str(number))
        kills = found["kills"]
        print(strategy, number, kills)
        assert len(kills) == 10 and all(kill["as_promised"] for kill in kills), found
        assert found["finished"] and found["same_bits"], found
        assert all(kill["seconds"] < (60 if kill["kind"] == "ended" else 30) for kill in kills), "too slow"
        count(f"ranks killed under {strategy}", len(kills))
