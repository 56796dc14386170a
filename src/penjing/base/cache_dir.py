"""The user's cache directory: built kernels, the history of a chat."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/penjing or ~/.cache/penjing; it may not exist yet. Raises RuntimeError for a user without a home
    directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penjing"
