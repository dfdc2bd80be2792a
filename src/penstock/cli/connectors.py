"""Connectors: taking sources in, and looking at what they have sent."""

from __future__ import annotations

import threading
from typing import Annotated, Literal

import typer

from penstock.cli.options import (
    AtOption,
    JsonOption,
    LogOption,
    LogOptionsOption,
    check_closed,
    examples,
    open_named,
)
from penstock.cli.output import note, say, say_json, stopping, table
from penstock.connect.listener import Listener, ListenerOptions
from penstock.connect.registry import SourceRecord, records
from penstock.connect.wire import NEVER
from penstock.errors import UsageError

connectors = typer.Typer(no_args_is_help=True, help="Look at connectors.")


def register(app: typer.Typer) -> None:
    app.command(
        "listen",
        epilog=examples(
            "penstock listen orders",
            "penstock listen --route 'sensor.*=temperatures' --route '*=raw' --policy takeover",
        ),
    )(listen)
    app.add_typer(connectors, name="connector")


def listen(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: Annotated[
        str | None,
        typer.Argument(metavar="[STREAM]", help="Where everything goes.", show_default=False),
    ] = None,
    route: Annotated[
        list[str] | None,
        typer.Option(
            "--route",
            metavar="PATTERN=STREAM",
            help="Where connector streams with such a name go; the first that fits counts.",
        ),
    ] = None,
    at: AtOption = "127.0.0.1:6067",
    cookie: Annotated[
        str, typer.Option(envvar="PENSTOCK_COOKIE", help="What connectors must know.")
    ] = "",
    policy: Annotated[
        Literal["oldest", "takeover"],
        typer.Option(help="Who gets a stream that two connectors want."),
    ] = "oldest",
    credits_: Annotated[
        int, typer.Option("--credits", min=2, help="How many frames may be on their way.")
    ] = 32_768,
    on_damage: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="What becomes of messages that the stream cannot hold."),
    ] = "stop",
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Take source connectors in: what they send becomes events, each once.

    Ctrl-C (or SIGTERM) makes everything safe that has come, and sends the connectors away; they
    come again when somebody listens.
    """
    routes = [_route(item) for item in route or []] + ([("*", stream)] if stream else [])
    if not routes:
        raise UsageError("say where messages go: penstock listen STREAM, or --route PATTERN=STREAM")
    check_closed(at, cookie)
    options = ListenerOptions(
        routes=routes, address=at, cookie=cookie, policy=policy, credits=credits_,
        on_damage=on_damage,
    )  # fmt: skip
    stop = threading.Event()
    with (
        open_named(context, log, log_option) as opened,
        stopping(stop, "connectors are sent away"),
        Listener(opened, options, note) as listener,
    ):
        say("listening at {}:{}".format(*listener.address))
        stop.wait()


def _route(text: str) -> tuple[str, str]:
    pattern, _, stream = text.partition("=")
    if not pattern or not stream:
        raise UsageError(f"{text!r} is no route: write PATTERN=STREAM, as in 'sensor.*=raw'")
    return pattern, stream


@connectors.command(
    "list", epilog=examples("penstock connector list", "penstock connector list --json")
)
def list_connectors(
    context: typer.Context,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Every connector stream: who has it, how far it is, and what it has sent."""
    with open_named(context, log, log_option) as opened:
        found = sorted(records(opened), key=lambda record: record.name)
    if json:
        for record in found:
            say_json(_told(record))
        return
    table(
        ("connector stream", "goes to", "owner", "up to", "messages", "bytes", "dropped", "opened"),
        [
            (
                record.name, record.stream, _owner(record) or "nobody", _point(record),
                record.messages, record.bytes, record.dropped, record.opened,
            )
            for record in found
        ],
    )  # fmt: skip


def _owner(record: SourceRecord) -> str:
    if record.owner is None or not record.is_owned():
        return ""
    return f"{record.owner.program} {record.owner.instance}".strip()


def _point(record: SourceRecord) -> int | None:
    return None if record.point_of_ref == NEVER else record.point_of_ref


def _told(record: SourceRecord) -> dict[str, object]:
    return {
        "name": record.name, "stream": record.stream, "owner": _owner(record) or None,
        "point_of_ref": _point(record), "messages": record.messages, "bytes": record.bytes,
        "dropped": record.dropped, "opened": record.opened,
    }  # fmt: skip
