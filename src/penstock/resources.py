"""Files that ship with Penstock, and the cache folder for files that it can recreate."""

from __future__ import annotations

import functools
import importlib.resources
import os
from pathlib import Path


@functools.cache
def statements(package: str, file: str) -> dict[str, str]:
    """The SQL statements of a file in a package, by name; `-- name: NAME` introduces each."""
    text = importlib.resources.files(package).joinpath(file).read_text("utf-8")
    blocks = (block.partition("\n") for block in text.split("-- name: ")[1:])
    return {name.strip(): body.strip() for name, _, body in blocks}


def cache_folder(name: str, environment: str) -> Path:
    """The folder of that name in the user's cache, or the one an environment variable names."""
    if chosen := os.environ.get(environment):
        return Path(chosen)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "penstock" / name
