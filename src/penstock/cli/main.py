"""The program: puts the commands together and turns errors into messages and exit codes.

Exit codes: 0 success, 1 failure (or damage found), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import msgspec
import typer

import penstock
from penstock.cli import apps, clusters, connect, connectors, events, objects, outboxes, upkeep
from penstock.cli.options import LogOption, Settings
from penstock.cli.output import OutputClosedError
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

The log is `penstock.db` here, or what `--log` or `PENSTOCK_LOG` names.
""",
)
objects.register(app)
events.register(app)
apps.register(app)
upkeep.register(app)
clusters.register(app)
connectors.register(app)
connect.register(app)
outboxes.register(app)


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


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:
        return FAILURE  # closed: nothing could be said
    as_json = "--json" in arguments
    try:
        result = app(arguments, standalone_mode=False, prog_name="penstock")
        sys.stdout.flush()
    except PenstockError as error:
        return _report(error.code, str(error), as_json, _exit_code(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, OutputClosedError):
        # Whoever read our output has had enough; that is no error of ours.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except _USAGE_ERRORS as error:
        message = error.format_message().rstrip(".")
        if not message:  # a bare `penstock` has shown its help
            return USAGE
        return _report("usage", f"{message}. See `{_command(error)} --help`.", as_json, USAGE)
    except OSError as error:
        return _report("output", f"the output cannot be written: {error}", as_json, FAILURE)
    return result if isinstance(result, int) else 0


def _command(error: typer.BadParameter) -> str:
    return error.ctx.command_path if error.ctx else "penstock"


def _exit_code(error: PenstockError) -> int:
    return USAGE if isinstance(error, UsageError) else FAILURE


def _report(code: str, message: str, as_json: bool, exit_code: int) -> int:
    message = hide(message)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if as_json:
        text = msgspec.json.encode({"error": {"code": code, "message": message}}).decode()
    else:
        text = f"penstock: {message}"
    sys.stderr.write(text + "\n")
    return exit_code
