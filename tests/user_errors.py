"""Tests name the facts of an error, and leave its sentence to whoever words it."""

from contextlib import contextmanager

import pytest

from penjing.base.errors import UserError


@contextmanager
def raises_user_error(**facts):
    """A UserError whose fields where, got, wanted or next_step are these facts; of texts and paths a part is enough."""
    with pytest.raises(UserError) as caught:
        yield caught
    for field, fact in facts.items():
        value = getattr(caught.value, field)
        if isinstance(fact, str):
            assert fact in str(value), f"{field} of: {caught.value}"
        else:
            assert value == fact, f"{field} of: {caught.value}"
