"""The user's folder: machine profiles, prices, and the history of predictions."""

from __future__ import annotations

import os
from pathlib import Path


def user_dir() -> Path:
    """$PENJING_HOME, or .penjing in the user's folder."""
    configured = os.environ.get("PENJING_HOME")
    return Path(configured) if configured else Path.home() / ".penjing"
