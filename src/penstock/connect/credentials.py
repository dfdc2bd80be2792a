"""Secrets given by reference, so that they do not appear on a command line.

`@env:NAME` is the value of the environment variable NAME, `@file:PATH` the contents of a file.
Anything else is the secret itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.errors import UsageError

ENVIRONMENT = "@env:"
FILE = "@file:"
FILE_BYTES_MAX = 64 << 10
BY_NAME = "A secret can be given as @env:NAME or @file:PATH."
"""For the help text of options that take a secret."""
_IN_ADDRESS = re.compile(r"(?<![\w@])([a-z0-9+]+:/*)[^\s/@'\"]*:[^\s'\"]*@", re.IGNORECASE)
_NAMED = re.compile(r"((?:password|passwd|secret|cookie)\s*=\s*)('[^']*'|[^\s&'\"]+)", re.I)


def reveal(given: str) -> str:
    """The secret, given literally or by reference. A file's final line ending is dropped.

    Raises `UsageError` if there is no such variable or file.
    """
    if given.startswith(ENVIRONMENT):
        name = given.removeprefix(ENVIRONMENT)
        if name not in os.environ:
            raise UsageError(f"environment variable {name} is not set ({given})")
        return os.environ[name]
    if given.startswith(FILE):
        return _content(given.removeprefix(FILE))
    return given


def _content(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        text = data.decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a valid secret: it is not UTF-8 text") from None
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(
            f"{path} is not a valid secret: it is larger than {FILE_BYTES_MAX:,} bytes"
        )
    return text.removesuffix("\n").removesuffix("\r")


def hide(text: str) -> str:
    """A message with the secrets removed from its addresses and settings."""
    return _NAMED.sub(r"\1…", _IN_ADDRESS.sub(r"\1…@", text))
