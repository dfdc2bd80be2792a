"""`penstock pub` and `penstock read`: events in and out."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterator
from typing import Annotated, BinaryIO

import msgspec
import typer

from penstock.cli.lines import Line, chunks_of_lines, naming, parse_line
from penstock.cli.options import (
    JsonOption,
    LogOption,
    LogOptionsOption,
    StreamArgument,
    examples,
    open_named,
)
from penstock.cli.output import flush, note, progress_bar, say, say_json
from penstock.errors import (
    CommitOutcomeUnknownError,
    DamagedError,
    PenstockError,
    UsageError,
)
from penstock.log.api import Log, Start
from penstock.log.batch import json_row
from penstock.log.compose import EventOptions
from penstock.log.objects import Stream
from penstock.log.read import ReadOptions, read_events
from penstock.log.transaction import Transaction
from penstock.producer import Admitted, Place, Producer, ProducerOptions
from penstock.records.event import Event


def register(app: typer.Typer) -> None:
    app.command("pub", epilog=_PUB_EXAMPLES)(publish)
    app.command("read", epilog=_READ_EXAMPLES)(read)


_PUB_EXAMPLES = examples(
    """penstock pub orders '{"user": "ada"}'""",
    "cat orders.jsonl | penstock pub orders -",
    "tail -f app.log | penstock pub logs - --ack",
    "penstock read a --json | penstock pub b - --events",
)
_READ_EXAMPLES = examples(
    "penstock read orders --from latest --follow",
    "penstock read orders --from 2026-11-15T10:00:00Z --json",
    "penstock read orders --key ada --limit 10",
)


def publish(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: StreamArgument,
    data: Annotated[
        str | None,
        typer.Argument(metavar="[JSON]", help="The event's data; - reads JSON lines from stdin."),
    ] = None,
    key: Annotated[str | None, typer.Option(help="The event's key.")] = None,
    id_: Annotated[str | None, typer.Option("--id", help="The event's id.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="The event's type.")] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header.")
    ] = None,
    events: Annotated[
        bool, typer.Option("--events", help="Lines are whole events, as `read --json` prints them.")
    ] = False,
    ack: Annotated[
        bool,
        typer.Option(
            "--ack", help="Commit as lines arrive; print each event's place when durable."
        ),
    ] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the key's entry of a table.")
    ] = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Publish an event, or one per line of standard input.

    Lines are published as one transaction: all of them or, if one is wrong, none. With
    `--ack` they are committed as they arrive instead, and one line per event is printed, in
    the order of input, when it is durable: partition, offset and id.
    """
    options = EventOptions(key=key, id=id_, type=type_, headers=_headers(header))
    lines = not delete and (data is None or data == "-")
    if lines and id_ is not None:
        raise UsageError("--id names one event; with lines, use --events and an id in each")
    if delete and (data is not None or key is None):
        raise UsageError("--delete removes one entry of a table: give its --key, and no data")
    with open_named(context, log, log_option) as opened:
        found = opened.stream(stream)
        if delete:
            _publish_acked(opened, found, iter([[(Line(0, b""), None, options)]]), ack, json)
        elif not lines:
            line = Line(0, (data or "").encode())
            events_ = [(line, *parse_line(found, line, options, whole=events))]
            _publish_acked(opened, found, iter([events_]), ack, json)
        elif ack:
            chunks = (
                [(line, *parse_line(found, line, options, whole=events)) for line in chunk]
                for chunk in chunks_of_lines(_source(data))
            )
            _publish_acked(opened, found, chunks, ack, json)
        else:
            _publish_as_one(opened, found, _source(data), options, events, json)


def _headers(texts: list[str] | None) -> dict[str, str] | None:
    found = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--header {text!r} is not NAME=VALUE")
        found[name] = value
    return found or None


def _source(data: str | None) -> BinaryIO:
    if sys.stdin is None or (data is None and sys.stdin.isatty()):
        raise UsageError("give the event as JSON, or - and JSON lines on standard input")
    return sys.stdin.buffer


Event_ = tuple[Line, object, EventOptions]


def _publish_acked(
    log: Log, stream: Stream, chunks: Iterator[list[Event_]], ack: bool, json: bool
) -> None:
    """Commit chunk by chunk; a chunk with a wrong line is not published at all."""
    last = new = duplicates = 0
    with Producer(log, ProducerOptions(client_id="penstock-pub")) as producer:
        try:
            for chunk in chunks:
                admitted = [_admit(producer, stream, event) for event in chunk]
                futures = [producer.send_admitted(event) for event in admitted]
                producer.flush()
                for (line, _, _), future in zip(chunk, futures, strict=True):
                    with naming(line):
                        place = future.result()
                    last = line.number
                    duplicates += place.duplicate
                    new += not place.duplicate
                    if ack:
                        _show_place(place, json)
                flush()
        except PenstockError as error:
            if not last or isinstance(error, CommitOutcomeUnknownError):
                raise
            published = f"lines 1 to {last} are published and acknowledged, later ones are not"
            raise type(error)(f"{error} ({published})") from None
    if not ack:
        _show_count(new, duplicates, stream, json)


def _admit(producer: Producer, stream: Stream, event: Event_) -> Admitted:
    line, data, options = event
    with naming(line):
        return producer.admit(str(stream.name), data, options)


def _show_place(place: Place, json: bool) -> None:
    if json:
        say_json({"partition": place.partition, "offset": place.offset, "id": place.id})
    else:
        offset = "duplicate" if place.offset is None else place.offset
        say(f"{place.partition}\t{offset}\t{place.id}")


def _show_count(new: int, duplicates: int, stream: Stream, json: bool) -> None:
    if json:
        say_json({"published": new, "duplicates": duplicates, "stream": str(stream.name)})
        return
    held = f", {duplicates} were there already" if duplicates else ""
    note(f"published {new} event{'' if new == 1 else 's'} to {stream.name}{held}")


def _publish_as_one(
    log: Log, stream: Stream, source: BinaryIO, options: EventOptions, whole: bool, json: bool
) -> None:
    count = 0
    with progress_bar("publishing") as report, Transaction(log, source="penstock-pub") as tx:
        for chunk in chunks_of_lines(source):
            for line in chunk:
                data, given = parse_line(stream, line, options, whole=whole)
                with naming(line):
                    tx.send(
                        str(stream.name), data, key=given.key, id=given.id, time=given.time,
                        type=given.type, headers=given.headers,
                    )  # fmt: skip
            count += len(chunk)
            report(count, count)
        done = tx.commit()
    dropped = sum(len(placement.dropped) for placement in done.placements)
    _show_count(count - dropped, dropped, stream, json)


def read(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: StreamArgument,
    start: Annotated[
        str,
        typer.Option("--from", metavar="WHERE", help="earliest, latest, an offset, or a time."),
    ] = "earliest",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new events.")] = False,
    key: Annotated[str | None, typer.Option(help="Only events with this key.")] = None,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", help="Only this partition.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after so many.")] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Report damaged batches and go on.")
    ] = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Print the events of a stream; a time without a zone is UTC.

    With `--json` one object per line: stream, partition, offset, key, time, id, type, source,
    headers, data.
    """
    if key is not None and partition:
        raise UsageError("--key decides the partition: leave --partition out")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit is {limit}; it must be at least 1")
    options = ReadOptions(
        start=parse_start(start),
        key=key,
        partitions=partition or None,
        follow=follow,
        on_damage=_report_damage if skip_damaged else None,
    )
    with open_named(context, log, log_option) as opened:
        for count, event in enumerate(read_events(opened, stream, None, options), 1):
            if json:
                say_json(json_row(event))
            else:
                say(_plain(event))
            if follow:
                flush()
            if count == limit:
                break


def parse_start(text: str) -> Start:
    """Where `--from` says to start."""
    if text in ("earliest", "latest"):
        return text  # type: ignore[return-value]
    if text.isdigit():
        return int(text)
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"--from {text!r} is not earliest, latest, an offset, or a time such as "
            "2026-11-15T10:00:00Z"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=dt.UTC)


def _plain(event: Event[object]) -> str:
    row = json_row(event)
    key = row["key"] if isinstance(row["key"], str) else msgspec.json.encode(row["key"]).decode()
    data = msgspec.json.encode(row["data"]).decode()
    place = f"{event.partition}:{event.offset}"
    shown = "-" if event.key is None else key
    return f"{place}\t{event.time:%Y-%m-%d %H:%M:%S.%f}\t{shown}\t{data}"


def _report_damage(damage: DamagedError) -> None:
    note(f"penstock: {damage}")
