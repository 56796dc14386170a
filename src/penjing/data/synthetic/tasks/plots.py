"""The plots. Each chooses its characters and adds events: a beginning, a problem and an end."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from penjing.data.synthetic.lexicon import (
    DISHES,
    GLAD_FEELINGS,
    HIGH_FEELINGS,
    LOW_FEELINGS,
    OPENINGS,
    PROUD_FEELINGS,
    RAINY_OPENING,
    SAD_FEELINGS,
    Being,
    Thing,
    tagged,
)
from penjing.data.synthetic.rng import Rng
from penjing.data.synthetic.world import Cast, NoCast, Pair, StoryPlan, World


def _pair(being: Being, thing: Thing) -> Pair:
    return ("person_thing", being.key, thing.key)


def _maybe_own(world: World, cast: Cast, being: Being) -> None:
    """Sometimes the second character has something too: a second name for every question about things."""
    if world.rng.bernoulli(0.5):
        world.own(being, cast.pick(tagged("solid")))


def _thanks(world: World, a: Being, b: Being) -> None:
    """Sometimes `a` thanks `b` at the end."""
    if world.rng.bernoulli(0.35):
        world.add_event("thank", a=a, b=b)


def lost(world: World, cast: Cast) -> None:
    """A thing is lost, a friend finds it elsewhere and gives it back."""
    a, b, t, p, q = cast.person(), cast.person(), cast.pick(tagged("solid")), cast.place(), cast.place()
    world.own(a, t, p)
    _maybe_own(world, cast, b)
    world.lose(a, t)
    world.feel(a, LOW_FEELINGS, "lost", _pair(a, t), t=t)
    world.find(b, t, q)
    world.give(b, a, t, "give_back")
    world.feel(a, HIGH_FEELINGS, "found", _pair(a, t), t=t)


def blown(world: World, cast: Cast) -> None:
    """The wind takes a light thing; its owner or a friend finds it elsewhere."""
    a, b, t, p, q = (
        cast.person(),
        cast.person(),
        cast.pick(tagged("solid", "light")),
        cast.place(outdoors=True),
        cast.place(),
    )
    world.own(a, t, p)
    _maybe_own(world, cast, b)
    world.lose(a, t, "blow")
    world.feel(a, LOW_FEELINGS, "blown", _pair(a, t), t=t)
    world.add_event("search", a=a, b=b, t=t)
    finder, other = (a, b) if world.rng.bernoulli(0.5) else (b, a)
    world.find(finder, t, q)
    if finder is b:
        world.give(b, a, t, "give_back")
        _thanks(world, a, b)
    else:
        world.feel(a, HIGH_FEELINGS, "found", _pair(a, t), t=t)


def gift(world: World, cast: Cast) -> None:
    """Someone wishes for a thing; a friend comes upon one and gives it away."""
    a, b, t, p, q = cast.person(), cast.person(), cast.pick(tagged("solid")), cast.place(), cast.place()
    world.stay(a, p)
    _maybe_own(world, cast, b)
    world.want(a, t)
    world.feel(a, SAD_FEELINGS, "none", _pair(a, t), a=a, t=t)
    world.discover(b, t, q)
    world.give(b, a, t)
    world.feel(a, HIGH_FEELINGS, "have", _pair(a, t), a=a, t=t)


def share(world: World, cast: Cast) -> None:
    """One has many, the other none; they share."""
    a, b, t, p = cast.person(), cast.person(), cast.pick(tagged("many")), cast.place()
    first, second = cast.numbers(least_left=1)
    world.own_many(a, t, first)
    world.meet(a, b, p)
    world.feel(b, SAD_FEELINGS, "none_many", _pair(b, t), a=b, t=t)
    world.give_many(a, b, t, second)
    world.add_remaining_fact(a, t, first, second)
    world.feel(b, GLAD_FEELINGS, "kind", _pair(a, t), a=a)
    _thanks(world, b, a)


def more(world: World, cast: Cast) -> None:
    """One has some, and a friend who found others gives them all but a few."""
    a, b, t, p = cast.person(), cast.person(), cast.pick(tagged("many", "nature")), cast.place(outdoors=True)
    first, second = cast.numbers()
    world.own_many(a, t, first)
    world.feel(a, SAD_FEELINGS, "few", _pair(a, t), a=a, t=t)
    world.gather(b, t, second, p)
    world.add_event("together", a=a, b=b, t=t)
    world.add_total_fact(a, b, t)
    world.feel(a, GLAD_FEELINGS, "enough", _pair(b, t), t=t)
    _thanks(world, a, b)


def collect(world: World, cast: Cast) -> None:
    """Two friends gather the same things in two places."""
    a, b, t = cast.person(), cast.person(), cast.pick(tagged("many", "nature"))
    p, q = cast.place(outdoors=True), cast.place(outdoors=True)
    first, second = cast.numbers()
    world.add_event("plan", a=a, b=b, t=t)
    world.gather(a, t, first, p)
    world.gather(b, t, second, q)
    world.add_event("together", a=a, b=b, t=t)
    world.add_total_fact(a, b, t)
    winner = a if first > second else b
    world.feel(winner, PROUD_FEELINGS, "most", _pair(winner, t), a=winner, t=t)


def trade(world: World, cast: Cast) -> None:
    """Each has what the other wants; they exchange."""
    a, b, p = cast.person(), cast.person(), cast.place()
    t, u = cast.pick(tagged("solid")), cast.pick(tagged("solid"))
    world.own(a, t)
    world.own(b, u)
    world.want(a, u)
    world.meet(a, b, p)
    world.trade(a, t, b, u)
    world.feel(a, HIGH_FEELINGS, "have", _pair(a, u), a=a, t=u)
    if world.rng.bernoulli(0.5):
        world.feel(b, HIGH_FEELINGS, "have", _pair(b, t), a=b, t=t)


def broken(world: World, cast: Cast) -> None:
    """A thing breaks and a friend mends it."""
    a, b, t, p, q = cast.person(), cast.person(), cast.pick(tagged("mend")), cast.place(), cast.place()
    world.own(a, t, p)
    _maybe_own(world, cast, b)
    world.add_event("break", a=a, t=t)
    world.feel(a, LOW_FEELINGS, "broken", _pair(a, t), t=t)
    world.mend(b, t, q)
    world.feel(a, HIGH_FEELINGS, "mended", _pair(a, t), t=t)
    _thanks(world, a, b)


def hurt(world: World, cast: Cast) -> None:
    """An animal is hurt; someone gives it food, and it comes back with a present."""
    a, x, p = cast.person(), cast.animal(), cast.place(outdoors=True)
    t, u = cast.pick(tagged("food")), cast.pick(tagged("carry"))
    world.own(a, t)
    world.meet(a, x, p)
    world.feel(a, LOW_FEELINGS, "hurt", ("person_place", a.key, p.key), b=x)
    world.add_event("care", a=a, b=x)
    world.give(a, x, t)
    world.bring(x, a, u)
    world.feel(a, HIGH_FEELINGS, "well", _pair(a, u), b=x)


def taken(world: World, cast: Cast) -> None:
    """An animal runs off with a thing; it is found again."""
    a, b, x, t = cast.person(), cast.person(), cast.animal(), cast.pick(tagged("carry"))
    p, q = cast.place(), cast.place()
    world.own(a, t, p)
    world.lose(a, t, "take", x)
    world.feel(a, LOW_FEELINGS, "gone", _pair(a, t), t=t)
    world.add_event("search", a=a, b=b, t=t)
    world.find(b, t, q)
    world.give(b, a, t, "give_back")
    _thanks(world, a, b)


def cook(world: World, cast: Cast) -> None:
    """Something is made of some of the food, and shared."""
    a, b, t, p = cast.person(), cast.person(), cast.pick(tagged("fresh")), cast.place()
    first, second = cast.numbers(least_left=1)
    dish = world.rng.choice(DISHES)
    world.stay(a, p)
    world.own_many(a, t, first)
    world.feel(b, SAD_FEELINGS, "hungry", _pair(b, t), a=b)
    world.use_up(a, t, second, dish)
    world.add_remaining_fact(a, t, first, second)
    world.add_event("serve", a=a, b=b, w=dish)
    world.feel(b, GLAD_FEELINGS, "good", _pair(b, t), w=dish)


def feast(world: World, cast: Cast) -> None:
    """Some food is found, and a hungry finder eats some of it."""
    a, b, t = cast.person(), cast.person(), cast.pick(tagged("fresh", "nature"))
    p, q = cast.place(outdoors=True), cast.place()
    first, second = cast.numbers(least_left=2)
    world.stay(b, q)
    world.gather(a, t, first, p)
    world.add_event("hungry", a=a)
    world.use_up(a, t, second)
    world.give_rest(a, b, t, first, second)
    world.feel(b, GLAD_FEELINGS, "sweet", _pair(b, t), t=t)


def race(world: World, cast: Cast) -> None:
    """A race with a prize; the winner lets the other play too."""
    a, b, t = cast.person(), cast.person(), cast.pick(tagged("toy"))
    p, q = cast.place(outdoors=True), cast.place()
    world.stay(b, q)
    world.win(a, b, t, p)
    world.feel(a, PROUD_FEELINGS, "won", _pair(a, t), a=a)
    world.feel(b, SAD_FEELINGS, "lost_race", ("person_place", b.key, p.key), a=b)
    world.add_event("let_play", a=a, b=b, t=t)
    world.add_event("friends", a=a, b=b)


def hide_and_seek(world: World, cast: Cast) -> None:
    """One hides a thing, the other looks in the wrong place first."""
    a, b, t, p, q = cast.person(), cast.person(), cast.pick(tagged("solid")), cast.place(), cast.place()
    world.own(a, t)
    world.put(a, t, p, "hide")
    world.add_event("look_in_vain", a=b, t=t, p=q)
    world.add_fact("where", "where_looked", q, ("person_place", b.key, q.key), a=b, t=t)
    world.feel(b, LOW_FEELINGS, "not_there", ("thing_place", t.key, q.key), t=t, p=q)
    world.add_event("tell", a=a, b=b, t=t, p=p)
    del world.spot[t]
    world.find(b, t, p)
    world.add_event("laugh", a=a, b=b)


def moved(world: World, cast: Cast) -> None:
    """A thing is left in one place and moved to another while its owner is away."""
    a, b, t, p, q = cast.person(), cast.person(), cast.pick(tagged("solid")), cast.place(), cast.place()
    world.own(a, t)
    world.put(a, t, p, "leave")
    world.put(b, t, q, "move")
    world.add_event("look_in_vain", a=a, t=t, p=p)
    world.feel(a, LOW_FEELINGS, "gone", _pair(a, t), t=t)
    world.add_event("tell", a=b, b=a, t=t, p=q)
    if world.rng.bernoulli(0.5):
        world.feel(a, GLAD_FEELINGS, "safe", _pair(a, t), t=t)


def lend(world: World, cast: Cast) -> None:
    """A thing is lent and comes back."""
    a, b, t, p, q = cast.person(), cast.person(), cast.pick(tagged("solid")), cast.place(), cast.place()
    world.own(a, t, p)
    world.feel(b, SAD_FEELINGS, "none", _pair(b, t), a=b, t=t)
    world.give(a, b, t, "lend")
    world.add_event("use", a=b, t=t, p=q)
    world.add_fact("where", "where_used", q, ("thing_place", t.key, q.key), a=b, t=t)
    world.give(b, a, t, "give_back")
    _thanks(world, b, a)


def rain(world: World, cast: Cast) -> None:
    """It rains; a friend helps with something to keep dry."""
    a, b, t, p = cast.person(), cast.person(), cast.pick(tagged("rain")), cast.place(outdoors=True)
    u = cast.pick(tuple(thing for thing in tagged("solid") if "rain" not in thing.tags))
    world.own(a, u, p)
    world.own(b, t)
    world.add_event("rain", a=a)
    world.feel(a, LOW_FEELINGS, "wet", _pair(a, t), a=a)
    world.give(b, a, t, "lend")
    world.feel(a, GLAD_FEELINGS, "dry", _pair(a, t), a=a)
    _thanks(world, a, b)


PLOTS: dict[str, Callable[[World, Cast], None]] = {
    plot.__name__: plot
    for plot in (
        lost, blown, gift, share, more, collect, trade, broken, hurt, taken, cook, feast, race, hide_and_seek, moved,
        lend, rain,
    )
}  # fmt: skip
_PLOT_NAMES = tuple(PLOTS)


@lru_cache(maxsize=256)
def simulate(seed: int, split: str, index: int) -> StoryPlan:
    """The story number `index` of a split: the same for both languages, whatever else was generated before it."""
    rng = Rng(seed, split, "tale", index)
    while True:
        plot, opening, cast = rng.choice(_PLOT_NAMES), rng.randrange(len(OPENINGS)), Cast(rng, split)
        if plot == "rain" and opening == RAINY_OPENING:
            continue
        world = World(cast)
        try:
            PLOTS[plot](world, cast)
        except NoCast:
            continue
        return world.finish(plot, opening)
