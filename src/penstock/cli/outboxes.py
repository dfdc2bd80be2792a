"""The outbox of a database: making it, and publishing what is in it."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from penstock import outbox
from penstock.cli.options import (
    JsonOption,
    LogOption,
    LogOptionsOption,
    UntilIdleOption,
    examples,
    open_named,
)
from penstock.cli.output import count, note, say, say_json, stopping
from penstock.connect.credentials import BY_NAME, reveal

outboxes = typer.Typer(
    no_args_is_help=True, help="Publish events that were written in database transactions."
)
DatabaseArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATABASE", envvar="PENSTOCK_DATABASE", show_default=False, parser=reveal,
        help=f"sqlite:///path, or postgresql://user@host/name. {BY_NAME}",
    ),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    app.add_typer(outboxes, name="outbox")


@outboxes.command("create", epilog=examples("penstock outbox create sqlite:///shop.db"))
def create(database: DatabaseArgument, json: JsonOption = False) -> None:
    """Create the outbox tables in a database if they do not exist."""
    with outbox.connect(database) as connection:
        outbox.create(connection)
        connection.commit()
    say_json({"created": "outbox"}) if json else say("the outbox is ready")


@outboxes.command(
    "relay",
    epilog=examples(
        "penstock outbox relay postgresql://app@localhost/shop",
        "penstock outbox relay sqlite:///shop.db --until-idle",
    ),
)
def relay(
    context: typer.Context,
    database: DatabaseArgument,
    until_idle: UntilIdleOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Publish the rows of the outbox, each once, until stopped.

    A row goes to the stream it names, which must take its ids from the producer. Only one relay
    runs at a time: a second one stops the first.
    """
    stop = threading.Event()
    with (
        open_named(context, log, log_option) as opened,
        stopping(stop, "publishing the rows in flight"),
    ):
        found = outbox.Relay(opened, lambda: outbox.connect(database, create=False), note)
        if until_idle:
            found.drain()
        else:
            note("publishing; press Ctrl-C to stop")
            found.run(stop)
    if json:
        say_json({"published": found.published})
    else:
        say(f"published {count(found.published, 'event')}")
