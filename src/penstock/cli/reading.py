"""`penstock read`: events out."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Annotated, Literal

import typer

from penstock.cli.finding import find_stream
from penstock.cli.formats import Format, FormatOption, open_writer
from penstock.cli.options import (
    JsonOption,
    LogOption,
    LogOptionsOption,
    StreamArgument,
    examples,
    open_to_read,
)
from penstock.cli.output import flush, is_into_file, note, progress_bar
from penstock.errors import DamagedError, LimitError, UsageError
from penstock.log.api import Log, Report, Start
from penstock.log.batch import Batch
from penstock.log.declaring.objects import Stream
from penstock.log.reading.read import ReadOptions, Span, read_batches, span_of
from penstock.records.event import key_bytes

LAST_MAX = 100_000
"""How many events `--last` may ask for: where they begin is found in memory."""
WhereOption = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="WHERE", help="Where to start: earliest, latest, an offset, or a time."
    ),
]
UntilOption = Annotated[
    str | None,
    typer.Option("--until", metavar="WHERE", help="Stop before this offset or time."),
]
LastOption = Annotated[
    int | None, typer.Option("--last", metavar="N", min=1, help="Show only the last N.")
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", "-n", metavar="N", help="Stop after N events.")
]


def register(app: typer.Typer) -> None:
    app.command(
        "read",
        epilog=examples(
            "penstock read orders --last 10",
            "penstock read orders --last 10 --follow",
            "penstock read orders --from 2026-11-15T10:00 --until 2026-11-15T11:00 --json",
            "penstock read orders --key ada --format table",
            "penstock read orders --format csv > orders.csv",
        ),
    )(read)


def read(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: StreamArgument,
    start: WhereOption = None,
    until: UntilOption = None,
    last: LastOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep waiting for new events.")
    ] = False,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="Only events with this key.")
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option(
            "--partition", "-p", metavar="N", help="Only this partition; may be repeated."
        ),
    ] = None,
    limit: LimitOption = None,
    on_damage: Annotated[
        Literal["stop", "skip"],
        typer.Option("--on-damage", help="Stop at damaged events, or report and skip them."),
    ] = "stop",
    format_: FormatOption = "text",
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Print the events of a stream, by default from its beginning.

    A time is the time of append, in UTC unless it names a zone. With `--json`, prints one object
    per line: stream, partition, offset, key, time, id, type, source, headers, data.
    """
    _check(start, until, last, follow, key, partition, limit)
    end = None if until is None else parse_end(until)
    options = ReadOptions(
        start=parse_start(start or "earliest"),
        key=key,
        partitions=partition or None,
        follow=follow,
        on_damage=report_damage if on_damage == "skip" else None,
    )
    with open_to_read(context, log, log_option) as opened:
        found = find_stream(opened, stream)
        span = span_of(opened, stream, options, until=end, last=last)
        if follow:
            _say_waiting(opened, found, span)
        count = _print(opened, found, (options, span), _format(format_, json), limit)
        if not count and not follow:
            note(_why_nothing(opened, found, span, key))


def _check(
    start: str | None,
    until: str | None,
    last: int | None,
    follow: bool,
    key: str | None,
    partition: list[int] | None,
    limit: int | None,
) -> None:
    if key is not None and partition:
        raise UsageError("--key determines the partition: omit --partition")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit is {limit}; it must be at least 1")
    if last is not None and start is not None:
        raise UsageError("--last determines where to start: omit --from")
    if last is not None and last > LAST_MAX:
        raise LimitError(f"--last is {last}; at most {LAST_MAX} are allowed: use --from")
    if until is not None and follow:
        raise UsageError("--until and --follow cannot be combined: omit one")


def _format(format_: Format, json: bool) -> Format:
    if json and format_ not in ("text", "json"):
        raise UsageError(f"--json means --format json: omit it, or --format {format_}")
    return "json" if json else format_


def _print(
    log: Log, stream: Stream, what: tuple[ReadOptions, Span], format_: Format, limit: int | None
) -> int:
    options, span = what
    count, key = 0, key_bytes(options.key)
    shown = is_into_file() and not options.follow
    with progress_bar("reading", "", shown=shown) as report:
        writer = open_writer(format_, stream)
        if options.follow:
            writer.flush()  # its header, if it has one
        for batch in read_reporting(log, str(stream.name), options, span, report):
            count += writer.write(batch, key, None if limit is None else limit - count)
            if options.follow:
                writer.flush()
            if count == limit:
                break
        writer.close()
    flush()
    return count


def read_reporting(
    log: Log, stream: str, options: ReadOptions, span: Span, report: Report
) -> Iterator[Batch]:
    """What is read, reporting how far it is, as far as the log can count its events."""
    now = log.offsets(stream)
    ends = {p: min(now[p].next, span.ends.get(p, now[p].next)) for p in span.starts}
    total = sum(log.count(stream, p, at, ends[p]).events for p, at in span.starts.items())
    done = 0
    for batch in read_batches(log, stream, options, span):
        yield batch
        done += len(batch)
        report(min(done, total), total)
    report(total, total)


def parse_start(text: str) -> Start:
    """Where `--from` says to begin."""
    if text in ("earliest", "latest"):
        return text  # type: ignore[return-value]
    found = _offset_or_time(text)
    if found is None:
        raise UsageError(
            f"--from {text!r} is not earliest, latest, an offset, or a time such as "
            "2026-11-15T10:00:00Z"
        )
    return found


def parse_end(text: str) -> int | dt.datetime:
    """Where `--until` says to end."""
    found = _offset_or_time(text)
    if found is None:
        raise UsageError(
            f"--until {text!r} is not an offset, or a time such as 2026-11-15T10:00:00Z"
        )
    return found


def _offset_or_time(text: str) -> int | dt.datetime | None:
    if text.isdigit():
        return int(text)
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=dt.UTC)


def report_damage(damage: DamagedError) -> None:
    """Tell of a stretch that is left out."""
    note(f"penstock: {damage}")


def _say_waiting(log: Log, stream: Stream, span: Span) -> None:
    """An offset that is not reached yet is worth a word to whoever waits for it."""
    nexts = _next_offsets(log, stream, span)
    if all(start > nexts[p] for p, start in span.starts.items()):
        note(f"waiting: {stream.name} has not reached that offset yet ({_nexts(nexts)})")


def _why_nothing(log: Log, stream: Stream, span: Span, key: str | None) -> str:
    name, now = stream.name, log.offsets(str(stream.name)).values()
    if all(offsets.first == offsets.next for offsets in now):
        return f"{name} holds no events"
    if key is not None:
        return f"nothing to read: {name} has no event with the key {key} in this range"
    nexts = _next_offsets(log, stream, span)
    if all(start >= nexts[p] for p, start in span.starts.items()):
        return f"nothing to read: {name} ends before the start given ({_nexts(nexts)})"
    return f"nothing to read: {name} has no events in this range"


def _next_offsets(log: Log, stream: Stream, span: Span) -> dict[int, int]:
    now = log.offsets(str(stream.name))
    return {partition: now[partition].next for partition in span.starts}


def _nexts(ends: dict[int, int]) -> str:
    """The next offset of partitions, not of too many."""
    shown = [f"{end} in partition {partition}" for partition, end in sorted(ends.items())[:3]]
    more = ", …" if len(ends) > len(shown) else ""
    one = f"{next(iter(ends.values()))}" if len(ends) == 1 else f"{', '.join(shown)}{more}"
    return f"its next offset is {one}"
