"""Tests name the facts of an error, and leave its sentence to whoever words it."""

from contextlib import contextmanager

import pytest

from penjing.base.errors import UserError


@contextmanager
def raises_user_error(**facts):
    """A UserError with these facts. Of `where` the end is enough, as of a path; of got, wanted and next_step a part."""
    with pytest.raises(UserError) as caught:
        yield caught
    for field, fact in facts.items():
        value = getattr(caught.value, field)
        if not isinstance(fact, str):
            agrees = value == fact
        else:
            agrees = str(value).endswith(fact) if field == "where" else fact in str(value)
        assert agrees, f"{field} is not {fact!r}: {caught.value}"
