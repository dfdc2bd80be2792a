"""Connectors: taking sources in, and looking at what they have sent."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import typer

from penstock.app.reports import SinkRow, sink_rows
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
from penstock.connect.listener import Listener, ListenerOptions, OnDamage
from penstock.connect.registry import SourceRecord, amend, numbered_records, records
from penstock.connect.wire import NEVER
from penstock.errors import UnknownObjectError, UsageError
from penstock.log.api import Log
from penstock.log.names import guess
from penstock.records.event import from_microseconds

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
        typer.Argument(metavar="STREAM", help="Where everything goes.", show_default=False),
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
            "--cookie",
            envvar="PENSTOCK_COOKIE",
            parser=reveal,
            metavar="SECRET",
            help=f"What connectors must know. {BY_NAME}",
        ),
    ] = "",
    policy: Annotated[
        Literal["oldest", "takeover"],
        typer.Option("--policy", help="Who gets a stream that two connectors want."),
    ] = "oldest",
    credits_: Annotated[
        int,
        typer.Option("--credits", metavar="N", min=2, help="How many frames may be on their way."),
    ] = 32_768,
    on_damage: Annotated[
        OnDamage,
        typer.Option(
            "--on-damage",
            help="What becomes of messages that the stream cannot hold: they end the connection, "
            "are left out, or are told in the stream NAME_dead.",
        ),
    ] = "stop",
    json: JsonOption = False,
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
        say_listening(*listener.address, json)
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


NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONNECTOR", show_default=False,
        help="A connector stream, with all of its partitions, or a pattern such as 'kafka/*'.",
    ),
]  # fmt: skip


@connectors.command(
    "show",
    epilog=examples("penstock connector show orders", "penstock connector show 'kafka/*' --json"),
)
def show(
    context: typer.Context,
    connector: NameArgument,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """What is kept of a connector: each of its streams, up to where the log has it, who has it,
    how late it is, and what was last wrong with a message. Or a sink's workers.
    """
    with open_named(context, log, log_option) as opened:
        rows = [_details(number, record) for number, record in _found(opened, connector)]
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
    connector: NameArgument,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Remove what is kept of a connector that is gone for good, its points of reference included.

    Events that it has sent stay. If it comes again, it begins at its beginning, and what it sends
    again is there twice. A connector that is connected is refused, and so is a sink.
    """
    with open_named(context, log, log_option) as opened:
        found = _chosen(opened, connector)
        names = ", ".join(record.name for _, record in found[:10])
        more = f" and {len(found) - 10:,} others" if len(found) > 10 else ""
        what = f"forget {names}{more}, and up to where the log has them"
        confirm(f"{what.capitalize()}?", f"this would {what}", yes=yes)
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
    connector: NameArgument,
    after: Annotated[
        str,
        typer.Option(
            "--after",
            metavar="NUMBER",
            help="The last message that is to count as stored; `start`: none of them.",
        ),
    ],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Set a connector stream back, so that its connector sends again what comes behind a message.

    Events that are there stay: what is sent again is there twice, under the same ids, unless the
    stream takes its ids from the producer. A connector that is connected is refused.
    """
    point = _parsed_point(after)
    with open_named(context, log, log_option) as opened:
        found = _chosen(opened, connector)
        if point != NEVER:  # a number is that of one stream
            found = [item for item in found if item[1].name == connector] or found
        if point != NEVER and len(found) > 1:
            names = ", ".join(record.name for _, record in found[:10])
            raise UsageError(f"{connector!r} is several connector streams ({names}): name one")
        for _, record in found:
            _check_back(record, point)
        if not dry_run:
            what = f"set {count(len(found), 'stream')} back to {after}"
            question = f"{what.capitalize()}? What is sent again is there twice."
            confirm(question, f"this would {what}", yes=yes)
        for number, record in found:
            if not dry_run:
                amend(opened, number, lambda record: _set_back(record, point))
            done = {"rewound": record.name, "from": _point(record), "to": _number(point)}
            _say_done(done | ({"dry_run": True} if dry_run else {}), json)


def _parsed_point(text: str) -> int:
    if text == "start":
        return NEVER
    if not text.isdigit() or int(text) >= NEVER:
        raise UsageError(f"{text!r} is no number of a message: write one, or `start`")
    return int(text)


def _check_back(record: SourceRecord, point: int) -> None:
    """Raises `UsageError` if messages would be left out: only back is allowed."""
    is_at_start = record.point_of_ref == NEVER
    if point != NEVER and (is_at_start or point > record.point_of_ref):
        at = "its start" if is_at_start else f"message {record.point_of_ref}"
        raise UsageError(
            f"{record.name} is at {at}: set to {point}, what lies between would never be stored"
        )


def _set_back(record: SourceRecord, point: int) -> SourceRecord:
    _check_back(record, point)
    return msgspec.structs.replace(record, point_of_ref=point)


def _found(opened: Log, connector: str) -> list[tuple[int, SourceRecord]]:
    found = [item for item in numbered_records(opened) if _is_meant(item[1].name, connector)]
    return sorted(found, key=lambda item: item[1].name)


def _is_meant(name: str, connector: str) -> bool:
    """Whether it is the one, or a partition of it, or fits the pattern."""
    partition = name.removeprefix(f"{connector}.")
    is_partition = partition != name and "." not in partition
    return name == connector or is_partition or fnmatch.fnmatchcase(name, connector)


def _chosen(opened: Log, connector: str) -> list[tuple[int, SourceRecord]]:
    """The connector streams that are meant. Raises `UsageError` if there are none."""
    found = _found(opened, connector)
    if found:
        return found
    if any(_is_meant(row.worker, connector) for row in sink_rows(opened)):
        raise UsageError(
            f"{connector} is a sink: `penstock reset APP QUERY` lets that of an app begin anew, "
            'and another producer name that of format("penstock.sink")'
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
        "state": "nobody has it" if owner is None else f"{owner.program} {owner.instance}".strip(),
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
