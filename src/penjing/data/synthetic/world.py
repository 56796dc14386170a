"""The simulation of a story: owners, spots, colours and feelings. Events change the state; facts are read from it.

A plot (see `plots`) calls `World.add` in the order in which things happen. Tables say what an event changes and what
can be asked about it. Facts about the end of the story are read from the final state by `finish`. Nothing here knows
any language beyond the entries of the lexicon.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

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
    described,
    tagged,
)
from penjing.data.synthetic.rng import Rng, held_out

T = TypeVar("T")
Pair = tuple[str, str, str]
Roles = dict[str, Any]


class Event(NamedTuple):
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

    `pair` is the combination that the question is about, for the split rule. `told`: index of the event that decides.
    """

    kind: str
    ask: str
    roles: Roles
    answer: Any
    pair: Pair
    told: int


class NoCast(Exception):
    """The split rule left no candidate; the caller tries again."""


# Roles: a, b beings; t, u things; p place; n amount; w dish; d the thing as it looks when it is first mentioned.
_DESCRIBED = ("own", "with", "discover", "bring", "win")
# Who has the thing `t` after an event.
_NEW_OWNER = dict.fromkeys(("own", "with", "find", "discover", "win"), "a")
_NEW_OWNER |= dict.fromkeys(("take", "give", "give_back", "lend", "bring"), "b")
# What can be asked about an event: a key of the question phrases, the role of the answer, the two roles of the
# combination, and the roles that the question names; `a=b` is role `b` of the event as role `a` of the question.
_FOUND = ("who_found a at t", "what_found t at a", "where_found p tp at")
_ASKED: dict[str, tuple[str, ...]] = {
    "stay": ("where_was p ap a",),
    "meet": ("where_met p ap ab",),
    "see": ("where_saw p ap ab", "who_saw a ap b"),
    "with": ("where_was p ap a",),
    "lose": ("who_lost a at t", "what_lost t at a"),
    "blow": ("who_lost a at t", "what_lost t at a"),
    "take": ("who_took b bt t", "what_took t bt a=b"),
    "find": _FOUND,
    "discover": _FOUND,
    "give": ("who_gave a at t", "who_got b bt t", "what_gave t bt ab"),
    "lend": ("who_lent a at t", "who_borrowed b bt t", "what_lent t bt ab"),
    "use": ("where_used p tp at",),
    "bring": ("who_brought a at t", "what_brought t at a"),
    "want": ("who_wanted a at t", "what_wanted t at a"),
    "mend": ("who_mended a at t", "what_mended t at a", "where_mended p tp at"),
    "leave": ("who_left a at t", "where_left p tp at"),
    "hide": ("who_hid a at t", "where_hid p tp at"),
    "move": ("who_moved a at t", "where_moved p tp at"),
    "win": ("who_won a at t", "what_won t at a", "where_raced p ap ab"),
    "own_many": ("many_had n at at",),
    "gather": ("many_found n at at", "where_gathered p tp at"),
    "give_many": ("many_gave n bt abt", "what_gave_many t bt ab"),
    "eat": ("many_ate n at at", "who_ate a at t"),
    "cook": ("many_used n at atw", "who_cooked a at tw"),
}
_POOLS: dict[str, tuple[Any, ...]] = {"person": PEOPLE, "animal": ANIMALS, "place": PLACES, "outdoors": OUTDOORS}
_PAIR_KINDS: dict[tuple[type, type], str] = {
    (Being, Thing): "person_thing",
    (Being, PlaceWord): "person_place",
    (Thing, PlaceWord): "thing_place",
    (Word, Thing): "colour_thing",
}


def pair_of(first: Any, second: Any) -> Pair | None:
    """The combination that two entries form under the split rule, or None where the rule has no such kind."""
    for one, other in ((first, second), (second, first)):
        if kind := _PAIR_KINDS.get((type(one), type(other))):
            return kind, one.key, other.key
    return None


def known_pair(first: Any, second: Any) -> Pair:
    """`pair_of` two entries that form a combination."""
    pair = pair_of(first, second)
    assert pair is not None
    return pair


def is_reserved(entry: Any, others: Iterable[Any]) -> bool:
    """Whether an entry forms a held-out combination with one of the others."""
    return any(pair is not None and held_out(*pair) for pair in (pair_of(entry, other) for other in others))


class World:
    """A story: who and what takes part, the state, what happened, and what is true.

    In training no two members of the cast form a held-out combination, whether or not a fact joins them. For
    evaluation, held-out combinations are preferred.
    """

    def __init__(self, rng: Rng, split: str, plot: str, opening: int) -> None:
        self.rng, self.training = rng, split == "train"
        self.plot, self.opening = plot, opening
        self.chosen: list[Any] = []
        self.owner: dict[Thing, Being] = {}
        self.first_owner: dict[Thing, Being] = {}
        self.spot: dict[Thing, PlaceWord] = {}
        self.colour: dict[Thing, Word] = {}
        self.told: dict[tuple[str, Thing], int] = {}  # index of the event that last changed a state of a thing
        self.events: list[Event] = []
        self.facts: list[Fact] = []
        self.feelings: list[Word] = []
        self.reasons: list[Reason] = []

    # Who and what takes part

    def choose(self, *pools: str | tuple[Any, ...]) -> list[Any]:
        """An entry of each pool that was not chosen yet. A pool is a name, the tags of things, or the entries."""
        return [
            self._pick(_POOLS.get(pool) or tagged(*pool.split()) if isinstance(pool, str) else pool) for pool in pools
        ]

    def _pick(self, pool: tuple[Any, ...]) -> Any:
        entry = self._draw(
            lambda: self.rng.choice(pool),
            lambda entry: entry not in self.chosen,
            lambda entry: is_reserved(entry, self.chosen),
        )
        self.chosen.append(entry)
        return entry

    def numbers(self, *, least_left: int = -7) -> tuple[int, int]:
        """Two different numbers from 2 to 9; the first minus the second is at least `least_left`."""
        return self._draw(
            lambda: (self.rng.randint(2, 9), self.rng.randint(2, 9)),
            lambda pair: pair[0] != pair[1] and pair[0] - pair[1] >= least_left,
            lambda pair: held_out("number", *map(str, pair)),
            attempts=60,
            fussy=30,
        )

    def _draw(
        self,
        draw: Callable[[], T],
        fits: Callable[[T], bool],
        is_reserved: Callable[[T], bool],
        attempts: int = 40,
        fussy: int = 3,
    ) -> T:
        """A draw that fits and that the split allows; for evaluation any that fits after the attempt `fussy`."""
        for attempt in range(attempts):
            drawn = draw()
            if fits(drawn) and (is_reserved(drawn) != self.training or (not self.training and attempt > fussy)):
                return drawn
        raise NoCast

    def _describe(self, thing: Thing) -> Any:
        """How `thing` looks at its first mention; its colour becomes a fact of the world."""
        colour = None
        if "solid" in thing.tags and self.rng.bernoulli(0.85):
            used = tuple(self.colour.values())
            colour = self.colour[thing] = self._draw(
                lambda: self.rng.choice(COLOURS),
                lambda colour: colour not in used,
                lambda colour: held_out("colour_thing", colour.key, thing.key),
            )
        looks = self.rng.choice(PROPERTIES) if self.rng.bernoulli(0.25) else None
        return described(thing, colour, looks)

    # What happens

    def add(self, name: str, /, **roles: Any) -> None:
        """An event, with what it changes and what can be asked about it."""
        if name in _DESCRIBED:
            roles["d"] = self._describe(roles["t"])
        self.events.append(Event(name, roles))
        now = len(self.events) - 1
        if name in _DESCRIBED:
            self.told["colour", roles["t"]] = now
        if name in ("lose", "blow", "take"):
            del self.owner[roles["t"]]
        if name in _NEW_OWNER:
            self.owner[roles["t"]], self.told["has", roles["t"]] = roles[_NEW_OWNER[name]], now
            self.spot.pop(roles["t"], None)
        if name in ("own", "with"):
            self.first_owner[roles["t"]], self.told["had", roles["t"]] = roles["a"], now
        if name in ("leave", "hide", "move"):
            self.spot[roles["t"]], self.told["spot", roles["t"]] = roles["p"], now
        if name == "trade":
            self.owner |= {roles["t"]: roles["b"], roles["u"]: roles["a"]}
            self.told["has", roles["t"]] = self.told["has", roles["u"]] = now
        for asked in _ASKED.get(name, ()):
            self.ask(asked, roles)

    def ask(self, asked: str, roles: Roles) -> None:
        """A fact that can be asked, in the form of the table `_ASKED`."""
        kind, ask, answer, pair, named = _parse(asked)
        value = roles[answer].number if answer == "n" else roles[answer]
        about = known_pair(roles[pair[0]], roles[pair[1]])
        told = len(self.events) - 1 - (ask == "where_raced")  # the race is told before the prize
        self._add_fact(kind, ask, value, about, told, **{name: roles[role] for name, role in named})

    def ask_result(self, ask: str, result: int, operands: tuple[int, int], **roles: Any) -> None:
        """A fact that is the result of a sum or a difference."""
        first, second = map(str, operands)
        self._add_fact("how_many_after", ask, result, ("number", first, second), **roles)

    def feel(self, a: Being, pool: tuple[Word, ...], reason: str, pair: tuple[Any, Any], /, **roles: Any) -> None:
        """`a` has one of the feelings of `pool`, for a reason that the story gives; both are about the pair."""
        feeling, why = self.rng.choice(pool), Reason(reason, roles)
        self.feelings.append(feeling)
        self.reasons.append(why)
        self.add("feel", a=a, f=feeling, why=why)
        self._add_fact("feeling", "feeling", feeling, known_pair(*pair), a=a, why=why)
        self._add_fact("why", "why", why, known_pair(*pair), a=a, f=feeling)

    def _add_fact(self, kind: str, ask: str, answer: Any, pair: Pair, told: int = -1, /, **roles: Any) -> None:
        self.facts.append(Fact(kind, ask, roles, answer, pair, len(self.events) - 1 if told < 0 else told))

    def finish(self) -> "World":
        """Reads the remaining facts, and the candidates for answers of each kind, from what happened."""
        for thing, colour in self.colour.items():
            self._add_fact("colour", "colour", colour, known_pair(colour, thing), self.told["colour", thing], t=thing)
        for when, owners in (("had", self.first_owner), ("has", self.owner)):
            for thing, being in owners.items():
                if when == "has" and thing in self.spot:
                    continue
                pair, told = known_pair(being, thing), self.told[when, thing]
                self._add_fact("who", f"who_{when}", being, pair, told, t=thing)
                if sum(owner is being for owner in owners.values()) == 1:
                    self._add_fact("what", f"what_{when}", thing, pair, told, a=being)
        for thing, place in self.spot.items():
            self._add_fact("where", "where_is", place, known_pair(thing, place), self.told["spot", thing], t=thing)
        mentioned = dict.fromkeys(value for event in self.events for value in event.roles.values())
        numbers = (value.number for value in mentioned if isinstance(value, NumberWord))
        self.candidates: dict[str, tuple[Any, ...]] = {
            "who": tuple(value for value in mentioned if isinstance(value, Being)),
            "what": tuple(value for value in mentioned if isinstance(value, Thing)),
            "where": tuple(value for value in mentioned if isinstance(value, PlaceWord)),
            "how_many": tuple(dict.fromkeys(numbers)),
            "colour": tuple(self.colour.values()),
            "feeling": tuple(dict.fromkeys(self.feelings)),
            "why": tuple(self.reasons),
        }
        return self


@cache
def _parse(asked: str) -> tuple[str, str, str, str, list[tuple[str, str]]]:
    """Of an entry of `_ASKED`: kind, key, role of the answer, roles of the combination, named roles."""
    ask, answer, pair, named = asked.split()
    kind = ask.partition("_")[0].replace("many", "how_many")
    return kind, ask, answer, pair, [("a", "b")] if named == "a=b" else [(role, role) for role in named]
