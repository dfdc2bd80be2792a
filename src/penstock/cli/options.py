"""Options that many commands share, and opening the log that they name."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from penstock.connect.addresses import is_closed
from penstock.connect.credentials import reveal
from penstock.errors import LogFormatError, UsageError
from penstock.log import OptionValue, is_path, log_path, open_log
from penstock.log.api import Limits, Log
from penstock.log.objects import Defaults

T = TypeVar("T")
DEFAULT_LOG = "penstock.db"


class Settings(msgspec.Struct):
    """What was said before the command: `penstock --log x.db read …`."""

    log: str | None = None


LogOption = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="URL",
        help="The log: a path, or kafka://HOST:PORT,… Default: PENSTOCK_LOG, or penstock.db.",
        rich_help_panel="Log",
    ),
]
LogOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--log-option",
        metavar="NAME=VALUE",
        help="An option of the log, such as event_bytes_max=2000000, or one of Kafka's client, "
        "such as security.protocol=SSL; may be repeated.",
        rich_help_panel="Log",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, one value per line, for programs.")
]
AtOption = Annotated[
    str,
    typer.Option(
        "--at",
        metavar="HOST:PORT",
        help="Where to listen; port 0 is any that is free, auto:NAME one that others find by name.",
    ),
]
StreamArgument = Annotated[
    str,
    typer.Argument(
        metavar="STREAM",
        help="NAME, or NAMESPACE.NAME.",
        show_default=False,
        autocompletion=lambda ctx, incomplete: complete_stream(ctx, incomplete),  # noqa: PLW0108
    ),
]


def examples(*commands: str) -> str:
    """The end of a command's help: what one would type, a line each."""
    return "\n\n".join(["**Examples**", *(f"`{command}`" for command in commands)])


def check_closed(address: str, cookie: str) -> None:
    """Refuse to listen where anybody could come in."""
    if not is_closed(address, cookie):
        raise UsageError(
            f"anybody who reaches {address} could write: set a cookie (--cookie, PENSTOCK_COOKIE)"
        )


def open_named(
    context: typer.Context,
    log: str | None,
    options: list[str] | None = None,
    *,
    create: bool = False,
) -> Log:
    """The log that the command line or the environment names."""
    return open_log(log_url(context, log), create=create, **parse_options(options or []))


def log_url(context: typer.Context, log: str | None) -> str:
    """Which log: said with the command, before it, in the environment, or none of these."""
    earlier = context.find_object(Settings)
    before = earlier.log if earlier else None
    return log or before or os.environ.get("PENSTOCK_LOG") or DEFAULT_LOG


def change_log(
    context: typer.Context,
    log: str | None,
    options: list[str] | None,
    work: Callable[[Log], T],
) -> T:
    """Do the work on the log, made if it is not there.

    Where it would have to be made, the work is rehearsed on an empty one first: a change that
    fails leaves no file behind, and no file is ever removed.
    """
    if not log_exists(context, log, options):
        with empty_log(options) as rehearsal:
            work(rehearsal)
    with open_named(context, log, options, create=True) as opened:
        return work(opened)


def log_exists(context: typer.Context, log: str | None, options: list[str] | None) -> bool:
    """Whether the log is there already. Raises where that cannot be told."""
    url = log_url(context, log)
    if is_path(url):
        return log_path(url).exists()
    try:
        open_named(context, log, options).close()
    except LogFormatError:
        return False
    return True


@contextlib.contextmanager
def empty_log(options: list[str] | None) -> Iterator[Log]:
    """A new log that leaves nothing behind."""
    known = (*Limits.__struct_fields__, *Defaults.__struct_fields__)
    given = {n: value for n, value in parse_options(options or []).items() if n in known}
    with tempfile.TemporaryDirectory() as folder:
        with open_log(Path(folder, "empty.db"), create=True, **given) as opened:
            yield opened


def parse_options(options: list[str]) -> dict[str, OptionValue]:
    found: dict[str, OptionValue] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:  # not shown: it may be the value
            raise UsageError("a --log-option without =: write NAME=VALUE")
        found[name] = reveal(value)
    return found


def complete_stream(context: typer.Context, incomplete: str) -> list[str]:
    """Names of streams for the shell; nothing where the log cannot be opened."""
    try:
        with open_named(context, context.params.get("log")) as log:
            names = [str(stream.name) for stream in log.streams()]
    except Exception:
        return []
    return [name for name in names if name.startswith(incomplete)]
