"""Settings: frozen dataclasses, filled from layers. Defaults < recipe < file (TOML) < `a.b=c` on the command line.

A nested dataclass is a table. A union of dataclasses is a choice: the table's `name` selects the member, and only that
member's settings exist. A setting that would have no effect is therefore an unknown key. A field's annotation holds its
allowed range (`PositiveInt`). A list is comma-separated; values that contain commas need a TOML list: `["a, b", "c"]`.
A dataclass with a `named` class method has presets: `model=26m` or `model.preset=26m` starts from one. Every mistake is
a `UserError` with the key, the value got, the value wanted and the nearest valid key.
"""

import contextlib
import dataclasses
import difflib
import math
import operator
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from annotated_types import BaseMetadata, Ge, Gt, Le, Lt

from penjing.base.code_help import field_comments
from penjing.base.errors import UserError, nearest
from penjing.base.files import read_parsed

T = TypeVar("T")
Layer = Mapping[str, Any]
# Ranges that many settings have, for their annotations.
PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]
Fraction = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
_SIGNS: dict[type, tuple[str, Any, str]] = {
    Ge: ("ge", operator.ge, ">="),
    Gt: ("gt", operator.gt, ">"),
    Le: ("le", operator.le, "<="),
    Lt: ("lt", operator.lt, "<"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """A setting that the program decided: its dotted name, the value before, the value now, and why."""

    field: str
    was: Any
    now: Any
    why: str

    @property
    def values(self) -> tuple[str, str]:
        """The value before and the value now, as text."""
        return str(self.was) or "empty", str(self.now) or "empty"


class Settings:
    """Base of settings classes: a value outside its field's declared range is a UserError that names key and range."""

    section: ClassVar[str] = ""  # path of the class in the tree, such as `objective.rollout`
    # Settings of older versions, with the value that had no effect: files of old runs may hold it.
    removed: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section or cls.section

    def __post_init__(self) -> None:
        for name, bounds in _bounds(type(self)).items():  # type: ignore[arg-type]  # a class can be hashed
            value = getattr(self, name)
            if not all(compare(value, limit) for compare, _, limit in bounds):
                allowed = " and ".join(f"{sign} {limit}" for _, sign, limit in bounds if limit != math.inf)
                raise self.error(name, "out of range", wanted=allowed)

    def error(self, name: str, what: str, *, got: object = None, **more: Any) -> UserError:
        """The error to raise for a setting of this group. got: by default the setting's value."""
        where = f"{self.section}.{name}" if self.section else name
        return UserError(what, where=where, got=operator.attrgetter(name)(self) if got is None else got, **more)


@cache
def _bounds(kind: type) -> dict[str, list[tuple[Any, str, Any]]]:
    """(comparison, its sign, limit) of each field with a declared range."""
    bounds_by_field: dict[str, list[tuple[Any, str, Any]]] = {}
    for name, annotation in typing.get_type_hints(kind, include_extras=True).items():
        for bound in getattr(annotation, "__metadata__", ()):
            if isinstance(bound, BaseMetadata):
                attribute, compare, sign = _SIGNS[type(bound)]
                bounds_by_field.setdefault(name, []).append((compare, sign, getattr(bound, attribute)))
    return bounds_by_field


def resolve(kind: type[T], *layers: Layer) -> T:
    """Build a `kind` from its defaults and `layers`, later ones winning. Raises UserError on any key or value."""
    merged: dict[str, Any] = {}
    for layer in layers:
        try:
            merged = _merge(kind, merged, layer, "")
        except _UnknownKey as unknown:
            raise _unknown_setting(kind, *unknown.args) from None
    return typing.cast(T, _build(kind, merged, ""))


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """`["a.b=1", "c=x"]` -> `{"a": {"b": "1"}, "c": "x"}`; values stay text until their field's type is known."""
    layer: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            raise UserError("not a setting", got=repr(argument), wanted="key=value, for example batch.size=32")
        if not value.startswith("["):  # few shells expand `~` after an equals sign
            value = ",".join(map(_expand_user_path, value.split(",")))
        _put(layer, path, value)
    return layer


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1, "c": {"d": 2}}` -> `{"a": {"b": 1}, "c": {"d": 2}}`; the later of two values wins."""

    def put(values: Mapping[str, Any], above: list[str]) -> None:
        for key, value in values.items():
            path = [*above, *key.split(".")]
            if isinstance(value, Mapping):
                put(value, path)
            else:
                _put(layer, path, str(value) if isinstance(value, Path) else value)

    layer: dict[str, Any] = {}
    put(settings, [])
    return layer


def _expand_user_path(text: str) -> str:
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def _put(layer: dict[str, Any], path: list[str], value: Any) -> None:
    table = layer
    for name in path[:-1]:
        nested = table.setdefault(name, {})
        if isinstance(nested, str):  # model=26m and model.num_hidden_layers=6 together
            nested = table[name] = {"": nested}
        table = nested
    last = path[-1]
    if isinstance(table.get(last), dict):  # the same two the other way round
        table, last = table[last], ""
    table.pop(last, None)  # the later of `model=26m` and `model.preset=64m` comes last and wins
    table[last] = value


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a layer. Raises UserError for one that cannot be read."""
    return dict(read_parsed(path, "TOML", tomllib.loads))


# --- merging ---------------------------------------------------------------------------------------------------------


def _members(annotation: Any) -> list[Any]:
    """The dataclasses that an annotation allows: one, several (a choice), or none."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
    else:
        options = (annotation,)
    return [option for option in options if dataclasses.is_dataclass(option)]


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """The fields that are settings: all but those whose metadata say `setting: False`."""
    return [field for field in dataclasses.fields(kind) if field.metadata.get("setting", True)]


def _key(field: dataclasses.Field[Any]) -> str:
    """A field's name in a configuration. `async_` is `async`, a Python keyword."""
    return field.name.rstrip("_")


_hints = cache(typing.get_type_hints)  # half of the time of resolving settings


def _annotations(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields by key. Its metadata may name `choices`, which lists classes."""
    hints, annotations = _hints(kind), dict[str, Any]()
    for field in _fields(kind):
        choices = field.metadata.get("choices")
        annotations[_key(field)] = typing.Union[tuple(choices())] if choices else hints[field.name]  # noqa: UP007
    return annotations


def _default(member: Any, name: str) -> Any:
    return next((field.default for field in dataclasses.fields(member) if field.name == name), None)


def _merge(kind: Any, base: dict[str, Any], layer: Layer, prefix: str) -> dict[str, Any]:
    """`layer` over `base` for one dataclass; another choice or preset drops the settings of the old one."""
    merged = dict(base)
    annotations = _annotations(kind)
    for name, value in layer.items():
        if name not in annotations:
            path, off = prefix + name, getattr(kind, "removed", {}).get(name)
            if off is not None and convert(tuple[str, ...] if off == () else type(off), value, path) == off:
                continue
            while isinstance(value, Mapping) and value:  # the first setting of an unknown group
                name, value = next(iter(value.items()))
                path = f"{path}.{name}".rstrip(".")
            raise _UnknownKey(path, [prefix + known for known in annotations])
        members = _members(annotations[name])
        if not members:
            merged[name] = value
            continue
        table = _as_table(members, value, prefix + name)
        nested = merged.get(name, {})
        shortcut = "name" if len(members) > 1 else "preset"
        if shortcut in table and table[shortcut] != nested.get(shortcut, _default(members[0], shortcut)):
            nested = {}
        member = _choose(members, {**nested, **table}, prefix + name)
        merged[name] = _merge(member, nested, table, f"{prefix}{name}.")
    return merged


def _as_table(members: list[Any], value: Any, key: str) -> dict[str, Any]:
    """The value as a table: `model=26m` is short for the preset, `optimizer=muon` for the name."""
    has_shortcut = len(members) > 1 or hasattr(members[0], "named")
    shortcut = "name" if len(members) > 1 else "preset"
    if isinstance(value, str) and has_shortcut:
        return {shortcut: value}
    if not isinstance(value, Mapping) or ("" in value and not has_shortcut):
        got = value[""] if isinstance(value, Mapping) else value
        inner = ", ".join(f"{key}.{_key(field)}" for field in dataclasses.fields(members[0]))
        raise UserError("a group of settings, not one value", where=key, got=repr(got), wanted=f"one of {inner}")
    return {shortcut if name == "" else name: inner for name, inner in value.items()}


def _choose(members: list[Any], table: Mapping[str, Any], key: str) -> Any:
    if len(members) == 1:
        return members[0]
    by_name = {str(_default(member, "name")): member for member in members}
    selected = table.get("name", _default(members[0], "name"))
    if not isinstance(selected, str) or selected not in by_name:
        raise UserError("no such choice", where=f"{key}.name", got=repr(selected), wanted=" or ".join(by_name))
    return by_name[selected]


class _UnknownKey(Exception):
    """The dotted path of a key that is no setting, and the settings of its group."""


class Setting(NamedTuple):
    """A setting below a dataclass. needs: a choice, such as optimizer.name=muon, or empty. bounds: (sign, limit)."""

    path: str
    owner: type
    field: dataclasses.Field[Any]
    annotation: Any
    needs: str
    bounds: tuple[tuple[str, float], ...]


def walk(kind: Any, prefix: str = "", needs: str = "") -> Iterator[Setting]:
    """Every setting below `kind`, those of all choices, in the order of the code."""
    annotations, bounds = _annotations(kind), _bounds(kind)
    for field in _fields(kind):
        path, members = prefix + _key(field), _members(annotations[_key(field)])
        for member in members:
            choice = f"{path}.name={_default(member, 'name')}" if len(members) > 1 else needs
            yield from walk(member, f"{path}.", choice)
        if not members:
            allowed = tuple((sign, limit) for _, sign, limit in bounds.get(field.name, ()))
            yield Setting(path, kind, field, annotations[_key(field)], needs, allowed)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def settings_named(root: Any, path: str) -> list[str]:
    """The settings that have this name, here, in another group, or in other programs; the most similar path first."""
    name = _leaf(path).lower().replace("-", "_")
    same = {setting.path for setting in walk(root) if _leaf(setting.path) == name}  # choices may share one
    return [*getattr(root, "foreign", {}).get(name, ())] or difflib.get_close_matches(path, sorted(same), 3, 0)


def _unknown_setting(root: Any, path: str, group: list[str]) -> UserError:
    """The error for a key that is no setting. It names the one that was meant: by its name in other programs, by the
    same name in another group, or by a similar name. group: the settings where the key stands."""
    paths = {setting.path: setting.needs for setting in reversed([*walk(root)])}  # of choices, the first counts
    if path in paths:
        return UserError("unknown setting", where=path, next_step=f"It needs a choice such as {paths[path]}.")
    if reason := getattr(root, "absent", {}).get(_leaf(path)):
        return UserError("no such setting", where=path, next_step=reason)
    meant = settings_named(root, path)
    by_name = {_leaf(key): key for key in [*paths, *group]}
    if not meant and (near := nearest(_leaf(path).lower(), by_name)):
        meant = [by_name[near]]
    hint = f"Did you mean {' or '.join(meant)}?" if meant else f"Settings here: {', '.join(group)}"
    return UserError("unknown setting", where=path, next_step=hint)


# --- building --------------------------------------------------------------------------------------------------------


def _build(kind: Any, table: Layer, prefix: str) -> Any:
    annotations = _annotations(kind)
    values: dict[str, Any] = {}
    if named := getattr(kind, "named", None):
        preset = table.get("preset", _default(kind, "preset"))
        values.update(named(convert(str, preset, prefix + "preset")))
    for field in _fields(kind):
        name = _key(field)
        key, members = prefix + name, _members(annotations[name])
        if members:
            nested = table.get(name, {})
            if nested or field.default_factory is dataclasses.MISSING:
                values[field.name] = _build(_choose(members, nested, key), nested, key + ".")
        elif name in table:
            values[field.name] = convert(annotations[name], table[name], key)
    return kind(**values)


def convert(annotation: Any, value: Any, key: str) -> Any:
    """`value` (text from a command line, or a TOML value) as the annotated type; `key` is named in the error."""
    origin, options = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        if str(value) in options:
            return str(value)
        best = nearest(str(value), options)
        hint = f"Did you mean {best}?" if best else None
        raise UserError("no such choice", where=key, got=repr(value), wanted=" or ".join(options), next_step=hint)
    if origin is tuple:
        if isinstance(value, str):
            value = _parse_list(value, key) if value.startswith("[") else [item for item in value.split(",") if item]
        if not isinstance(value, (list, tuple)):
            raise UserError("not a list", where=key, got=repr(value), wanted="values with commas between them")
        return tuple(convert(options[0], item, key) for item in value)
    if annotation is bool:
        if str(value).lower() in ("true", "false", "1", "0", "yes", "no"):
            return str(value).lower() in ("true", "1", "yes")
        raise UserError("not a yes or no", where=key, got=repr(value), wanted="true or false")
    if annotation in (int, float):
        return _number(annotation, value, key)
    if annotation is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return _utf8(str(value), key)
    raise UserError(
        "not of the right type", where=key, got=repr(value), wanted=getattr(annotation, "__name__", annotation)
    )


def _parse_list(text: str, key: str) -> list[Any]:
    """Parse a TOML list, the form for values that contain commas."""
    try:
        parsed = tomllib.loads(f"list = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    if list(parsed) != ["list"]:  # a second line after the list would be another key
        wanted = 'one such as ["a", "b"], or values with commas between them'
        hint = f'Quote it in a shell: \'{key}=["a", "b"]\'.'
        raise UserError("not a list", where=key, got=repr(text), wanted=wanted, next_step=hint)
    return [_expand_user_path(item) if isinstance(item, str) else item for item in parsed["list"]]


def _utf8(text: str, key: str) -> str:
    """`text` if it can be encoded as UTF-8, which run.toml needs. File names may hold other bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("not valid UTF-8", where=key, got=ascii(text), next_step="Rename the file.") from None
    return text


def _number(annotation: Any, value: Any, key: str) -> Any:
    wanted, number = "a whole number" if annotation is int else "a number", math.nan
    text = "" if isinstance(value, bool) else str(value).replace("_", "")
    with contextlib.suppress(ValueError):
        number = float(text)
    if math.isnan(number):
        raise UserError("not a number", where=key, got=repr(value), wanted=wanted)
    if annotation is int and not math.isinf(number):
        with contextlib.suppress(ValueError):
            number = int(text)  # a float would keep 53 bits only
        if number != int(number):
            raise UserError("not a whole number", where=key, got=repr(value), wanted=wanted)
        number = int(number)
    in_range = -(2**63) <= number < 2**63 if annotation is int else not number or 1e-37 <= abs(number) <= 1e37
    if not in_range:  # of int64, and of float32 with a margin
        wanted += " of 64 bits" if annotation is int else ": 0, or 1e-37 to 1e37 in size"
        raise UserError("out of range", where=key, got=repr(value), wanted=wanted)
    return number


# --- dumping ---------------------------------------------------------------------------------------------------------


def to_dict(value: Any) -> dict[str, Any]:
    """A resolved configuration as plain tables, every setting spelled out."""
    items = {_key(field): getattr(value, field.name) for field in _fields(value)}
    return {name: to_dict(item) if dataclasses.is_dataclass(item) else item for name, item in items.items()}


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of nested tables."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_toml(value: Any, decisions: Iterable[Decision] = (), *, explain: bool = False) -> str:
    """A resolved configuration as TOML; `resolve(type, read_toml(...))` gives the same one back. Comments beside the
    settings have the decisions and, with explain, what each setting means."""
    comments = dict(_meanings(value)) if explain else {}
    for decision in decisions:
        stays = operator.attrgetter(decision.field)(value) == decision.was
        was, now = decision.values
        said = f"{now} here" if stays else f"was {was}"
        comments.setdefault(decision.field, []).append(f"{said}: {decision.why}")
    lines: list[str] = []
    _write_table(lines, to_dict(value), "", comments)
    return "\n".join(lines).lstrip("\n") + "\n"


def _meanings(value: Any, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Each dotted key, and what the code says of it."""
    kind: type = type(value)
    for field in _fields(value):
        key, item = prefix + _key(field), getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            yield from _meanings(item, f"{key}.")
        elif said := field_comments(kind).get(field.name):
            yield key, [said]


def _write_table(lines: list[str], table: Mapping[str, Any], prefix: str, comments: Mapping[str, list[str]]) -> None:
    def line(text: str, key: str) -> str:
        said = "; ".join(comments.get(key, ()))
        # A comment ends with its line, and holds no control characters.
        return text + (f"  # {''.join(c if c.isprintable() else ' ' for c in said)}" if said else "")

    for name, value in table.items():
        if not isinstance(value, Mapping):
            lines.append(line(f"{name} = {_toml_value(value)}", prefix + name))
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines.extend(["", line(f"[{prefix}{name}]", prefix + name)])
            _write_table(lines, value, f"{prefix}{name}.", comments)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'
    return repr(value)
