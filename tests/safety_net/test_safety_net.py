"""Trainings of every recipe come out bit for bit as recorded (net.py), on machines for which there is a record."""

from pathlib import Path

import pytest
from pages import script

net = script("tests/safety_net/net.py")
CASES = ["data", *net.TRAININGS]


@pytest.fixture(scope="module")
def expected():
    known = net.recorded()
    if known is None:
        pytest.skip(f"the safety net has no record for {net.machine()}")
    return known


@pytest.fixture(scope="module")
def values(request, expected):
    """What came of each case that is asked for, from one run of the script."""
    here = [item for item in request.session.items if item.path == Path(__file__)]
    names = [item.callspec.params["case"] for item in here if hasattr(item, "callspec")]
    return net.run_fresh(net.ROOT / "src", [name for name in names if name in net.TRAININGS])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ("data", *net.QUICK) else pytest.mark.nightly) for case in CASES]
)
def test_it_comes_out_as_recorded(expected, values, case):
    if case not in expected:  # it held no longer: the data changed on purpose, on another machine
        pytest.skip(f"not recorded for {net.machine()}")
    assert net.differences(expected[case], values[case]) == []


def test_a_difference_is_seen_and_named():
    old = {"model": "1", "metrics": {"loss": [2.0, 1.0]}, "plan": {"steps": 4}}
    assert net.differences(old, old) == []
    new = {"model": "1", "metrics": {"loss": [2.0, 1.5]}, "plan": {}}
    assert [line.partition(":")[0] for line in net.differences(old, new)] == ["metrics.loss.1", "plan.steps"]
    assert net.renamed(old, {**old, "metrics": {"loss_nats": [2.0, 1.0]}}) == ["loss -> loss_nats"]


def test_tensors_are_known_by_their_content_and_not_by_their_names(tmp_path):
    import torch
    from safetensors.torch import save_file

    one, two = torch.arange(4.0), torch.ones(2, 2)
    for name, tensors in (
        ("a", {"x": one, "y": two}),
        ("renamed", {"z": one, "w": two}),
        ("another", {"x": one, "y": two.bfloat16()}),
        ("reshaped", {"x": one.reshape(2, 2), "y": two}),
    ):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    hashes = [net.bag_of_tensors(tmp_path / f"{name}.safetensors") for name in ("a", "renamed", "another", "reshaped")]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
