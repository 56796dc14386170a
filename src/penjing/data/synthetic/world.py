"""The simulation of a story: places, owners, numbers and feelings. Events change the state; facts are read from it.

A plot (see `plots`) calls the methods of `World` in the order in which things happen. Each method changes the state,
appends one `Event` for the renderers and records the facts that can be asked about it. Facts about the end of the story
are read from the final state by `finish`. Nothing here knows any language beyond the entries of the lexicon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penjing.data.synthetic.lexicon import (
    ANIMALS,
    COLOURS,
    OUTDOORS,
    PEOPLE,
    PLACES,
    PROPERTIES,
    Being,
    NumberWord,
    PlaceWord,
    Thing,
    Word,
    amount,
    described,
)
from penjing.data.synthetic.rng import Item, Rng, held_out

Pair = tuple[str, str, str]
Roles = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens: a key of the phrase tables and who or what takes part."""

    name: str
    roles: Roles


@dataclass(frozen=True, slots=True, eq=False)
class Reason:
    """Why someone feels so: a key of the reason tables and its roles."""

    name: str
    roles: Roles


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that can be asked: `kind` of answer, `ask` (key of the question phrases), and the true answer.

    `pair` is the combination that the question is about, for the split rule.
    """

    kind: str
    ask: str
    roles: Roles
    answer: Any
    pair: Pair


@dataclass(frozen=True, slots=True)
class StoryPlan:
    """One run of the world: what happened, what is true, and every candidate answer that it mentions."""

    plot: str
    opening: int
    events: tuple[Event, ...]
    facts: tuple[Fact, ...]
    beings: tuple[Being, ...]
    things: tuple[Thing, ...]
    places: tuple[PlaceWord, ...]
    numbers: tuple[int, ...]
    colours: tuple[Word, ...]
    feelings: tuple[Word, ...]
    reasons: tuple[Reason, ...]


class NoCast(Exception):
    """The split rule left no candidate; the caller tries again."""


_PAIR_KINDS: dict[tuple[type, type], str] = {
    (Being, Thing): "person_thing",
    (Being, PlaceWord): "person_place",
    (Thing, PlaceWord): "thing_place",
    (Word, Thing): "colour_thing",
}


def pair_of(first: Any, second: Any) -> Pair | None:
    """The combination that two entries form under the split rule, or None where the rule has no such kind."""
    kind = _PAIR_KINDS.get((type(first), type(second)))
    if kind:
        return kind, first.key, second.key
    kind = _PAIR_KINDS.get((type(second), type(first)))
    return (kind, second.key, first.key) if kind else None


class Cast:
    """Chooses who and what takes part, under the split rule.

    In training no two members of the cast form a held-out combination, whether or not a fact joins them. For
    evaluation, held-out combinations are preferred.
    """

    def __init__(self, rng: Rng, split: str) -> None:
        self.rng = rng
        self.training = split == "train"
        self.chosen: list[Any] = []

    def pick(self, pool: tuple[Item, ...]) -> Item:
        """One entry of `pool` that is not chosen yet."""
        for attempt in range(40):
            entry = self.rng.choice(pool)
            if entry in self.chosen:
                continue
            pairs = (pair_of(entry, other) for other in self.chosen)
            reserved = any(pair is not None and held_out(*pair) for pair in pairs)
            if reserved != self.training or (not self.training and attempt > 3):
                self.chosen.append(entry)
                return entry
        raise NoCast

    def person(self) -> Being:
        return self.pick(PEOPLE)

    def animal(self) -> Being:
        return self.pick(ANIMALS)

    def place(self, *, outdoors: bool = False) -> PlaceWord:
        return self.pick(OUTDOORS if outdoors else PLACES)

    def colour(self, thing: Thing, used: tuple[Word | None, ...] = ()) -> Word:
        """A colour for `thing` other than those `used`."""
        for attempt in range(40):
            colour = self.rng.choice(COLOURS)
            if colour in used:
                continue
            reserved = held_out("colour_thing", colour.key, thing.key)
            if reserved != self.training or (not self.training and attempt > 3):
                return colour
        raise NoCast

    def numbers(self, *, least_left: int | None = None) -> tuple[int, int]:
        """Two different numbers from 2 to 9, whose pair is allowed (training) or preferably held out (evaluation).

        With `least_left` the first minus the second is at least `least_left`.
        """
        for attempt in range(60):
            first, second = self.rng.randint(2, 9), self.rng.randint(2, 9)
            if first == second or (least_left is not None and first - second < least_left):
                continue
            reserved = held_out("number", str(first), str(second))
            if reserved != self.training or (not self.training and attempt > 30):
                return first, second
        raise NoCast


class World:
    """The state of one story and its record."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.rng = cast.rng
        self.place: dict[Being, PlaceWord] = {}
        self.owner: dict[Thing, Being] = {}
        self.first_owner: dict[Thing, Being] = {}
        self.spot: dict[Thing, PlaceWord] = {}
        self.count: dict[tuple[Being, Thing], int] = {}
        self.colour: dict[Thing, Word] = {}
        self.events: list[Event] = []
        self.facts: list[Fact] = []
        self.feelings: list[Word] = []
        self.reasons: list[Reason] = []

    def add_event(self, name: str, **roles: Any) -> None:
        """Adds an event without changing the state."""
        self.events.append(Event(name, roles))

    def add_fact(self, kind: str, ask: str, answer: Any, pair: Pair, **roles: Any) -> None:
        """Adds a fact that can be asked."""
        self.facts.append(Fact(kind, ask, roles, answer, pair))

    def add_fact_pair(self, ask: str, being: Being, thing: Thing) -> None:
        """Adds two facts: who did `ask` to `thing`, and what `being` did it to."""
        pair = ("person_thing", being.key, thing.key)
        self.add_fact("who", f"who_{ask}", being, pair, t=thing)
        self.add_fact("what", f"what_{ask}", thing, pair, a=being)

    # Where people are

    def stay(self, a: Being, p: PlaceWord) -> None:
        """`a` plays at `p` without a thing."""
        self.place[a] = p
        self.add_event("stay", a=a, p=p)
        self.add_fact("where", "where_was", p, ("person_place", a.key, p.key), a=a)

    def meet(self, a: Being, b: Being, p: PlaceWord) -> None:
        """`a` meets `b` at `p`."""
        self.place[a] = self.place[b] = p
        self.add_event("meet" if b.is_person else "see", a=a, b=b, p=p)
        self.add_fact("where", "where_met" if b.is_person else "where_saw", p, ("person_place", a.key, p.key), a=a, b=b)
        if not b.is_person:
            self.add_fact("who", "who_saw", a, ("person_place", a.key, p.key), b=b)

    # Having one thing

    def describe(self, thing: Thing) -> Any:
        """How `thing` looks at its first mention; its colour becomes a fact of the world."""
        colour = None
        if "solid" in thing.tags and self.rng.bernoulli(0.85):
            colour = self.cast.colour(thing, tuple(self.colour.values()))
            self.colour[thing] = colour
        looks = self.rng.choice(PROPERTIES) if self.rng.bernoulli(0.25) else None
        return described(thing, colour, looks)

    def own(self, a: Being, t: Thing, p: PlaceWord | None = None) -> None:
        """At the beginning `a` has `t` (and is at `p`)."""
        self.owner[t] = self.first_owner[t] = a
        if p is None:
            self.add_event("own", a=a, t=t, d=self.describe(t))
        else:
            self.place[a] = p
            self.add_event("with", a=a, t=t, d=self.describe(t), p=p)
            self.add_fact("where", "where_was", p, ("person_place", a.key, p.key), a=a)

    def lose(self, a: Being, t: Thing, how: str = "lose", b: Being | None = None) -> None:
        """`t` is gone: lost, blown away, or taken by the animal `b`."""
        del self.owner[t]
        if b is None:
            self.add_event(how, a=a, t=t)
            self.add_fact_pair("lost", a, t)
        else:
            self.owner[t] = b
            self.add_event(how, a=a, b=b, t=t)
            self.add_fact_pair("took", b, t)

    def find(self, a: Being, t: Thing, p: PlaceWord) -> None:
        """`a` finds `t`, known before, at `p` and takes it."""
        self.owner[t], self.place[a] = a, p
        self.add_event("find", a=a, t=t, p=p)
        self._found(a, t, p)

    def discover(self, a: Being, t: Thing, p: PlaceWord) -> None:
        """`a` comes upon `t`, not mentioned with its looks before, at `p` and takes it."""
        self.owner[t], self.place[a] = a, p
        self.add_event("discover", a=a, t=t, d=self.describe(t), p=p)
        self._found(a, t, p)

    def _found(self, a: Being, t: Thing, p: PlaceWord) -> None:
        self.add_fact_pair("found", a, t)
        self.add_fact("where", "where_found", p, ("thing_place", t.key, p.key), a=a, t=t)

    def give(self, a: Being, b: Being, t: Thing, how: str = "give") -> None:
        """`a` gives `t` to `b`; `how` is give, give_back or lend."""
        assert self.owner[t] is a
        self.owner[t] = b
        self.add_event(how, a=a, b=b, t=t)
        ask = "lent" if how == "lend" else "gave"
        if how != "give_back":
            self.add_fact("who", f"who_{ask}", a, ("person_thing", a.key, t.key), t=t)
            self.add_fact("who", "who_got" if ask == "gave" else "who_borrowed", b, ("person_thing", b.key, t.key), t=t)
            self.add_fact("what", f"what_{ask}", t, ("person_thing", b.key, t.key), a=a, b=b)

    def bring(self, a: Being, b: Being, t: Thing) -> None:
        """`a` brings `b` a thing not mentioned before."""
        self.owner[t] = b
        self.add_event("bring", a=a, b=b, t=t, d=self.describe(t))
        self.add_fact_pair("brought", a, t)

    def trade(self, a: Being, t: Thing, b: Being, u: Thing) -> None:
        """`a` and `b` exchange `t` and `u`."""
        assert self.owner[t] is a and self.owner[u] is b
        self.owner[t], self.owner[u] = b, a
        self.add_event("trade", a=a, b=b, t=t, u=u)

    def want(self, a: Being, t: Thing) -> None:
        """`a` wishes for `t`."""
        self.add_event("want", a=a, t=t)
        self.add_fact_pair("wanted", a, t)

    def mend(self, a: Being, t: Thing, p: PlaceWord) -> None:
        """`a` mends `t` at `p`."""
        self.place[a] = p
        self.add_event("mend", a=a, t=t, p=p)
        self.add_fact_pair("mended", a, t)
        self.add_fact("where", "where_mended", p, ("thing_place", t.key, p.key), a=a, t=t)

    def put(self, a: Being, t: Thing, p: PlaceWord, how: str) -> None:
        """`a` puts `t` at `p`; `how` is leave, hide or move."""
        self.spot[t] = self.place[a] = p
        self.add_event(how, a=a, t=t, p=p)
        verb = {"leave": "left", "hide": "hid", "move": "moved"}[how]
        self.add_fact("who", f"who_{verb}", a, ("person_thing", a.key, t.key), t=t)
        self.add_fact("where", f"where_{verb}", p, ("thing_place", t.key, p.key), a=a, t=t)

    def win(self, a: Being, b: Being, t: Thing, p: PlaceWord) -> None:
        """`a` beats `b` in a race at `p` and gets `t`."""
        self.owner[t] = a
        self.place[a] = self.place[b] = p
        self.add_event("race", a=b, b=a, p=p)
        self.add_event("win", a=a, t=t, d=self.describe(t))
        self.add_fact_pair("won", a, t)
        self.add_fact("where", "where_raced", p, ("person_place", a.key, p.key), a=a, b=b)

    # Numbers of things

    def own_many(self, a: Being, t: Thing, number: int) -> None:
        """`a` has `number` of `t` at the beginning."""
        self.count[a, t] = number
        self.add_event("own_many", a=a, t=t, n=amount(number, t))
        self.add_fact("how_many", "many_had", number, ("person_thing", a.key, t.key), a=a, t=t)

    def gather(self, a: Being, t: Thing, number: int, p: PlaceWord) -> None:
        """`a` finds `number` of `t` at `p`."""
        self.count[a, t] = self.count.get((a, t), 0) + number
        self.place[a] = p
        self.add_event("gather", a=a, t=t, n=amount(number, t), p=p)
        self.add_fact("how_many", "many_found", number, ("person_thing", a.key, t.key), a=a, t=t)
        self.add_fact("where", "where_gathered", p, ("thing_place", t.key, p.key), a=a, t=t)

    def give_many(self, a: Being, b: Being, t: Thing, number: int) -> None:
        """`a` gives `b` `number` of `t`."""
        assert self.count[a, t] > number
        self.count[a, t] -= number
        self.count[b, t] = self.count.get((b, t), 0) + number
        self.add_event("give_many", a=a, b=b, t=t, n=amount(number, t))
        self.add_fact("how_many", "many_gave", number, ("person_thing", b.key, t.key), a=a, b=b, t=t)
        self.add_fact("what", "what_gave_many", t, ("person_thing", b.key, t.key), a=a, b=b)

    def use_up(self, a: Being, t: Thing, number: int, dish: Word | None = None) -> None:
        """`a` eats `number` of `t`, or makes a dish of them."""
        self.count[a, t] -= number
        self.add_event("cook" if dish else "eat", a=a, t=t, n=amount(number, t), w=dish)
        pair = ("person_thing", a.key, t.key)
        self.add_fact("how_many", "many_used" if dish else "many_ate", number, pair, a=a, t=t, w=dish)
        self.add_fact("who", "who_cooked" if dish else "who_ate", a, pair, t=t, w=dish)

    def add_remaining_fact(self, a: Being, t: Thing, first: int, second: int) -> None:
        """How many `a` still has, read from the state; `first` and `second` are the operands of the sum."""
        pair = ("number", str(first), str(second))
        self.add_fact("how_many_after", "many_now", self.count[a, t], pair, a=a, t=t)

    def give_rest(self, a: Being, b: Being, t: Thing, first: int, second: int) -> None:
        """`a` gives `b` all that is left of `t`: the difference of `first` and `second`, read from the state."""
        self.count[b, t] = self.count.pop((a, t))
        self.add_event("give_rest", a=a, b=b, t=t)
        pair = ("number", str(first), str(second))
        self.add_fact("how_many_after", "many_got", self.count[b, t], pair, a=a, b=b, t=t)

    def add_total_fact(self, a: Being, b: Being, t: Thing) -> None:
        """How many both have together, read from the state."""
        first, second = self.count[a, t], self.count[b, t]
        self.add_fact(
            "how_many_after", "many_together", first + second, ("number", str(first), str(second)), a=a, b=b, t=t
        )

    # Feelings and the end

    def feel(self, a: Being, pool: tuple[Word, ...], reason: str, pair: Pair, /, **roles: Any) -> None:
        """`a` has one of the feelings of `pool`, for a reason that the story gives."""
        feeling, why = self.rng.choice(pool), Reason(reason, roles)
        self.feelings.append(feeling)
        self.reasons.append(why)
        self.add_event("feel", a=a, f=feeling, why=why)
        self.add_fact("feeling", "feeling", feeling, pair, a=a, why=why)
        self.add_fact("why", "why", why, pair, a=a, f=feeling)

    def finish(self, plot: str, opening: int) -> StoryPlan:
        """Reads the remaining facts from the state and closes the record."""
        for thing, colour in self.colour.items():
            self.add_fact("colour", "colour", colour, ("colour_thing", colour.key, thing.key), t=thing)
        for when, owners in (("had", self.first_owner), ("has", self.owner)):
            for thing, being in owners.items():
                if when == "has" and thing in self.spot:
                    continue
                pair = ("person_thing", being.key, thing.key)
                self.add_fact("who", f"who_{when}", being, pair, t=thing)
                if sum(owner is being for owner in owners.values()) == 1:
                    self.add_fact("what", f"what_{when}", thing, pair, a=being)
        for thing, place in self.spot.items():
            self.add_fact("where", "where_is", place, ("thing_place", thing.key, place.key), t=thing)
        return self._record(plot, opening)

    def _record(self, plot: str, opening: int) -> StoryPlan:
        mentioned = dict.fromkeys(value for event in self.events for value in event.roles.values())
        return StoryPlan(
            plot=plot,
            opening=opening,
            events=tuple(self.events),
            facts=tuple(self.facts),
            beings=tuple(value for value in mentioned if isinstance(value, Being)),
            things=tuple(value for value in mentioned if isinstance(value, Thing)),
            places=tuple(value for value in mentioned if isinstance(value, PlaceWord)),
            numbers=tuple(dict.fromkeys(value.number for value in mentioned if isinstance(value, NumberWord))),
            colours=tuple(self.colour.values()),
            feelings=tuple(self.feelings),
            reasons=tuple(self.reasons),
        )
