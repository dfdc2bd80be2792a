"""Connectors: taking sources in, and looking at what they have sent."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import typer

from penstock.app.running.reports import SinkRow, sink_rows
from penstock.cli.options import (
    AtOption,
    DryRunOption,
    JsonOption,
    LogOption,
    LogOptionsOption,
    YesOption,
    check_closed,
    examples,
    open_named,
)
from penstock.cli.output import confirm, count, note, say, say_json, say_listening, stopping, table
from penstock.connect.credentials import BY_NAME, reveal
from penstock.connect.hosts.listener import Listener, ListenerOptions, OnDamage
from penstock.connect.hosts.registry import SourceRecord, amend, numbered_records, records
from penstock.connect.protocol.wire import NEVER
from penstock.errors import UnknownObjectError, UsageError
from penstock.log.api import Log
from penstock.log.declaring.names import guess
from penstock.records.event import from_microseconds

connectors = typer.Typer(no_args_is_help=True, help="List, show, rewind and forget connectors.")


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
        typer.Argument(
            metavar="STREAM", help="Stream for messages that match no --route.", show_default=False
        ),
    ] = None,
    route: Annotated[
        list[str] | None,
        typer.Option(
            "--route",
            metavar="PATTERN=STREAM",
            help="Stream for connector streams whose name matches PATTERN; the first match "
            "applies.",
        ),
    ] = None,
    at: AtOption = "127.0.0.1:6067",
    cookie: Annotated[
        str,
        typer.Option(
            "--cookie",
            envvar="PENSTOCK_COOKIE",
            parser=reveal,
            metavar="SECRET",
            help=f"The secret that connectors must present. {BY_NAME}",
        ),
    ] = "",
    policy: Annotated[
        Literal["oldest", "takeover"],
        typer.Option("--policy", help="Which of two connectors gets a stream that both want."),
    ] = "oldest",
    credits_: Annotated[
        int,
        typer.Option("--credits", metavar="N", min=2, help="How many frames may be in flight."),
    ] = 32_768,
    on_damage: Annotated[
        OnDamage,
        typer.Option(
            "--on-damage",
            help="What to do with messages that the stream cannot hold: close the connection, skip "
            "them, or report them in the stream NAME_dead.",
        ),
    ] = "stop",
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Accept source connectors and store each of their messages exactly once as an event.

    On Ctrl-C or SIGTERM, stores everything that has arrived and disconnects the connectors; they
    reconnect when there is a listener again.
    """
    routes = [_route(item) for item in route or []] + ([("*", stream)] if stream else [])
    if not routes:
        raise UsageError(
            "give a destination for messages: penstock listen STREAM, or --route PATTERN=STREAM"
        )
    check_closed(at, cookie)
    options = ListenerOptions(
        routes=routes, address=at, cookie=cookie, policy=policy, credits=credits_,
        on_damage=on_damage,
    )  # fmt: skip
    stop = threading.Event()
    with (
        open_named(context, log, log_option) as opened,
        stopping(stop, "disconnecting connectors"),
        Listener(opened, options, note) as listener,
    ):
        say_listening(*listener.address, json)
        stop.wait()


def _route(text: str) -> tuple[str, str]:
    pattern, _, stream = text.partition("=")
    if not pattern or not stream:
        raise UsageError(
            f"{text!r} is not a valid route: use PATTERN=STREAM, such as 'sensor.*=raw'"
        )
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
    """List connector streams and sinks: owner, position and traffic.

    A source is as late as its last message was old when it was stored. The events waiting for a
    sink are those that its query has not pushed yet.
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


ConnectorArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONNECTOR", show_default=False,
        help="A connector stream with all its partitions, or a pattern such as 'kafka/*'.",
    ),
]  # fmt: skip


@connectors.command(
    "show",
    epilog=examples("penstock connector show orders", "penstock connector show 'kafka/*' --json"),
)
def show(
    context: typer.Context,
    connector: ConnectorArgument,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Show everything stored about a connector.

    For a source: each of its streams, how far the log has stored it, its owner, how late it is,
    and the last error in a message. For a sink: its workers.
    """
    with open_named(context, log, log_option) as opened:
        rows = [_details(number, record) for number, record in _find(opened, connector)]
        rows += [_sink(row) for row in sink_rows(opened) if _is_meant(row.worker, connector)]
        if not rows:
            raise _unknown(opened, connector)
    for number, row in enumerate(rows):
        if json:
            say_json(row)
            continue
        if number:
            say("")
        for name, value in row.items():
            if value is not None:
                say(f"{name.replace('_', ' '):<12} {value}")


@connectors.command("forget", epilog=examples("penstock connector forget orders --yes"))
def forget(
    context: typer.Context,
    connector: ConnectorArgument,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Remove what is stored about a connector that is gone for good.

    This includes its points of reference; the events that it has sent are kept. If it connects
    again, it starts from its beginning, and what it sends again is stored twice. Refused for
    a connector that is connected, and for a sink.
    """
    with open_named(context, log, log_option) as opened:
        found = _chosen(opened, connector)
        names = ", ".join(record.name for _, record in found[:10])
        more = f" and {len(found) - 10:,} others" if len(found) > 10 else ""
        what = f"{names}{more}, including points of reference"
        confirm(f"Forget {what}?", f"this would forget {what}", yes=yes)
        for number, record in found:
            amend(opened, number, lambda record: None)
            _say_done({"forgot": record.name, "was_up_to": _point(record)}, json)


@connectors.command(
    "rewind",
    epilog=examples(
        "penstock connector rewind orders --after 4711 --dry-run",
        "penstock connector rewind orders --after start --yes",
    ),
)
def rewind(
    context: typer.Context,
    connector: ConnectorArgument,
    after: Annotated[
        str,
        typer.Option(
            "--after",
            metavar="NUMBER",
            help="Number of the last message to count as stored; `start` for none.",
        ),
    ],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Rewind a connector stream, so that its connector sends the messages after a point again.

    Existing events are kept: what is sent again is stored twice, under the same ids, unless the
    stream takes its ids from the producer. Refused for a connector that is connected.
    """
    point = _parse_point(after)
    with open_named(context, log, log_option) as opened:
        found = _chosen(opened, connector)
        if point != NEVER:  # a number is that of one stream
            found = [item for item in found if item[1].name == connector] or found
        if point != NEVER and len(found) > 1:
            names = ", ".join(record.name for _, record in found[:10])
            raise UsageError(f"{connector!r} matches several connector streams ({names}): name one")
        for _, record in found:
            _check_back(record, point)
        if not dry_run:
            what = f"{count(len(found), 'stream')} to {after}"
            question = f"Rewind {what}? What is sent again is stored twice."
            confirm(question, f"this would rewind {what}", yes=yes)
        for number, record in found:
            if not dry_run:
                amend(opened, number, lambda record: _set_back(record, point))
            done = {"rewound": record.name, "from": _point(record), "to": _number(point)}
            _say_done(done | ({"dry_run": True} if dry_run else {}), json)


def _parse_point(text: str) -> int:
    if text == "start":
        return NEVER
    if not text.isdigit() or int(text) >= NEVER:
        raise UsageError(f"{text!r} is not a valid message number: give one, or `start`")
    return int(text)


def _check_back(record: SourceRecord, point: int) -> None:
    """Raises `UsageError` if messages would be left out: only back is allowed."""
    is_at_start = record.point_of_ref == NEVER
    if point != NEVER and (is_at_start or point > record.point_of_ref):
        at = "its start" if is_at_start else f"message {record.point_of_ref}"
        raise UsageError(
            f"{record.name} is at {at} and cannot be moved forward to {point}: the messages "
            "between would never be stored"
        )


def _set_back(record: SourceRecord, point: int) -> SourceRecord:
    _check_back(record, point)
    return msgspec.structs.replace(record, point_of_ref=point)


def _find(opened: Log, connector: str) -> list[tuple[int, SourceRecord]]:
    found = [item for item in numbered_records(opened) if _is_meant(item[1].name, connector)]
    return sorted(found, key=lambda item: item[1].name)


def _is_meant(name: str, connector: str) -> bool:
    """Whether it is the one, or a partition of it, or fits the pattern."""
    partition = name.removeprefix(f"{connector}.")
    is_partition = partition != name and "." not in partition
    return name == connector or is_partition or fnmatch.fnmatchcase(name, connector)


def _chosen(opened: Log, connector: str) -> list[tuple[int, SourceRecord]]:
    """The connector streams that are meant. Raises `UsageError` if there are none."""
    found = _find(opened, connector)
    if found:
        return found
    if any(_is_meant(row.worker, connector) for row in sink_rows(opened)):
        raise UsageError(
            f"{connector} is a sink: `penstock reset APP QUERY` resets a sink of an app; for "
            'format("penstock.sink"), use another producer name'
        )
    raise _unknown(opened, connector)


def _unknown(opened: Log, connector: str) -> UsageError:
    names = [record.name for record in records(opened)]
    names += [row.worker for row in sink_rows(opened)]
    hint = guess(connector, names) or "see `penstock connector list`"
    return UnknownObjectError(f"there is no connector {connector!r}: {hint}")


def _say_done(row: Mapping[str, object], json: bool) -> None:
    if json:
        say_json(row)
    else:
        say(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items()))


def _point(record: SourceRecord) -> int | None:
    return _number(record.point_of_ref)


def _number(point: int) -> int | None:
    return None if point == NEVER else point


def _details(number: int, record: SourceRecord) -> dict[str, object]:
    owner = record.owner if record.is_owned() else None
    return {
        **_source(record),
        "id": number,
        "program": None if owner is None else owner.program,
        "instance": None if owner is None else owner.instance,
        "listener": None if owner is None else f"{owner.host}, process {owner.process}",
        "error": record.error or None,
        "error_time": None if not record.error else from_microseconds(record.error_us).isoformat(),
    }


def _source(record: SourceRecord) -> dict[str, object]:
    owner = record.owner if record.is_owned() else None
    return {
        "kind": "source", "connector": record.name, "stream": record.stream,
        "state": "not connected" if owner is None else f"{owner.program} {owner.instance}".strip(),
        "up_to": _point(record),
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
