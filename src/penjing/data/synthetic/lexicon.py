"""The words of the toy world: one entry per person, animal, thing, place, colour and feeling, in both languages.

Entries hold their inflected forms (article, measure word, place phrase), so that renderers need no grammar. `key` is
the English word; it is unique in the lexicon and identifies the entry in the split rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


def article(word: str) -> str:
    """`a` or `an`. By letter: right for every word of this lexicon (a test lists the words that start with a vowel)."""
    return "an" if word[0] in "aeiou" else "a"


@dataclass(frozen=True, slots=True, eq=False)
class Being:
    """A person or an animal of a story; `zh_one` and `en_a` introduce an animal ("a bird", “一只小鸟”)."""

    key: str
    en: str
    zh: str
    he: str
    him: str
    ta: str
    en_a: str = ""
    zh_one: str = ""
    is_person: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Thing:
    """A thing one can have; `measure` is its Chinese measure word, `tags` say which plots it fits."""

    key: str
    en: str
    en_a: str
    plural: str
    zh: str
    zh_one: str
    measure: str
    tags: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class PlaceWord:
    """A place; `en` and `zh` are the whole phrases ("in the garden", “在花园里”), used for both story and answer.

    The wind blows, rain falls and fruit is gathered only where it is `outdoors`.
    """

    key: str
    en: str
    zh: str
    zh_inside: str
    outdoors: bool


@dataclass(frozen=True, slots=True, eq=False)
class Word:
    """A colour, property, feeling or dish."""

    key: str
    en: str
    zh: str

    @property
    def en_a(self) -> str:
        return f"{article(self.en)} {self.en}"


def _rows(text: str) -> list[str]:
    return text.split("|")


def _person(row: str, he: str) -> Being:
    en, zh = row.split()
    him, ta = ("him", "他") if he == "he" else ("her", "她")
    return Being(en, en, zh, he, him, ta)


_BOYS = _rows(
    "Tom 小明|Ben 大山|Sam 阿宝|Max 小虎|Jack 小刚|Leo 小龙|Tim 小强|Dan 阿光|Bob 大伟|Nick 小杰|Adam 豆豆|Paul 大海|"
    "Luke 小军|Fred 阿福"
)
_GIRLS = _rows(
    "Mia 小红|Lily 小兰|Anna 小雨|Lucy 小云|Emma 小梅|Amy 乐乐|Zoe 小月|Kate 小雪|Ella 小玲|Sara 小燕|Nina 小芳|"
    "Jane 小英|Ivy 朵朵|Eva 圆圆"
)
PEOPLE = tuple([_person(row, "he") for row in _BOYS] + [_person(row, "she") for row in _GIRLS])


def _animal(row: str) -> Being:
    en, zh, measure = row.split()
    return Being(en, f"the {en}", zh, "it", "it", "它", f"{article(en)} {en}", f"一{measure}{zh}", False)


ANIMALS = tuple(
    _animal(row)
    for row in _rows(
        "cat 小猫 只|dog 小狗 只|bird 小鸟 只|rabbit 小兔 只|duck 小鸭 只|fox 狐狸 只|pony 小马 匹|lamb 小羊 只|"
        "monkey 小猴 只|frog 青蛙 只"
    )
)


def _thing(row: str) -> Thing:
    en, plural, zh, measure, *tags = row.split()
    return Thing(en, en, f"{article(en)} {en}", plural, zh, f"一{measure}{zh}", measure, frozenset(tags))


# Tags: solid (keeps its colour; can be owned, lost, lent), carry (an animal can carry it), toy (one plays with it),
# mend (can break and be mended), light (the wind can take it), rain (helps on a wet day), many (comes in numbers),
# food, fresh (good in a pie), nature (lies about outdoors).
THINGS = tuple(
    _thing(row)
    for row in (
        "ball balls 球 个 solid carry toy",
        "kite kites 风筝 只 solid carry toy mend light",
        "book books 书 本 solid carry many",
        "hat hats 帽子 顶 solid carry light rain",
        "cup cups 杯子 个 solid carry many",
        "key keys 钥匙 把 solid carry",
        "lamp lamps 灯 盏 solid carry mend",
        "drum drums 鼓 面 solid carry toy mend",
        "bell bells 铃铛 个 solid carry toy mend",
        "boat boats 船 条 solid toy mend",
        "doll dolls 娃娃 个 solid carry toy mend",
        "coat coats 外套 件 solid carry rain",
        "box boxes 盒子 个 solid many",
        "bag bags 袋子 个 solid carry light",
        "pen pens 笔 支 solid carry mend many",
        "watch watches 手表 块 solid carry mend",
        "umbrella umbrellas 雨伞 把 solid carry mend light rain",
        "basket baskets 篮子 个 solid carry mend",
        "robot robots 机器人 个 solid carry toy mend",
        "bike bikes 单车 辆 solid toy mend",
        "flute flutes 笛子 支 solid carry toy mend",
        "blanket blankets 毯子 条 solid carry light rain",
        "ring rings 戒指 枚 solid carry",
        "mask masks 面具 个 solid carry toy light",
        "card cards 卡片 张 solid carry light many",
        "map maps 地图 张 solid carry light",
        "candle candles 蜡烛 根 solid carry many",
        "flower flowers 花 朵 many nature",
        "shell shells 贝壳 个 many nature",
        "stone stones 石头 块 many nature",
        "feather feathers 羽毛 根 many nature light",
        "coin coins 硬币 枚 many nature",
        "apple apples 苹果 个 many food fresh nature",
        "egg eggs 鸡蛋 个 many food fresh",
        "pear pears 梨 个 many food fresh nature",
        "peach peaches 桃子 个 many food fresh nature",
        "banana bananas 香蕉 根 many food fresh",
        "cookie cookies 饼干 块 many food",
    )
)


def _place(row: str, outdoors: bool) -> PlaceWord:
    preposition, en, zh = row.split()
    return PlaceWord(en, f"{preposition} the {en}", f"在{zh}", zh, outdoors)


OUTDOORS = tuple(
    _place(row, True)
    for row in _rows(
        "in garden 花园里|on hill 山上|in park 公园里|by river 河边|by lake 湖边|on beach 沙滩上|on farm 农场里|"
        "in forest 森林里|on bridge 桥上|in yard 院子里|in field 田野里|in village 村子里"
    )
)
INDOORS = tuple(
    _place(row, False)
    for row in _rows(
        "at school 学校里|in library 图书馆里|in kitchen 厨房里|in shop 商店里|at market 集市上|in cave 山洞里"
    )
)
PLACES = OUTDOORS + INDOORS


def _words(rows: str) -> tuple[Word, ...]:
    return tuple(Word(en, en, zh) for en, zh in map(str.split, _rows(rows)))


COLOURS = _words("red 红色|blue 蓝色|green 绿色|yellow 黄色|white 白色|black 黑色|pink 粉色|purple 紫色")
PROPERTIES = _words("big 大|small 小|old 旧|new 新")
LOW_FEELINGS = _words("sad 难过|worried 着急|upset 伤心")
SAD_FEELINGS = (LOW_FEELINGS[0], LOW_FEELINGS[2])
GLAD_FEELINGS = _words("happy 高兴|glad 开心")
HIGH_FEELINGS = (*GLAD_FEELINGS, *_words("excited 激动"))
PROUD_FEELINGS = (*GLAD_FEELINGS, *_words("proud 自豪"))
FEELINGS = (*LOW_FEELINGS, *HIGH_FEELINGS, PROUD_FEELINGS[-1])
DISHES = _words("pie 馅饼|salad 沙拉")
_OPENINGS = _rows(
    "One sunny day, 一个晴朗的日子|One rainy day, 一个下雨的日子|One windy day, 一个刮风的日子|"
    "One warm day, 一个暖和的日子|One cold day, 一个寒冷的日子|One morning, 一天早上|One afternoon, 一天下午|"
    "One evening, 一天傍晚|One day, 有一天|Last week, 上个星期|Yesterday, 昨天|After lunch, 午饭后|"
    "On Sunday, 星期天|On Monday, 星期一|On Friday, 星期五|"
    "In spring, 春天里|In summer, 夏天里|In autumn, 秋天里"
)
OPENINGS: tuple[tuple[str, ...], ...] = tuple(tuple(row.split(", ")) for row in _OPENINGS)
RAINY_OPENING = 1  # not for the "rain" plot, which begins dry


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A thing with its description at the first mention: "an old red kite", “一只红色的旧风筝”."""

    en: str
    zh: str
    colour: Word | None


@dataclass(frozen=True, slots=True, eq=False)
class NumberWord:
    """A number of things: "3 apples", “3个苹果”. Digits in both languages, so that an answer can be copied."""

    number: int
    en: str
    zh: str


@cache
def described(thing: Thing, colour: Word | None, looks: Word | None) -> Described:
    """The first mention of `thing` with an optional colour and an optional property."""
    words = [word.en for word in (looks, colour) if word] + [thing.en]
    zh = f"一{thing.measure}" + (f"{colour.zh}的" if colour else "") + (looks.zh if looks else "") + thing.zh
    return Described(f"{article(words[0])} {' '.join(words)}", zh, colour)


@cache
def amount(number: int, thing: Thing) -> NumberWord:
    """`number` of `thing`, with the right plural and measure word."""
    return NumberWord(
        number, f"{number} {thing.en if number == 1 else thing.plural}", f"{number}{thing.measure}{thing.zh}"
    )


@cache
def tagged(*tags: str) -> tuple[Thing, ...]:
    """All things that carry every one of `tags`."""
    return tuple(thing for thing in THINGS if thing.tags.issuperset(tags))
