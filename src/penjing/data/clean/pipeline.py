"""A pipeline of cleaning rules: named, from a TOML file, or one that is shipped; resolved, fingerprinted, and run."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

from penjing.base.config import read_toml, resolve, to_dict, to_toml
from penjing.base.errors import UserError, suggest
from penjing.base.registry import look_up
from penjing.data.clean import RULES
from penjing.data.clean.rule import CorpusRule, Dropped, Record, Rule, RuleSettings, place_of
from penjing.data.formats.files import content_of
from penjing.data.formats.hub import is_hub

_SHIPPED = Path(__file__).parent / "pipelines"


class Pipeline:
    """Rules in order with their settings."""

    def __init__(self, rules: Mapping[str, Mapping[str, Any]]) -> None:
        """rules: the settings of each that are not the default. Raises UserError for a wrong name, setting or value."""
        types = {name: look_up(RULES, name, what="cleaning rule") for name in rules}
        tables = make_dataclass("Rules", [(name, rule.settings_type) for name, rule in types.items()])
        self._types: dict[str, type[Rule]] = types
        self._settings: Any = resolve(make_dataclass("Pipeline", [("rules", tables)]), {"rules": rules})
        for name, settings in self.rules.items():
            for file in map(Path, settings.files()):
                if not file.is_file() and not is_hub(file):
                    raise UserError("no such file", where=f"rules.{name}", got=repr(str(file)))

    @classmethod
    def load(cls, names: Sequence[str]) -> "Pipeline":
        """The rules that `data.clean` names: each a rule, a shipped pipeline (`default`), or a TOML file of rules.

        A rule that is named again keeps its place; its later settings win. Raises UserError.
        """
        rules: dict[str, dict[str, Any]] = {}
        for name in names:
            more: dict[str, dict[str, Any]] = {name: {}} if name in RULES else _read(name)
            rules.update({rule: {**rules.get(rule, {}), **settings} for rule, settings in more.items()})
        return cls(rules)

    @property
    def rules(self) -> dict[str, RuleSettings]:
        """The settings of each rule, in order."""
        return {name: getattr(self._settings.rules, name) for name in self._types}

    def resolved(self) -> str:
        """TOML with every setting, from which `load` makes the same pipeline."""
        return to_toml(self._settings)

    def fingerprint(self) -> list[Any]:
        """What decides the effect: the rules, those with settings as {name: settings}, and the files they read."""
        return [_identity(name, settings) for name, settings in self.rules.items()]

    def make_rules(self) -> dict[str, Rule]:
        """New rules, for one pass."""
        return {name: self._types[name](settings) for name, settings in self.rules.items()}

    def make(self, changed: Counter[str]) -> Callable[[Record], Record | str]:
        """The rules as one function, for one pass in order. changed: counts the records that each rule changes."""
        rules = self.make_rules()

        def clean(record: Record) -> Record | str:
            steps, result = outcome(rules, record)
            for name, compared in steps:
                rule = rules[name]
                if not isinstance(rule, CorpusRule) or compared is None:
                    changed[name] += 1
                elif dropped := rule.compare(rule.sketch(compared), place_of(record)):
                    return Dropped(f"{name}: {dropped}", dropped.detail)
            return result

        return clean


def outcome(rules: Mapping[str, Rule], record: Record) -> tuple[list[tuple[str, Record | None]], Record | Dropped]:
    """What the rules make of one record, all that can be known from it alone. Any process may do it.

    In order, the rules that changed the record (with None), and those that compare it with others (with the record as
    it reaches them). Then the record, or why it is left out, if no comparison leaves it out before.
    """
    steps: list[tuple[str, Record | None]] = []
    for name, rule in rules.items():
        if rule.num_keys:
            steps.append((name, record))
            continue
        cleaned = rule(record)
        if isinstance(cleaned, str):
            return steps, Dropped(f"{name}: {cleaned}", getattr(cleaned, "detail", ""))
        if cleaned is not record and cleaned != record:
            steps.append((name, None))
            record = cleaned
    return steps, record


def _read(name: str) -> dict[str, dict[str, Any]]:
    """The `[rules.NAME]` tables of a TOML file or of a shipped pipeline."""
    shipped = {path.stem: path for path in _SHIPPED.glob("*.toml")}
    if name not in shipped and not name.endswith(".toml"):
        wanted = "a cleaning rule, a shipped pipeline, or a TOML file"
        hint = suggest(name, [*RULES, *shipped])
        raise UserError(f"no cleaning rule is called {name!r}", where="data.clean", wanted=wanted, next_step=hint)
    path = shipped.get(name, Path(name))
    tables = read_toml(path)
    rules = tables.get("rules")
    if set(tables) != {"rules"} or not isinstance(rules, dict) or not all(isinstance(t, dict) for t in rules.values()):
        raise UserError("not a pipeline", where=path, got=", ".join(tables) or "no table", wanted="tables [rules.NAME]")
    try:
        Pipeline(rules)
    except UserError as error:
        where = path if error.where is None else f"{path}: {error.where}"
        raise UserError(
            error.what, where=where, got=error.got, wanted=error.wanted, next_step=error.next_step
        ) from None
    return rules


def _identity(name: str, settings: RuleSettings) -> Any:
    if not fields(settings):
        return name
    hashes = {f"sha256 of {file}": content_of(Path(file))[1] for file in settings.files()}
    return {name: {**json.loads(json.dumps(to_dict(settings))), **hashes}}  # as it is read back from JSON
