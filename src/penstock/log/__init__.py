"""The log: streams, transactions, tables; one contract, several engines."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from penstock.errors import UsageError
from penstock.log.api import Limits, Log
from penstock.log.objects import Defaults
from penstock.log.sqlite.log import SqliteLog, SqliteOptions

OptionValue = str | int | bool
S = TypeVar("S", bound=msgspec.Struct)


def open_log(
    url: str | Path = "penstock.db", *, create: bool = True, **options: OptionValue
) -> Log:
    """Open the log that `url` names; use it in a `with` statement, or close it.

    A path is an embedded log, made if it is not there unless `create` is false. Options are
    the fields of `Limits`, `Defaults` and of the engine's own options, by name.
    """
    if not isinstance(url, str | Path) or not str(url):
        raise UsageError(f"a log is named by a path or URL, not by {url!r}")
    text = str(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme not in ("", "file"):
        raise UsageError(
            f"{text!r} has the scheme {scheme!r}; this version opens embedded logs: give a path, "
            "such as penstock.db"
        )
    limits, rest = _take(Limits, dict(options))
    defaults, rest = _take(Defaults, rest)
    own, rest = _take(SqliteOptions, rest)
    if rest:
        known = [*Limits.__struct_fields__, *Defaults.__struct_fields__]
        known += SqliteOptions.__struct_fields__
        raise UsageError(
            f"there is no log option {next(iter(rest))!r}; there are {', '.join(known)}"
        )
    return SqliteLog(
        log_path(text), create=create, limits=limits, defaults=defaults, options=own
    ).open()


def log_path(url: str) -> Path:
    """The file of an embedded log."""
    return Path(url.removeprefix("file://"))


def _take(kind: type[S], options: dict[str, OptionValue]) -> tuple[S, dict[str, OptionValue]]:
    mine = {name: options.pop(name) for name in kind.__struct_fields__ if name in options}
    try:
        made = msgspec.convert(mine, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"a log option is wrong: {error}") from None
    for name in mine:
        value, least = getattr(made, name), 0 if name == "upkeep_interval_ms" else 1
        if isinstance(value, int) and value < least:
            raise UsageError(f"the log option {name} is {value}; it must be at least {least}")
    return made, options


__all__ = ["Limits", "Log", "OptionValue", "log_path", "open_log"]
