"""The simulation: its answers are recomputed here from the events alone, by a second and simpler reading of them."""

from __future__ import annotations

from typing import Any

import pytest

from penjing.data.synthetic.questions import Reading
from penjing.data.synthetic.tasks.plots import PLOTS, simulate
from penjing.data.synthetic.world import World

SPLITS = ("train", "held_out")
GOT_BY = {
    "own": "a",
    "with": "a",
    "find": "a",
    "discover": "a",
    "give": "b",
    "give_back": "b",
    "lend": "b",
    "bring": "b",
}
GOT_BY |= {"take": "b", "win": "a"}


class Replay:
    """What an attentive reader of the events knows."""

    def __init__(self, plan: World) -> None:
        self.first: dict[Any, Any] = {}
        self.had: dict[Any, list[Any]] = {}
        self.spot: dict[Any, Any] = {}
        self.count: dict[tuple[Any, Any], int] = {}
        self.done: set[tuple[Any, ...]] = set()
        self.felt: set[tuple[Any, ...]] = set()
        for event in plan.events:
            self.read(event.name, event.roles)

    def read(self, name: str, roles: dict[str, Any]) -> None:
        a, b, t, p = (roles.get(role) for role in "abtp")
        if name in GOT_BY:
            self.had.setdefault(t, []).append(roles[GOT_BY[name]])
            self.spot.pop(t, None)
        if name in ("own", "with"):
            self.first[t] = a
        if name == "trade":
            self.had[t].append(b)
            self.had[roles["u"]].append(a)
        if name in ("leave", "hide", "move"):
            self.spot[t] = p
        if name == "feel":
            self.felt.add((a, roles["f"], roles["why"]))
        self.read_numbers(name, a, b, t, roles["n"].number if "n" in roles else 0)
        self.done.add((name, a, b, t, p))

    def read_numbers(self, name: str, a: Any, b: Any, t: Any, number: int) -> None:
        if name in ("own_many", "gather"):
            self.count[a, t] = self.count.get((a, t), 0) + number
        if name in ("give_many", "eat", "cook"):
            self.count[a, t] -= number
        if name == "give_many":
            self.count[b, t] = self.count.get((b, t), 0) + number
        if name == "give_rest":
            self.count[b, t] = self.count.pop((a, t))

    def did(self, name: str, **wanted: Any) -> list[dict[str, Any]]:
        found = [dict(zip(("name", "a", "b", "t", "p"), row, strict=True)) for row in self.done]
        return [row for row in found if row["name"] == name and all(row[key] == value for key, value in wanted.items())]


DEEDS = {
    "lost": ("lose", "blow"),
    "found": ("find", "discover"),
    "mended": ("mend",),
    "won": ("win",),
    "wanted": ("want",),
    "left": ("leave",),
    "hid": ("hide",),
    "moved": ("move",),
    "gathered": ("gather",),
    "brought": ("bring",),
    "gave": ("give",),
    "lent": ("lend",),
    "was": ("stay", "with"),
    "met": ("meet",),
    "saw": ("see",),
    "raced": ("race",),
    "looked": ("look_in_vain",),
    "used": ("use",),
    "cooked": ("cook",),
    "ate": ("eat",),
}


def answers(replay: Replay, ask: str, roles: dict[str, Any]) -> set[Any]:
    """Every answer that the events support; a good question has exactly one."""
    form, deed = ask.split("_", 1)
    t, a, b = roles.get("t"), roles.get("a"), roles.get("b")
    if ask == "who_had":
        return {replay.first[t]}
    if ask == "what_had":
        return {thing for thing, owner in replay.first.items() if owner is a}
    if ask == "who_has":
        return {replay.had[t][-1]}
    if ask == "what_has":
        return {thing for thing, owners in replay.had.items() if owners[-1] is a}
    if ask == "where_is":
        return {replay.spot[t]}
    if ask in ("who_took", "what_took"):
        return {row["b" if form == "who" else "t"] for row in replay.did("take")}
    if ask in ("who_got", "who_borrowed"):
        return {row["b"] for name in ("give", "lend") for row in replay.did(name, t=t)}
    wanted: dict[str, Any] = {"a": a} if form == "what" or (form == "where" and deed != "raced") else {}
    if t is not None:
        wanted["t"] = t
    if b is not None:
        wanted["a" if deed == "raced" else "b"] = b
    if deed == "gave_many":
        return {row["t"] for row in replay.did("give_many", a=a, b=b)}
    if deed == "looked":
        wanted.pop("t")
    field = {"who": "a", "what": "t", "where": "p"}[form]
    return {row[field] for name in DEEDS[deed] for row in replay.did(name, **wanted)}


@pytest.mark.parametrize("split", SPLITS)
def test_each_fact_follows_from_the_events(split: str) -> None:
    for index in range(600):
        plan = simulate(5, split, index)
        replay = Replay(plan)
        for fact in plan.facts:
            if fact.kind in ("who", "what", "where"):
                found = answers(replay, fact.ask, fact.roles)
                assert found == {fact.answer}, (plan.plot, fact.ask, split, index)


def test_feelings_and_reasons_have_one_answer() -> None:
    for index in range(600):
        plan = simulate(5, "train", index)
        felt = Replay(plan).felt
        for fact in plan.facts:
            if fact.kind == "feeling":
                matching = {f for a, f, why in felt if a is fact.roles["a"] and why is fact.roles["why"]}
                assert matching == {fact.answer}
            if fact.kind == "why":
                assert {w for a, f, w in felt if a is fact.roles["a"] and f is fact.roles["f"]} == {fact.answer}


def test_numbers_follow_from_the_events() -> None:
    for index in range(1500):
        plan = simulate(6, "train", index)
        count = Replay(plan).count
        for fact in plan.facts:
            roles = fact.roles
            if fact.ask == "many_now":
                assert fact.answer == count[roles["a"], roles["t"]] > 0
            if fact.ask == "many_got":
                assert fact.answer == count[roles["b"], roles["t"]] > 1
            if fact.ask == "many_together":
                assert fact.answer == sum(count.values())
            if fact.kind == "how_many_after":
                x, y = int(fact.pair[1]), int(fact.pair[2])
                assert fact.answer == (x + y if fact.ask == "many_together" else x - y)


def test_every_plot_occurs_with_a_reasonable_share() -> None:
    for split in SPLITS:
        plots = [simulate(1, split, index).plot for index in range(1500)]
        assert set(plots) == set(PLOTS)
        assert min(plots.count(plot) for plot in PLOTS) > 1500 / len(PLOTS) / 3


def test_colour_belongs_to_the_thing_that_was_described() -> None:
    for index in range(500):
        plan = simulate(2, "train", index)
        shown = {event.roles["t"]: event.roles["d"].colour for event in plan.events if "d" in event.roles}
        for fact in plan.facts:
            if fact.kind == "colour":
                assert shown[fact.roles["t"]] is fact.answer
        assert len(set(plan.candidates["colour"])) == len(plan.candidates["colour"])


@pytest.mark.parametrize("number", [3_000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_no_two_stories_are_alike(number: int) -> None:
    texts = {Reading(0, index, ("en", "zh")[index % 2], "train").text for index in range(number)}
    assert len(texts) == number


def test_stories_are_short_and_repeat_the_names() -> None:
    for index in range(500):
        english, chinese = (Reading(3, index, language, "train") for language in ("en", "zh"))
        assert 25 <= len(english.text.split()) <= 75
        assert 40 <= len(chinese.text) <= 130
        being = english.plan.candidates["who"][0]
        assert english.text.count(being.en) >= 2 and chinese.text.count(being.zh) >= 2
