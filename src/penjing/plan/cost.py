"""Cost of a run: device hours times a price, and electricity. Users set their prices; the few here are defaults."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penjing.base.config import read_toml
from penjing.base.errors import UserError, nearest
from penjing.base.user_dir import user_dir

PRICES_FILE = "prices.toml"  # in the user's folder: "RTX 4090" = "2.1 CNY", one line for each card
# Of one card for an hour. The first is from MiniMind's README; the others are round figures for rented cards. Prices
# change faster than code: users should set their own.
PRICES = {"RTX 3090": "1.3 CNY", "RTX 4090": "2 CNY", "A100": "1.5 USD", "H100": "2.5 USD", "H200": "3 USD"}
HOST_WATTS = 100.0  # of a machine without its cards
LOAD_SHARE = 0.9  # fraction of a card's power limit that training draws
CORE_WATTS = 8.0  # of a CPU core at full load
_CODES = (  # ISO 4217
    "AED ALL AMD ARS AUD AZN BAM BDT BGN BHD BOB BRL BYN CAD CHF CLP CNY COP CRC CZK DKK DOP DZD EGP ETB EUR GBP GEL "
    "GHS GTQ HKD HNL HRK HUF IDR ILS INR IQD IRR ISK JOD JPY KES KGS KHR KRW KWD KZT LAK LBP LKR LYD MAD MDL MKD MMK "
    "MNT MOP MUR MXN MYR NGN NIO NOK NPR NZD OMR PAB PEN PHP PKR PLN PYG QAR RON RSD RUB RWF SAR SEK SGD SYP THB TND "
    "TRY TWD TZS UAH UGX USD UYU UZS VES VND XAF XOF YER ZAR ZMW"
)
CURRENCIES = frozenset(_CODES.split())
_SIGNS = {"$": "USD", "¥": "CNY", "￥": "CNY", "€": "EUR", "rmb": "CNY", "yuan": "CNY", "元": "CNY"}


@dataclass(frozen=True, slots=True)
class Money:
    amount: float
    currency: str

    def __str__(self) -> str:
        return f"{self.amount:.2f} {self.currency}" if self.amount < 1000 else f"{self.amount:,.0f} {self.currency}"


def read_money(text: str, where: str) -> Money:
    """`2.5USD`, `$2.5`, `20 CNY`, `1.3`: no unit means dollars. Raises UserError."""
    match = re.fullmatch(r"\s*([^\d\s.-]*)\s*([0-9]*\.?[0-9]+)\s*([^\d\s.]*)\s*", text)
    unit = (match[1] or match[3]) if match else ""
    if match is None or (match[1] and match[3]):
        raise UserError("not a price", where=where, got=repr(text), wanted="such as 2.5USD, 20CNY or $2.5")
    currency = _SIGNS.get(unit.lower(), unit.upper() or "USD")
    if currency not in CURRENCIES:
        near = nearest(currency, CURRENCIES)
        hint = None if near is None else f"Did you mean {near}?"
        raise UserError("unknown currency", where=where, got=repr(unit), wanted="such as USD or CNY", next_step=hint)
    return Money(float(match[2]), currency)


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one device for an hour, and its source."""

    hour: Money
    source: str

    def __str__(self) -> str:
        return f"{self.hour} an hour, {self.source}"


def price_of(card: str, price_option: str = "") -> Price | None:
    """The price from --price, else from the user's file, else from the table here; None if unknown."""
    if price_option:
        return Price(hour=read_money(price_option, "--price"), source="as given")
    path: Path = user_dir() / PRICES_FILE
    if path.is_file():
        user_prices = {name: str(value) for name, value in read_toml(path).items()}
        if card in user_prices:
            return Price(hour=read_money(user_prices[card], f"{path}: {card}"), source=str(path))
    if card in PRICES:
        shown = path if os.environ.get("PENJING_HOME") else f"~/.penjing/{PRICES_FILE}"
        source = f"a round figure; give --price, or edit {shown}"
        return Price(hour=read_money(PRICES[card], card), source=source)
    return None


def cost(price: Price, seconds: float, devices: int) -> Money:
    return Money(price.hour.amount * seconds / 3600 * devices, price.hour.currency)


def kilowatt_hours(seconds: float, devices: int, watts: float, cores: int = 0) -> float:
    """An estimate: cards at nine tenths of their power limit plus the host; on a CPU, its cores."""
    power = devices * watts * LOAD_SHARE + HOST_WATTS if watts else CORE_WATTS * max(1, cores)
    return power * seconds / 3.6e6


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Upper limits of a run; 0 or None: no limit."""

    seconds: float = 0.0
    memory_bytes: int = 0
    money: Money | None = None


_TIMES = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_SIZES = {"gib": 2**30, "mib": 2**20, "tib": 2**40, "gb": 10**9, "mb": 10**6, "tb": 10**12, "g": 2**30}
_EXAMPLES = "such as 3h, 90min, 24GB, 20CNY or $5"


def read_budget(text: str, where: str = "--budget") -> Budget:
    """`3h`, `90min`, `24GB`, `24GiB`, `20CNY`, `$5`; several with commas. where: the option it came from.

    Raises UserError for a value that is not above zero, and for an unknown unit (names the nearest).
    """
    budget: dict[str, object] = {}
    for word in text.split(","):
        match = re.fullmatch(r"\s*(-?[0-9]*\.?[0-9]+)\s*([^\W\d_]+)\s*", word)
        number, unit = (float(match[1]), match[2].lower()) if match else (1.0, "")
        if not 0 < number < 1e30:
            raise UserError("out of range", where=where, got=repr(word), wanted=_EXAMPLES)
        if unit in _TIMES:
            budget["seconds"] = number * _TIMES[unit]
        elif unit in _SIZES:
            budget["memory_bytes"] = int(number * _SIZES[unit])
        elif unit in _SIGNS or unit.upper() in CURRENCIES or (not match and word.strip()[:1] in _SIGNS):
            money = read_money(word, where)
            if not money.amount:
                raise UserError("not above zero", where=where, got=repr(word), wanted=_EXAMPLES)
            budget["money"] = money
        elif match is None:  # hours, gigabytes, dollars?
            raise UserError("not a budget", where=where, got=repr(word), wanted=_EXAMPLES)
        else:
            currencies = CURRENCIES if len(unit) > 2 else ()
            names = {name.lower(): name for name in (*_TIMES, "GB", "GiB", "MB", "MiB", "TB", "TiB", *currencies)}
            nearest_unit = nearest(unit, names)
            hint = f"Did you mean {match[1]}{names[nearest_unit]}?" if nearest_unit else None
            raise UserError("unknown unit", where=where, got=repr(word), wanted=_EXAMPLES, next_step=hint)
    return Budget(**budget)  # type: ignore[arg-type]  # by name


def read_seconds(text: str, where: str, unit: str = "") -> float:
    """`8h` or `90min` as seconds. unit: of a number alone. Raises UserError for what is no time."""
    seconds = read_budget(f"{text}{unit}" if text.replace(".", "").isdigit() else text, where).seconds
    if not seconds:
        raise UserError("not a time", where=where, got=repr(text), wanted="such as 2h or 90min")
    return seconds


_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def read_count(text: str, where: str) -> int:
    """`64M`, `1.2B`, `10000`. Raises UserError for anything else, and for values below 1."""
    match = re.fullmatch(r"\s*(-?[0-9][0-9_,]*\.?[0-9]*(?:e[0-9]+)?)\s*([A-Za-z]?)\s*", text, flags=re.IGNORECASE)
    if match is None or match[2].lower() not in _COUNTS:
        raise UserError("not a number", where=where, got=repr(text), wanted="such as 64M, 1.2B or 10000")
    number = float(match[1].replace(",", "").replace("_", "")) * _COUNTS[match[2].lower()]
    if not 1 <= number < 1e30:
        raise UserError("out of range", where=where, got=repr(text), wanted="such as 64M, 1.2B or 10000")
    return round(number)
