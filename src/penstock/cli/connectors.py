"""Connectors: taking sources in, and looking at what they have sent."""

from __future__ import annotations

import threading
from typing import Annotated, Literal

import typer

from penstock.app.reports import SinkRow, sink_rows
from penstock.cli.options import (
    AtOption,
    JsonOption,
    LogOption,
    LogOptionsOption,
    check_closed,
    examples,
    open_named,
)
from penstock.cli.output import flush, note, say, say_json, stopping, table
from penstock.connect.credentials import BY_NAME, reveal
from penstock.connect.listener import Listener, ListenerOptions, OnDamage
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
        str,
        typer.Option(
            envvar="PENSTOCK_COOKIE",
            parser=reveal,
            metavar="SECRET",
            help=f"What connectors must know. {BY_NAME}",
        ),
    ] = "",
    policy: Annotated[
        Literal["oldest", "takeover"],
        typer.Option(help="Who gets a stream that two connectors want."),
    ] = "oldest",
    credits_: Annotated[
        int, typer.Option("--credits", min=2, help="How many frames may be on their way.")
    ] = 32_768,
    on_damage: Annotated[
        OnDamage,
        typer.Option(
            help="What becomes of messages that the stream cannot hold: they end the connection, "
            "are left out, or are told in the stream NAME_dead."
        ),
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
        flush()
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
    """Every connector stream and sink: who has it, how far it is, and what went through.

    How late a source is: how old its last message was when it was stored. What waits for a sink
    are the events that its query has not pushed yet.
    """
    with open_named(context, log, log_option) as opened:
        sources = [_source(record) for record in sorted(records(opened), key=lambda r: r.name)]
        sinks = [_sink(row) for row in sink_rows(opened)]
    if json:
        for row in (*sources, *sinks):
            say_json(row)
        return
    shown = {
        "source": "connector", "stream": "stream", "state": "state", "up to": "up_to",
        "messages": "messages", "bytes": "bytes", "ms late": "lag_ms", "credits": "credits",
        "reconnects": "reconnects",
    }  # fmt: skip
    table(list(shown), [[row[name] for name in shown.values()] for row in sources])
    if sinks:
        shown = {
            "sink": "connector", "stream": "stream", "state": "state", "messages": "messages",
            "bytes": "bytes", "waiting": "lag_events", "transactions": "transactions",
        }  # fmt: skip
        say("")
        table(list(shown), [[row[name] for name in shown.values()] for row in sinks])


def _source(record: SourceRecord) -> dict[str, object]:
    owner = record.owner if record.is_owned() else None
    return {
        "kind": "source", "connector": record.name, "stream": record.stream,
        "state": "nobody has it" if owner is None else f"{owner.program} {owner.instance}".strip(),
        "up_to": None if record.point_of_ref == NEVER else record.point_of_ref,
        "messages": record.messages, "bytes": record.bytes, "lag_ms": record.lag_ms,
        "credits": record.credits, "reconnects": record.opened - 1, "dropped": record.dropped,
        "damaged": record.damaged,
    }  # fmt: skip


def _sink(row: SinkRow) -> dict[str, object]:
    return {
        "kind": "sink", "connector": row.worker, "stream": row.stream, "state": row.state or None,
        "messages": row.messages, "bytes": row.bytes, "lag_events": row.lag,
        "transactions": row.transactions,
    }  # fmt: skip
