"""Look-ups by name, and a suggestion after a wrong one."""

from __future__ import annotations

from user_errors import raises_user_error

from penjing.base.registry import look_up

TABLE = {"ordered": "collections:OrderedDict", "counter": "collections:Counter", "absent": "no_such_module_here:X"}


def test_the_named_object_is_imported_and_no_other() -> None:
    from collections import Counter

    assert look_up(TABLE, "counter", what="container") is Counter


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with raises_user_error(next_step="counter"):
        look_up(TABLE, "conter", what="container")
    with raises_user_error(next_step="absent, counter, ordered"):
        look_up(TABLE, "xyz", what="container")


def test_our_own_tables_name_things_that_exist() -> None:
    from penjing.parallel import STRATEGIES
    from penjing.recipes import RECIPES
    from penjing.track import TRACKERS

    for table in (STRATEGIES, RECIPES, TRACKERS):
        for name in table:
            assert callable(look_up(table, name, what="entry"))
