"""Days between dates, dates some days away, and days of the week. Today is given in the settings, never looked up."""

import datetime
from collections.abc import Mapping
from typing import Any

from penjing.agent_tools.base import BadArgumentsError, ToolSettings, function, text
from penjing.agent_tools.numbers import number

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Dates:
    schema = function(
        "dates",
        "Reckon with dates, written YYYY-MM-DD or today.",
        {"what": "today, weekday (of date), difference (days from date to other) or add (days to date)"},
        date="a date; by default today",
        other="difference: the later date",
        days="add: how many days, negative for earlier",
    )

    def __init__(self, settings: ToolSettings) -> None:
        self.today = datetime.date.fromisoformat(settings.today)

    def call(self, arguments: Mapping[str, Any]) -> str:
        what = text(arguments, "what").strip().lower()
        date = self._date(arguments, "date", "today")
        if what == "today":
            return self.today.isoformat()
        if what == "weekday":
            return _DAYS[date.weekday()]
        if what == "difference":
            return str((self._date(arguments, "other", None) - date).days)
        if what == "add":
            days = number(text(arguments, "days"), "days")
            if days.denominator != 1:
                raise BadArgumentsError("argument days is not a whole number")
            try:
                return (date + datetime.timedelta(days=int(days))).isoformat()
            except OverflowError:
                raise BadArgumentsError("dates go from year 1 to year 9999") from None
        raise BadArgumentsError("argument what is none of today, weekday, difference, add")

    def _date(self, arguments: Mapping[str, Any], name: str, default: str | None) -> datetime.date:
        written = text(arguments, name, default=default).strip()
        if written.lower() == "today":
            return self.today
        try:
            return datetime.datetime.strptime(written, "%Y-%m-%d").date()
        except ValueError:
            raise BadArgumentsError(f"argument {name} is not a date such as 2025-01-31") from None
