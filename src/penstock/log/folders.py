"""Where Penstock keeps what it can make again: the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str, environment: str) -> Path:
    """The folder of that name, or the one that a variable of the environment names."""
    if chosen := os.environ.get(environment):
        return Path(chosen)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "penstock" / name
