"""One process, one device."""

from __future__ import annotations

from penjing.parallel.base import Strategy


class Single(Strategy):
    """The strategy without neighbours: every operation is the plain one."""
