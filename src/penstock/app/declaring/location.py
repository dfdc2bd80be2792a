"""Where in the user's files something was declared, for error messages."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple

_HERE = str(Path(__file__).parents[1]) + os.sep


class Location(NamedTuple):
    """A line of a file, shown as `file:line`."""

    file: str
    line: int

    def __str__(self) -> str:
        path = Path(self.file)
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}"


def caller() -> Location:
    """The line of the nearest frame that is not in this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno)


def of_function(code: CodeType) -> Location:
    return Location(code.co_filename, code.co_firstlineno)
