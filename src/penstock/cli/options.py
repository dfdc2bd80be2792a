"""Options that many commands share, and opening the log that they name."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from penstock.errors import UsageError
from penstock.log import OptionValue, open_log
from penstock.log.api import Log

DEFAULT_LOG = "penstock.db"


class Settings(msgspec.Struct):
    """What was said before the command: `penstock --log x.db read …`."""

    log: str | None = None


LogOption = Annotated[
    str | None,
    typer.Option(
        "--log",
        envvar="PENSTOCK_LOG",
        metavar="URL",
        help="The log: a path for an embedded one. Default: penstock.db.",
        rich_help_panel="Log",
    ),
]
LogOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--log-option",
        metavar="NAME=VALUE",
        help="An option of the log, such as event_bytes_max=2000000; may be repeated.",
        rich_help_panel="Log",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, one value per line, for programs.")
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


def open_named(
    context: typer.Context,
    log: str | None,
    options: list[str] | None = None,
    *,
    create: bool = False,
) -> Log:
    """The log that the command line or the environment names."""
    earlier = context.find_object(Settings)
    url = log or (earlier.log if earlier else None) or DEFAULT_LOG
    return open_log(url, create=create, **parse_options(options or []))


def parse_options(options: list[str]) -> dict[str, OptionValue]:
    found: dict[str, OptionValue] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise UsageError(f"--log-option {option!r} is not NAME=VALUE")
        found[name] = value
    return found


def complete_stream(context: typer.Context, incomplete: str) -> list[str]:
    """Names of streams for the shell; nothing where the log cannot be opened."""
    try:
        with open_named(context, context.params.get("log")) as log:
            names = [str(stream.name) for stream in log.streams()]
    except Exception:
        return []
    return [name for name in names if name.startswith(incomplete)]
