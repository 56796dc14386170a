"""From one unit to another, with exact factors."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from penjing.agent_tools.base import BadArgumentsError, function, text
from penjing.agent_tools.numbers import bounded, number, show

# Of each kind, every unit in its first one. Inch, pound, gallon: the international and US definitions, which are exact.
UNITS: dict[str, dict[str, str]] = {
    "length": {
        "m": "1", "km": "1000", "dm": "0.1", "cm": "0.01", "mm": "0.001", "inch": "0.0254", "foot": "0.3048",
        "yard": "0.9144", "mile": "1609.344", "里": "500",
    },
    "mass": {
        "kg": "1", "g": "0.001", "mg": "0.000001", "tonne": "1000", "pound": "0.45359237", "ounce": "0.028349523125",
        "斤": "0.5", "两": "0.05",
    },
    "time": {"s": "1", "ms": "0.001", "min": "60", "h": "3600", "day": "86400", "week": "604800"},
    "volume": {"l": "1", "ml": "0.001", "m3": "1000", "gallon": "3.785411784"},
    "area": {"m2": "1", "km2": "1000000", "cm2": "0.0001", "hectare": "10000", "acre": "4046.8564224"},
    "data": {
        "byte": "1", "kb": "1000", "mb": "1000000", "gb": "1000000000", "kib": "1024", "mib": "1048576",
        "gib": "1073741824",
    },
}  # fmt: skip
# Kelvin = (degrees + offset) x factor.
TEMPERATURES = {"k": ("0", Fraction(1)), "c": ("273.15", Fraction(1)), "f": ("459.67", Fraction(5, 9))}
_SPELLINGS = {
    "metre": "m", "meter": "m", "kilometre": "km", "kilometer": "km", "centimetre": "cm", "centimeter": "cm",
    "millimetre": "mm", "millimeter": "mm", "in": "inch", "inches": "inch", "ft": "foot", "feet": "foot",
    "yd": "yard", "mi": "mile", "kilogram": "kg", "gram": "g", "t": "tonne", "ton": "tonne", "lb": "pound",
    "lbs": "pound", "oz": "ounce", "second": "s", "minute": "min", "hour": "h", "d": "day", "litre": "l", "liter": "l",
    "millilitre": "ml", "milliliter": "ml", "m²": "m2", "km²": "km2", "cm²": "cm2", "m³": "m3", "ha": "hectare",
    "b": "byte", "celsius": "c", "°c": "c", "fahrenheit": "f", "°f": "f", "kelvin": "k", "米": "m", "公里": "km",
    "千米": "km", "厘米": "cm", "毫米": "mm", "公斤": "kg", "千克": "kg", "克": "g", "吨": "tonne", "秒": "s",
    "分钟": "min", "小时": "h", "天": "day", "周": "week", "升": "l", "毫升": "ml", "英寸": "inch", "英尺": "foot",
    "英里": "mile", "磅": "pound", "摄氏度": "c", "华氏度": "f",
}  # fmt: skip


class Units:
    schema = function(
        "units",
        "Convert a value from one unit to another: lengths, masses, times, volumes, areas, temperatures, bytes.",
        {"value": "a number", "from": "its unit, such as km", "to": "the unit wanted, such as mile"},
    )

    def call(self, arguments: Mapping[str, Any]) -> str:
        value = number(text(arguments, "value"), "value")
        source, target = (_unit(text(arguments, name, longest=40)) for name in ("from", "to"))
        if source in TEMPERATURES and target in TEMPERATURES:
            (offset, factor), (other_offset, other_factor) = TEMPERATURES[source], TEMPERATURES[target]
            return show(bounded((value + Fraction(offset)) * factor / other_factor - Fraction(other_offset)))
        for units in UNITS.values():
            if source in units and target in units:
                return show(bounded(value * Fraction(units[source]) / Fraction(units[target])))
        for name in (source, target):
            if name not in TEMPERATURES and not any(name in units for units in UNITS.values()):
                raise BadArgumentsError(f"no unit is called {name}")
        raise BadArgumentsError(f"{source} and {target} measure different things")


def _unit(written: str) -> str:
    name = written.strip().lower()
    for candidate in (name, name.removesuffix("s")):
        candidate = _SPELLINGS.get(candidate, candidate)
        if candidate in TEMPERATURES or any(candidate in units for units in UNITS.values()):
            return candidate
    return name
