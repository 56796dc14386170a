"""Where this user's caches are: built kernels, the history of a chat."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/penjing, or .cache/penjing in the user's folder; it may not be there yet. Raises RuntimeError
    where the user has no folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penjing"
