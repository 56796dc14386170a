"""The plots. Each chooses its characters and adds events: a beginning, a problem and an end."""

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
    amount,
    tagged,
)
from penjing.data.synthetic.rng import Rng
from penjing.data.synthetic.world import NoCast, World


def _maybe_own(world: World, being: Being) -> None:
    """Sometimes the second character has something too: a second name for every question about things."""
    if world.rng.bernoulli(0.5):
        world.add("own", a=being, t=world.choose("solid")[0])


def _thanks(world: World, a: Being, b: Being) -> None:
    """Sometimes `a` thanks `b` at the end."""
    if world.rng.bernoulli(0.35):
        world.add("thank", a=a, b=b)


def lost(world: World) -> None:
    """A thing is lost, a friend finds it elsewhere and gives it back."""
    a, b, t, p, q = world.choose("person", "person", "solid", "place", "place")
    world.add("with", a=a, t=t, p=p)
    _maybe_own(world, b)
    world.add("lose", a=a, t=t)
    world.feel(a, LOW_FEELINGS, "lost", (a, t), t=t)
    world.add("find", a=b, t=t, p=q)
    world.add("give_back", a=b, b=a, t=t)
    world.feel(a, HIGH_FEELINGS, "found", (a, t), t=t)


def blown(world: World) -> None:
    """The wind takes a light thing; its owner or a friend finds it elsewhere."""
    a, b, t, p, q = world.choose("person", "person", "solid light", "outdoors", "place")
    world.add("with", a=a, t=t, p=p)
    _maybe_own(world, b)
    world.add("blow", a=a, t=t)
    world.feel(a, LOW_FEELINGS, "blown", (a, t), t=t)
    world.add("search", a=a, b=b, t=t)
    finder = a if world.rng.bernoulli(0.5) else b
    world.add("find", a=finder, t=t, p=q)
    if finder is b:
        world.add("give_back", a=b, b=a, t=t)
        _thanks(world, a, b)
    else:
        world.feel(a, HIGH_FEELINGS, "found", (a, t), t=t)


def gift(world: World) -> None:
    """Someone wishes for a thing; a friend comes upon one and gives it away."""
    a, b, t, p, q = world.choose("person", "person", "solid", "place", "place")
    world.add("stay", a=a, p=p)
    _maybe_own(world, b)
    world.add("want", a=a, t=t)
    world.feel(a, SAD_FEELINGS, "none", (a, t), a=a, t=t)
    world.add("discover", a=b, t=t, p=q)
    world.add("give", a=b, b=a, t=t)
    world.feel(a, HIGH_FEELINGS, "have", (a, t), a=a, t=t)


def share(world: World) -> None:
    """One has many, the other none; they share."""
    a, b, t, p = world.choose("person", "person", "many", "place")
    first, second = numbers = world.numbers(least_left=1)
    world.add("own_many", a=a, t=t, n=amount(first, t))
    world.add("meet", a=a, b=b, p=p)
    world.feel(b, SAD_FEELINGS, "none_many", (b, t), a=b, t=t)
    world.add("give_many", a=a, b=b, t=t, n=amount(second, t))
    world.ask_result("many_now", first - second, numbers, a=a, t=t)
    world.feel(b, GLAD_FEELINGS, "kind", (a, t), a=a)
    _thanks(world, b, a)


def more(world: World) -> None:
    """One has some, and a friend who found others gives them all but a few."""
    a, b, t, p = world.choose("person", "person", "many nature", "outdoors")
    first, second = numbers = world.numbers()
    world.add("own_many", a=a, t=t, n=amount(first, t))
    world.feel(a, SAD_FEELINGS, "few", (a, t), a=a, t=t)
    world.add("gather", a=b, t=t, n=amount(second, t), p=p)
    world.add("together", a=a, b=b, t=t)
    world.ask_result("many_together", first + second, numbers, a=a, b=b, t=t)
    world.feel(a, GLAD_FEELINGS, "enough", (b, t), t=t)
    _thanks(world, a, b)


def collect(world: World) -> None:
    """Two friends gather the same things in two places."""
    a, b, t, p, q = world.choose("person", "person", "many nature", "outdoors", "outdoors")
    first, second = numbers = world.numbers()
    world.add("plan", a=a, b=b, t=t)
    world.add("gather", a=a, t=t, n=amount(first, t), p=p)
    world.add("gather", a=b, t=t, n=amount(second, t), p=q)
    world.add("together", a=a, b=b, t=t)
    world.ask_result("many_together", first + second, numbers, a=a, b=b, t=t)
    winner = a if first > second else b
    world.feel(winner, PROUD_FEELINGS, "most", (winner, t), a=winner, t=t)


def trade(world: World) -> None:
    """Each has what the other wants; they exchange."""
    a, b, p, t, u = world.choose("person", "person", "place", "solid", "solid")
    world.add("own", a=a, t=t)
    world.add("own", a=b, t=u)
    world.add("want", a=a, t=u)
    world.add("meet", a=a, b=b, p=p)
    world.add("trade", a=a, b=b, t=t, u=u)
    world.feel(a, HIGH_FEELINGS, "have", (a, u), a=a, t=u)
    if world.rng.bernoulli(0.5):
        world.feel(b, HIGH_FEELINGS, "have", (b, t), a=b, t=t)


def broken(world: World) -> None:
    """A thing breaks and a friend mends it."""
    a, b, t, p, q = world.choose("person", "person", "mend", "place", "place")
    world.add("with", a=a, t=t, p=p)
    _maybe_own(world, b)
    world.add("break", a=a, t=t)
    world.feel(a, LOW_FEELINGS, "broken", (a, t), t=t)
    world.add("mend", a=b, t=t, p=q)
    world.feel(a, HIGH_FEELINGS, "mended", (a, t), t=t)
    _thanks(world, a, b)


def hurt(world: World) -> None:
    """An animal is hurt; someone gives it food, and it comes back with a present."""
    a, x, p, t, u = world.choose("person", "animal", "outdoors", "food", "carry")
    world.add("own", a=a, t=t)
    world.add("see", a=a, b=x, p=p)
    world.feel(a, LOW_FEELINGS, "hurt", (a, p), b=x)
    world.add("care", a=a, b=x)
    world.add("give", a=a, b=x, t=t)
    world.add("bring", a=x, b=a, t=u)
    world.feel(a, HIGH_FEELINGS, "well", (a, u), b=x)


def taken(world: World) -> None:
    """An animal runs off with a thing; it is found again."""
    a, b, x, t, p, q = world.choose("person", "person", "animal", "carry", "place", "place")
    world.add("with", a=a, t=t, p=p)
    world.add("take", a=a, b=x, t=t)
    world.feel(a, LOW_FEELINGS, "gone", (a, t), t=t)
    world.add("search", a=a, b=b, t=t)
    world.add("find", a=b, t=t, p=q)
    world.add("give_back", a=b, b=a, t=t)
    _thanks(world, a, b)


def cook(world: World) -> None:
    """Something is made of some of the food, and shared."""
    a, b, t, p = world.choose("person", "person", "fresh", "place")
    first, second = numbers = world.numbers(least_left=1)
    dish = world.rng.choice(DISHES)
    world.add("stay", a=a, p=p)
    world.add("own_many", a=a, t=t, n=amount(first, t))
    world.feel(b, SAD_FEELINGS, "hungry", (b, t), a=b)
    world.add("cook", a=a, t=t, n=amount(second, t), w=dish)
    world.ask_result("many_now", first - second, numbers, a=a, t=t)
    world.add("serve", a=a, b=b, w=dish)
    world.feel(b, GLAD_FEELINGS, "good", (b, t), w=dish)


def feast(world: World) -> None:
    """Some food is found, and a hungry finder eats some of it."""
    a, b, t, p, q = world.choose("person", "person", "fresh nature", "outdoors", "place")
    first, second = numbers = world.numbers(least_left=2)
    world.add("stay", a=b, p=q)
    world.add("gather", a=a, t=t, n=amount(first, t), p=p)
    world.add("hungry", a=a)
    world.add("eat", a=a, t=t, n=amount(second, t))
    world.add("give_rest", a=a, b=b, t=t)
    world.ask_result("many_got", first - second, numbers, a=a, b=b, t=t)
    world.feel(b, GLAD_FEELINGS, "sweet", (b, t), t=t)


def race(world: World) -> None:
    """A race with a prize; the winner lets the other play too."""
    a, b, t, p, q = world.choose("person", "person", "toy", "outdoors", "place")
    world.add("stay", a=b, p=q)
    world.add("race", a=b, b=a, p=p)
    world.add("win", a=a, b=b, t=t, p=p)
    world.feel(a, PROUD_FEELINGS, "won", (a, t), a=a)
    world.feel(b, SAD_FEELINGS, "lost_race", (b, p), a=b)
    world.add("let_play", a=a, b=b, t=t)
    world.add("friends", a=a, b=b)


def hide_and_seek(world: World) -> None:
    """One hides a thing, the other looks in the wrong place first."""
    a, b, t, p, q = world.choose("person", "person", "solid", "place", "place")
    world.add("own", a=a, t=t)
    world.add("hide", a=a, t=t, p=p)
    world.add("look_in_vain", a=b, t=t, p=q)
    world.ask("where_looked p ap at", {"a": b, "t": t, "p": q})
    world.feel(b, LOW_FEELINGS, "not_there", (t, q), t=t, p=q)
    world.add("tell", a=a, b=b, t=t, p=p)
    world.add("find", a=b, t=t, p=p)
    world.add("laugh", a=a, b=b)


def moved(world: World) -> None:
    """A thing is left in one place and moved to another while its owner is away."""
    a, b, t, p, q = world.choose("person", "person", "solid", "place", "place")
    world.add("own", a=a, t=t)
    world.add("leave", a=a, t=t, p=p)
    world.add("move", a=b, t=t, p=q)
    world.add("look_in_vain", a=a, t=t, p=p)
    world.feel(a, LOW_FEELINGS, "gone", (a, t), t=t)
    world.add("tell", a=b, b=a, t=t, p=q)
    if world.rng.bernoulli(0.5):
        world.feel(a, GLAD_FEELINGS, "safe", (a, t), t=t)


def lend(world: World) -> None:
    """A thing is lent and comes back."""
    a, b, t, p, q = world.choose("person", "person", "solid", "place", "place")
    world.add("with", a=a, t=t, p=p)
    world.feel(b, SAD_FEELINGS, "none", (b, t), a=b, t=t)
    world.add("lend", a=a, b=b, t=t)
    world.add("use", a=b, t=t, p=q)
    world.add("give_back", a=b, b=a, t=t)
    _thanks(world, b, a)


def rain(world: World) -> None:
    """It rains; a friend helps with something to keep dry."""
    a, b, t, p, u = world.choose("person", "person", "rain", "outdoors", _DRY_THINGS)
    world.add("with", a=a, t=u, p=p)
    world.add("own", a=b, t=t)
    world.add("rain", a=a)
    world.feel(a, LOW_FEELINGS, "wet", (a, t), a=a)
    world.add("lend", a=b, b=a, t=t)
    world.feel(a, GLAD_FEELINGS, "dry", (a, t), a=a)
    _thanks(world, a, b)


_DRY_THINGS = tuple(thing for thing in tagged("solid") if "rain" not in thing.tags)
PLOTS: dict[str, Callable[[World], None]] = {
    plot.__name__: plot
    for plot in (
        lost, blown, gift, share, more, collect, trade, broken, hurt, taken, cook, feast, race, hide_and_seek, moved,
        lend, rain,
    )
}  # fmt: skip


@lru_cache(maxsize=256)
def simulate(seed: int, split: str, index: int) -> World:
    """The story number `index` of a split: the same for both languages, whatever else was generated before it."""
    rng = Rng(seed, split, "tale", index)
    while True:
        plot, opening = rng.choice(tuple(PLOTS)), rng.randrange(len(OPENINGS))
        if plot == "rain" and opening == RAINY_OPENING:
            continue
        world = World(rng, split, plot, opening)
        try:
            PLOTS[plot](world)
        except NoCast:
            continue
        return world.finish()
