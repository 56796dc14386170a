"""The user's folders: profiles, prices, the history of predictions; in the cache, kernels and the history of chats."""

import os
from pathlib import Path


def user_dir() -> Path:
    """$PENJING_HOME, or .penjing in the user's folder."""
    return Path(os.environ.get("PENJING_HOME") or Path.home() / ".penjing")


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/penjing or ~/.cache/penjing; it may not exist yet. Raises RuntimeError for a user without a home
    directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penjing"
