"""The program: puts the commands together and turns errors into messages and exit codes.

Exit codes: 0 success, 1 failure (or damage found), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from itertools import pairwise

import msgspec
import typer

import penstock
from penstock.cli import (
    altering,  # noqa: F401  adds `stream alter`
    apps,
    catalogues,
    clusters,
    connect_sinks,
    connectors,
    dead,
    groups,
    outboxes,
    publishing,
    reading,
    streams,
    tables,
    upkeep,
)
from penstock.cli import (
    help as help_,
)
from penstock.cli.options import LogOption, Settings
from penstock.cli.output import OutputClosedError, OutputError, flush
from penstock.connect.credentials import hide
from penstock.errors import PenstockError, UsageError

#: what typer raises for a wrong command line: the parent of BadParameter, and no public name
_USAGE_ERRORS: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
FAILURE, USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="""Transactional event streams: one file on a laptop, Kafka and Spark in production.

Try it:

    penstock stream create orders --key user

    penstock pub orders '{"user": "ada", "amount": 9.5}'

    penstock read orders

The log is `penstock.db` in the current directory unless `--log` or `PENSTOCK_LOG` names another.
""",
)
publishing.register(app)
reading.register(app)
streams.register(app)
tables.register(app)
dead.register(app)
catalogues.register(app)
apps.register(app)
connectors.register(app)
connect_sinks.register(app)
groups.register(app)
outboxes.register(app)
upkeep.register(app)
clusters.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"penstock {penstock.__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    log: LogOption = None,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    del version
    context.obj = Settings(log=log)


command = functools.cache(lambda: help_.build(app))
"""The commands as they are shown and run; made when the first is."""


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:
        return FAILURE  # closed: nothing could be said
    as_json = _wants_json(arguments)
    try:
        result = command()(arguments, standalone_mode=False, prog_name="penstock")
        flush()
    except PenstockError as error:
        return _report(error.code, str(error), as_json, _exit_code(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, OutputClosedError):
        # Whoever read our output has had enough; that is no error of ours.
        _discard_output()
        return 128 + signal.SIGPIPE
    except _USAGE_ERRORS as error:
        message = error.format_message().rstrip(".")
        if not message:  # a bare `penstock` has shown its help
            return USAGE
        end = "" if message.endswith("?") else "."
        return _report("usage", f"{message}{end} See `{_command(error)} --help`.", as_json, USAGE)
    except OSError as error:
        return _report("system", _system_error(error), as_json, FAILURE)
    return result if isinstance(result, int) else 0


def _wants_json(arguments: list[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own or "--format=json" in own or ("--format", "json") in pairwise(own)


def _command(error: typer.BadParameter) -> str:
    return error.ctx.command_path if error.ctx else "penstock"


def _exit_code(error: PenstockError) -> int:
    return USAGE if isinstance(error, UsageError) else FAILURE


def _system_error(error: OSError) -> str:
    """What the operating system refused, and for which file, if it says."""
    what = error.strerror or str(error) or type(error).__name__
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' and '.join(files)}: {what}" if files else what


def _discard_output() -> None:
    """Let what is still buffered go nowhere, or Python complains about it at the very end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(code: str, message: str, as_json: bool, exit_code: int) -> int:
    message = hide(message)
    try:
        flush()
    except (OutputError, OutputClosedError):
        _discard_output()
    if as_json:
        text = msgspec.json.encode({"error": {"code": code, "message": message}}).decode()
    else:
        text = f"penstock: {message}"
    sys.stderr.write(text + "\n")
    return exit_code
