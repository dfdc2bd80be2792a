"""`penstock pub`: events in."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Annotated, BinaryIO, NamedTuple, cast

import typer

from penstock.cli.finding import find_stream
from penstock.cli.lines import InputLine, chunks_of_lines, naming, parse_line
from penstock.cli.options import (
    JsonOption,
    LogOption,
    LogOptionsOption,
    StreamArgument,
    TimeoutOption,
    examples,
    open_named,
    parse_duration,
)
from penstock.cli.output import count, flush, note, progress_bar, say, say_json
from penstock.cli.waiting import TIMEOUT, Attempts
from penstock.errors import CommitOutcomeUnknownError, PenstockError, UsageError
from penstock.log.api import CommitOptions, Log, Report
from penstock.log.writing.compose import EventOptions
from penstock.log.writing.transaction import Transaction
from penstock.producer import Admitted, Place, Producer, ProducerOptions

SOURCE = "penstock-pub"
REQUEST_MS_MAX = 30_000
"""How long one try of a commit may take."""


class PartlyPublishedError(PenstockError):
    """Some lines were published before the failure, others were not."""

    code = "partly_published"


def register(app: typer.Typer) -> None:
    app.command(
        "pub",
        epilog=examples(
            """penstock pub orders '{"user": "ada"}'""",
            "penstock pub orders - < orders.jsonl",
            "tail -f app.log | penstock pub logs - --ack",
            "penstock read a --json | penstock pub b - --events",
            "penstock pub customers --delete --key ada",
        ),
    )(publish)


class PublishTarget(NamedTuple):
    """Where events go and how; `options` is the envelope that all of them share."""

    stream: str
    options: EventOptions
    whole: bool
    ack: bool
    json: bool


class Given(NamedTuple):
    """A line, and the event that it is."""

    line: InputLine
    data: object
    options: EventOptions


def publish(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: StreamArgument,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="JSON",
            help="The event's data; - reads JSON lines from standard input.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="The event's key.")
    ] = None,
    id_: Annotated[str | None, typer.Option("--id", metavar="ID", help="The event's id.")] = None,
    type_: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="The event's type.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be repeated."),
    ] = None,
    events: Annotated[
        bool,
        typer.Option("--events", help="Each line is a whole event, as printed by `read --json`."),
    ] = False,
    ack: Annotated[
        bool,
        typer.Option(
            "--ack", help="Commit lines as they arrive; print each event's place once durable."
        ),
    ] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the key's entry from a table.")
    ] = False,
    timeout: TimeoutOption = TIMEOUT,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Publish an event, or one per line of standard input.

    Lines are published as one transaction: all of them or, if one is invalid, none. With
    `--ack`, they are committed as they arrive instead, and the partition, offset and id of each
    event are printed on a line, in input order, once the event is durable.
    """
    options = EventOptions(key=key, id=id_, type=type_, headers=_headers(header))
    _check_arguments(data, key, id_, delete)
    timeout_ms = parse_duration(timeout, "--timeout")
    target = PublishTarget(stream, options, events, ack, json)
    with (
        open_named(context, log, log_option) as opened,
        Attempts(opened.url, timeout_ms) as attempts,
    ):
        find_stream(opened, stream)
        if delete:
            _publish_each(
                opened, target, iter([[Given(InputLine(0, b""), None, options)]]), attempts
            )
        elif data != "-":
            chunk = [InputLine(0, (data or "").encode())]
            _publish_each(opened, target, iter([_parse(opened, target, chunk)]), attempts)
        elif ack:
            chunks = (_parse(opened, target, chunk) for chunk in chunks_of_lines(_source()))
            _publish_each(opened, target, chunks, attempts)
        else:
            _publish_as_one(opened, target, _source(), attempts)


def _check_arguments(data: str | None, key: str | None, id_: str | None, delete: bool) -> None:
    if delete and (data is not None or key is None):
        raise UsageError("--delete removes one entry from a table: give its --key and no data")
    if data is None and not delete:
        raise UsageError(
            "there is nothing to publish: give the event's data, or - to read JSON lines from "
            "standard input"
        )
    if data == "-" and id_ is not None:
        raise UsageError("--id is for a single event: for lines, use --events with an id in each")


def _headers(texts: list[str] | None) -> dict[str, str] | None:
    found = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--header {text!r} is not NAME=VALUE")
        found[name] = value
    return found or None


def _source() -> BinaryIO:
    if sys.stdin is None:
        raise UsageError("standard input is closed: there are no lines to publish")
    return sys.stdin.buffer


def _parse(log: Log, target: PublishTarget, chunk: Sequence[InputLine]) -> list[Given]:
    """The events of lines, as the stream takes them now: it may have changed since the last."""
    stream = log.stream(target.stream)
    return [
        Given(line, *parse_line(stream, line, target.options, whole=target.whole)) for line in chunk
    ]


# Committed as they come


def _publish_each(
    log: Log, target: PublishTarget, chunks: Iterator[list[Given]], attempts: Attempts
) -> None:
    """Commit chunk by chunk; a chunk with a wrong line is not published at all."""
    new = duplicates = last = 0
    options = ProducerOptions(
        client_id=SOURCE,
        delivery_timeout_ms=attempts.timeout_ms,
        request_timeout_ms=min(attempts.timeout_ms, REQUEST_MS_MAX),
    )
    producer = Producer(log, options)
    attempts.until_done(producer.open)
    with producer:
        try:
            for chunk in chunks:
                sent = _send(producer, target, chunk, attempts)
                placed = _leading_places(sent)
                _show_places(placed, target)
                if len(placed) < len(sent):
                    raise _failure(last, chunk, sent, attempts)
                last = chunk[-1].line.number
                duplicates += sum(place.duplicate for place in placed)
                new += len(placed)
        except (PartlyPublishedError, CommitOutcomeUnknownError):
            raise
        except PenstockError as error:
            if not last:
                raise
            raise PartlyPublishedError(f"{error}; published: lines 1 to {last}") from error
    if not target.ack or not last:
        _show_count(new - duplicates, duplicates, target)


def _send(
    producer: Producer, target: PublishTarget, chunk: Sequence[Given], attempts: Attempts
) -> list[Place | PenstockError]:
    """Send the events of a chunk; what became of each."""
    admitted = [_admit(producer, target, given) for given in chunk]
    futures = [producer.send_admitted(event) for event in admitted]
    attempts.until_sent(producer, futures)
    return [_outcome(future) for future in futures]


def _admit(producer: Producer, target: PublishTarget, given: Given) -> Admitted:
    with naming(given.line):
        return producer.admit(target.stream, given.data, given.options)


def _outcome(future: Future[Place]) -> Place | PenstockError:
    try:
        return future.result()
    except PenstockError as error:
        return error


def _failure(
    last: int, chunk: Sequence[Given], sent: Sequence[Place | PenstockError], attempts: Attempts
) -> PenstockError:
    """Why not all of a chunk is published, and which lines are; `last` ends those before it."""
    numbers = [given.line.number for given in chunk]
    unknown = [isinstance(one, CommitOutcomeUnknownError) for one in sent]
    published = [isinstance(one, Place) for one in sent]
    failed = published.index(False)
    error = _name_line(chunk[failed].line, cast(PenstockError, sent[failed]), attempts)
    if not last and not any(published) and (len(chunk) == 1 or not any(unknown)):
        return error
    spans = list(_spans(numbers, published))
    if last and published[0]:
        spans[0] = (1, spans[0][1])
    elif last:
        spans.insert(0, (1, last))
    told = f"{error}; published: {_in_words(spans) or 'none'}"
    if any(unknown):
        unsure = _in_words(list(_spans(numbers, unknown)))
        return CommitOutcomeUnknownError(f"{told}; outcome unknown: {unsure}")
    return PartlyPublishedError(told)


def _name_line(line: InputLine, error: PenstockError, attempts: Attempts) -> PenstockError:
    """The error with its line, where it is one line's own, and not the log's."""
    if not isinstance(error, UsageError) or not line.number:
        return attempts.explain(error)
    named = copy.copy(error)
    named.args = (f"line {line.number}: {error}",)
    return named


def _spans(numbers: Sequence[int], chosen: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last line number of each stretch of lines that are chosen."""
    pairs = zip(numbers, chosen, strict=True)
    for is_chosen, stretch in itertools.groupby(pairs, key=lambda pair: pair[1]):
        if is_chosen:
            found = [number for number, _ in stretch]
            yield found[0], found[-1]


def _in_words(spans: Sequence[tuple[int, int]]) -> str:
    shown = [f"{a} to {b}" if a != b else f"{a}" for a, b in spans]
    noun = "line" if len(spans) == 1 and spans[0][0] == spans[0][1] else "lines"
    return f"{noun} {', '.join(shown)}" if shown else ""


def _leading_places(sent: Sequence[Place | PenstockError]) -> list[Place]:
    """The places of the events before the first that has none."""
    found: list[Place] = []
    for one in sent:
        if not isinstance(one, Place):
            break
        found.append(one)
    return found


def _show_places(places: Sequence[Place], target: PublishTarget) -> None:
    if target.ack:
        for place in places:
            _show_place(place, target.json)
        flush()


def _show_place(place: Place, json: bool) -> None:
    if json:
        say_json({"partition": place.partition, "offset": place.offset, "id": place.id})
    else:
        offset = "duplicate" if place.offset is None else place.offset
        say(f"{place.partition}\t{offset}\t{place.id}")


def _show_count(new: int, duplicates: int, target: PublishTarget) -> None:
    if target.json:
        say_json({"published": new, "duplicates": duplicates, "stream": target.stream})
    elif new or duplicates:
        held = f"; {duplicates:,} already stored" if duplicates else ""
        note(f"published {count(new, 'event')} to {target.stream}{held}")
    else:
        note(f"the input was empty: nothing was published to {target.stream}")


# All or nothing


def _publish_as_one(log: Log, target: PublishTarget, source: BinaryIO, attempts: Attempts) -> None:
    limits = CommitOptions(timeout_ms=min(attempts.timeout_ms, REQUEST_MS_MAX))
    tx = Transaction(log, source=SOURCE, options=limits)
    attempts.until_done(tx.__enter__)
    try:
        with progress_bar("publishing", "bytes") as report:
            counted = _add_lines(log, tx, target, source, attempts, report)
            committed = attempts.until_done(tx.commit)
    except BaseException as error:
        _end(tx, is_interrupted=isinstance(error, KeyboardInterrupt))
        raise
    dropped = sum(len(placement.dropped) for placement in committed.placements)
    _show_count(counted - dropped, dropped, target)


def _add_lines(
    log: Log,
    tx: Transaction,
    target: PublishTarget,
    source: BinaryIO,
    attempts: Attempts,
    report: Report,
) -> int:
    """Put all lines into the transaction; how many there were."""
    counted = done = 0
    size = _size_of(source)
    report(0, size)
    for chunk in chunks_of_lines(source):
        for line, data, options in _parse(log, target, chunk):
            with naming(line):
                attempts.until_done(
                    lambda data=data, options=options: tx.send(  # type: ignore[misc]
                        target.stream,
                        data,
                        key=options.key,
                        id=options.id,
                        time=options.time,
                        type=options.type,
                        headers=options.headers,
                    )
                )
        counted += len(chunk)
        done += sum(len(line.text) + 1 for line in chunk)
        report(min(done, size or done), size)
    return counted


def _end(tx: Transaction, *, is_interrupted: bool) -> None:
    """Let go of what is not committed, and say what an interrupt has left."""
    if is_interrupted and tx.state == "unknown":
        note(
            "interrupted while committing: either all lines were published or none; read the "
            "stream to find out"
        )
    elif is_interrupted and tx.state != "committed":
        note("interrupted: nothing was published")
    if tx.state == "open":
        with contextlib.suppress(PenstockError):  # it is swept some time
            tx.roll_back()


def _size_of(source: BinaryIO) -> int:
    """How much there is to read, where it is a file; else 0."""
    try:
        found = os.fstat(source.fileno())
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
