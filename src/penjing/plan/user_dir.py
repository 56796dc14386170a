"""Where this user's own plans live: machine profiles, prices, and the record of how good predictions were."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """$PENJING_HOME, or .penjing in the user's folder."""
    given = os.environ.get("PENJING_HOME")
    return Path(given) if given else Path.home() / ".penjing"
