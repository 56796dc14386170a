"""Two machines on one: one agent is killed with its rank, and the run ends as if nothing had happened."""

import pytest
from two_machines import rehearse


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kill_store", [False, True])
def test_a_machine_that_is_lost_and_comes_back(tmp_path, kill_store):
    ended = rehearse(tmp_path, kill_store=kill_store)
    assert ended["exit_codes"] == "[0, 0]"
    assert ended["resumed"] == 1
    assert ended["same_weights"]
