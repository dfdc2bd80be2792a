"""SQL in files of its own, each statement under a name: `-- name: so`."""

from __future__ import annotations

import functools
import importlib.resources


@functools.cache
def statements(package: str, file: str) -> dict[str, str]:
    """The statements of a file that lies in a package."""
    text = importlib.resources.files(package).joinpath(file).read_text("utf-8")
    blocks = (block.partition("\n") for block in text.split("-- name: ")[1:])
    return {name.strip(): body.strip() for name, _, body in blocks}
