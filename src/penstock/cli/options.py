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
from penstock.connect.credentials import BY_NAME, reveal
from penstock.errors import LogFormatError, UsageError
from penstock.log import OptionValue, is_path, log_path, open_log
from penstock.log.api import Limits, Log
from penstock.log.declaring.objects import Defaults
from penstock.log.declaring.quantities import parse_bytes, parse_duration_ms

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
        "--setting",
        "-s",
        metavar="NAME=VALUE",
        help="A setting of the log, such as event_bytes_max=2000000, or of Kafka's client, such as "
        f"security.protocol=SSL; may be repeated. {BY_NAME}",
        rich_help_panel="Log",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON for programs, one value per line.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
UntilIdleOption = Annotated[
    bool, typer.Option("--until-idle", help="Exit when there is nothing left to process.")
]
GroupArgument = Annotated[
    str, typer.Argument(metavar="GROUP", help="The group's name.", show_default=False)
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done without doing it.")
]
TimeoutOption = Annotated[
    str,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        help="How long to keep trying while the log cannot accept writes.",
    ),
]
AtOption = Annotated[
    str,
    typer.Option(
        "--at",
        metavar="HOST:PORT",
        help="Address to listen on. Port 0 picks a free port; auto:NAME picks one that others find "
        "by name.",
    ),
]
StreamArgument = Annotated[
    str,
    typer.Argument(
        metavar="STREAM",
        help="NAME or NAMESPACE.NAME.",
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
            f"{address} is open to other machines, and no cookie is set: set one (--cookie, "
            "PENSTOCK_COOKIE)"
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


def open_to_read(
    context: typer.Context,
    log: str | None,
    options: list[str] | None = None,
    *,
    read_only: bool = False,
) -> Log:
    """The log that is named, for a command that writes nothing.

    It is opened read-only if it is to be, or if its file or directory cannot be written.
    """
    url, given = log_url(context, log), parse_options(options or [])
    if is_path(url) and (read_only or not _is_writable(log_path(url))):
        given.setdefault("read_only", True)
    return open_log(url, create=False, **given)


def _is_writable(path: Path) -> bool:
    return not path.exists() or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))


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
    """What `--setting` gives, by name."""
    return dict(parse_setting(option) for option in options)


def parse_setting(text: str) -> tuple[str, str]:
    """What `NAME=VALUE` says; the value may be a secret that is given by name."""
    name, equals, value = text.partition("=")
    if not name or not equals:  # not shown: it may be the value
        raise UsageError("a --setting has no name or no =: write NAME=VALUE")
    return name, reveal(value)


def parse_duration(text: str, option: str) -> int:
    """Milliseconds of a duration with its unit: `10s`, `5 minutes`."""
    if text.strip().isdigit():
        raise UsageError(f"{option} {text!r} has no unit: write {text.strip()}s, or '5 minutes'")
    try:
        return parse_duration_ms(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def parse_size(text: str, option: str) -> int:
    """Bytes of a size with its unit: `10 GB`."""
    if text.strip().isdigit():
        raise UsageError(f"{option} {text!r} has no unit: write '10 GB', or '512 MiB'")
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def complete_stream(context: typer.Context, incomplete: str) -> list[str]:
    """Names of streams for the shell; nothing where the log cannot be opened."""
    try:
        with open_to_read(context, context.params.get("log")) as log:
            names = [str(stream.name) for stream in log.streams()]
    except Exception:
        return []
    return [name for name in names if name.startswith(incomplete)]
