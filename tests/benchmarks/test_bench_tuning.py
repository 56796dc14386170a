"""What contestants run with: a baseline's fastest way by hand-made pilots, a learning rate by a hand-made bowl."""

import json
import math

import pytest
from compare.comparison import FOLDER
from compare.pretrain import Pretrain
from compare.tuning import best_rate, fastest_config, pilot_rates

from penjing.base.errors import UserError


def pilot(rate, first=1.0, second=0.0, steps=10):
    """Steps of 100 tokens, the first of them longer, or the second."""
    rest = [max(second, 100 / rate)] + [100 / rate] * (steps - 2)
    return {"step_seconds": [first, *rest], "step_units": [100] * steps}


def test_pace_is_of_the_second_half_and_what_came_before_it_and_after_the_first_step_is_lost():
    one = {"step_seconds": [50.0, 7.0, 1.0, 1.0, 1.0, 1.0], "step_units": [100] * 6}
    assert pilot_rates(one) == {
        "tokens_per_second": 100.0,
        "first_step_seconds": 50.0,
        "lost_seconds": pytest.approx(11.0 - 5.0),
    }


def of(rates, firsts=None, seconds=None):
    """firsts, seconds: of the first step and of the second, by way."""

    def run(dtype, compiled):
        way = dtype, compiled
        return pilot(rates[way], (firsts or {}).get(way, 0.1), (seconds or {}).get(way, 0.0))

    return run


# As found in float32 on two cores: 871 tokens a second eager, 861 compiled, after 52 to 77 s of compiling.
FLOAT32 = {("float32", False): 871.0, ("float32", True): 861.0}


def test_compiling_that_gains_nothing_is_not_charged():
    found = fastest_config(of(FLOAT32, {("float32", True): 60.0}), ("float32",), may_compile=True, seconds=600)
    assert found["path"] == found["step"] == {"dtype": "float32", "compiled": False}
    assert [(way["compiled"], round(way["tokens_per_second"])) for way in found["tried"]] == [(False, 871), (True, 861)]
    assert found["tried"][1]["first_step_seconds"] == 60.0
    assert found["tried"][1]["lost_seconds"] == pytest.approx(0.0, abs=1e-9)


def test_compiling_in_the_first_step_takes_no_time_of_a_path():
    """Its seconds begin after that step: 630 tokens a second for 600 s are more than 600, however long it took."""
    rates = {("float32", False): 600.0, ("float32", True): 630.0}
    way = ("float32", True)
    for how, compiled in ({"firsts": {way: 50.0}}, True), ({"seconds": {way: 50.0}}, False):
        found = fastest_config(of(rates, **how), ("float32",), may_compile=True, seconds=600)
        assert found["path"]["compiled"] is compiled, how
        assert found["step"]["compiled"] is True


@pytest.mark.parametrize(("seconds", "compiled"), [(600, True), (100, False)])
def test_compiling_is_taken_where_it_wins_within_the_trial(seconds, compiled):
    """1,000 tokens a second at once, or 1,300 after 50 s in the second step: even after 217 s. Single steps are faster
    compiled anyway."""
    rates = {("float32", False): 1000.0, ("float32", True): 1300.0}
    run = of(rates, seconds={("float32", True): 50.0})
    found = fastest_config(run, ("float32",), may_compile=True, seconds=seconds)
    assert found["path"]["compiled"] is compiled
    assert found["step"]["compiled"] is True


def test_both_dtypes_are_tried_and_the_faster_is_taken():
    slow = {**FLOAT32, ("bfloat16", False): 500.0, ("bfloat16", True): 520.0}
    fast = {**FLOAT32, ("bfloat16", False): 1500.0, ("bfloat16", True): 1400.0}
    for rates, dtype in ((slow, "float32"), (fast, "bfloat16")):
        found = fastest_config(of(rates), ("float32", "bfloat16"), may_compile=True, seconds=600)
        assert (len(found["tried"]), found["path"]) == (4, {"dtype": dtype, "compiled": False})


def test_a_way_that_fails_is_recorded_and_not_taken():
    def run(dtype, compiled):
        if compiled:
            raise UserError("a trial failed", got="no compiler")
        return pilot(100.0)

    found = fastest_config(run, ("float32",), may_compile=True, seconds=600)
    assert found["path"]["compiled"] is False
    assert "no compiler" in found["tried"][1]["failed"]
    with pytest.raises(UserError, match="no compiler"):
        fastest_config(lambda **way: run("float32", True), ("float32",), may_compile=True, seconds=600)


def test_a_rate_is_searched_until_the_best_lies_between_two_worse_ones():
    asked = []

    def bits(factor):
        asked.append(factor)
        return (math.log2(factor) - 2) ** 2 + 1

    best, tried = best_rate(bits)
    assert best == 4 and tried[best] == 1
    assert sorted(asked) == sorted(tried) == [0.5, 1, 2, 4, 8]


def test_a_rate_that_ends_in_nan_is_not_taken():
    assert best_rate(lambda factor: math.nan if factor > 1 else 3 - factor)[0] == 1


def told(compare, spec, seen, earlier=None, **more):
    """The record of a comparison of penjing and one baseline; seen: gets the specs of all trials."""

    def pretend(module, given, folder):
        name = "baseline" if FOLDER in module else "penjing"
        seen.append((given.setting, name, given))
        bits = 2 + abs(math.log2(given.learning_rate / 4e-3)) if name == "baseline" else 2.0
        curve = [{"seconds": s, "tokens": 0.0, "bits_per_byte": b} for s, b in ((1.0, 8.0), (9.0, bits))]
        rate = {"float32": 100.0, "bfloat16": 300.0}[given.dtype] * (0.9 if given.compiled else 1.0)
        sizes = {"peak_bytes": 2**20, "peak_bytes_after_imports": 0, "process_seconds": 1.0}
        times = {"startup_seconds": 1.0, "step_cpu_seconds": [1.0] * 10}
        return {**pilot(rate), **times, **sizes, "curve": curve, "figures": [], "options": []}

    options = {"baselines": ("trainer-packed",), "seconds": 100.0, "dtypes": ("float32", "bfloat16"), **more}
    return compare(Pretrain(), spec, pretend, earlier=earlier, **options)


def test_timed_trials_run_in_the_way_that_was_found(spec, compare, installed):
    seen = []
    record = told(compare, spec, seen, may_compile=True)
    pilots = [(name, given) for setting, name, given in seen if setting == "pilot"]
    assert {(given.dtype, given.compiled) for _, given in pilots} == {
        *(("float32", False), ("float32", True)),
        *(("bfloat16", False), ("bfloat16", True)),
    }
    assert {name for name, _ in pilots} == {"baseline"}  # penjing decides by itself
    timed = [given for setting, name, given in seen if setting != "pilot" and name == "baseline"]
    assert [(given.setting, given.dtype, given.compiled) for given in timed] == [
        ("path", "bfloat16", False),
        ("step", "bfloat16", False),
    ]
    ways = record["tuned"]["trainer-packed"]["way"]
    assert [round(way["tokens_per_second"]) for way in ways["tried"]] == [100, 300, 90, 270]
    assert {given.dtype for _, name, given in seen if name == "penjing"} == {spec.dtype}


def test_a_search_gives_each_its_own_rate(spec, compare, installed):
    seen = []
    record = told(compare, spec, seen, search=True)
    assert {name: each["rate"]["factor"] for name, each in record["tuned"].items()} == {
        "penjing": 1,
        "penjing-adamw": 1,
        "trainer-packed": 4,
    }
    last = [given for _, name, given in seen if name == "baseline"][-2:]
    assert [given.learning_rate for given in last] == pytest.approx([4e-3, 4e-3])
    assert {given.learning_rate for _, name, given in seen[-2:] if name == "penjing"} <= {1e-3}
    searched = [given for setting, _, given in seen if setting == "path" and given.seconds == 25.0]
    assert len(searched) == 3 + 3 + 5

    seen.clear()  # the same again, for one round more: nothing is tuned anew
    told(compare, spec, seen, json.loads(json.dumps(record)), search=True, trials=2)
    assert [setting for setting, _, _ in seen].count("pilot") == 0
    assert len(seen) == 6
