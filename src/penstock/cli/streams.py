"""`penstock stream …`: what streams there are, and changing them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from penstock.cli.finding import find_stream
from penstock.cli.options import (
    JsonOption,
    LogOption,
    LogOptionsOption,
    StreamArgument,
    YesOption,
    change_log,
    examples,
    open_named,
    open_to_read,
    parse_duration,
    parse_size,
)
from penstock.cli.output import confirm, count, note, say, say_json, size_text, table
from penstock.errors import UsageError
from penstock.log.api import Count, Log
from penstock.log.catalogue import import_record
from penstock.log.declaring.names import SYSTEM, parse_stream
from penstock.log.declaring.objects import (
    Content,
    CreateStream,
    DropStream,
    Stream,
    StreamSpec,
)
from penstock.log.declaring.quantities import format_duration
from penstock.log.reading.read import count_from
from penstock.records.schema import Field, Schema, check_field_name, parse_type, schema_of

NewStreamArgument = Annotated[str, typer.Argument(metavar="STREAM", help="NAME or NAMESPACE.NAME.")]
RecordOption = Annotated[
    str | None,
    typer.Option("--record", metavar="MODULE:CLASS", help="A penstock.Record class."),
]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--field", "-F", metavar="NAME=TYPE", help="A field and its Python type; may be repeated."
    ),
]
BytesOption = Annotated[bool, typer.Option("--bytes", help="Store bytes instead of JSON.")]
KeyOption = Annotated[
    str | None, typer.Option("--key", metavar="FIELD", help="The field to use as the key.")
]
TimeOption = Annotated[
    str | None,
    typer.Option("--time", metavar="FIELD", help="The field to use as the event's time."),
]
TableOption = Annotated[
    bool, typer.Option("--table", help="Make it a table: keep the latest value of each key.")
]
PartitionsOption = Annotated[
    int | None,
    typer.Option(
        "--partitions", metavar="N", help="Number of partitions; it can only be increased."
    ),
]
ReplicationOption = Annotated[
    int | None,
    typer.Option("--replication", metavar="N", help="Number of replicas; only on Kafka."),
]
RetentionOption = Annotated[
    str | None,
    typer.Option(
        "--retention",
        metavar="DURATION",
        help="How long to keep events, such as '30 days'; none keeps them for ever.",
    ),
]
RetentionBytesOption = Annotated[
    str | None,
    typer.Option(
        "--retention-bytes",
        metavar="SIZE",
        help="How much of each partition to keep, such as '10 GB'; none keeps everything.",
    ),
]
WriterOption = Annotated[
    str | None,
    typer.Option(
        "--writer",
        metavar="NAME",
        help="Of a table: the only app or group that may write to it (app/NAME, "
        "group/STREAM/NAME); none: anyone.",
    ),
]
NONE = "none"

streams = typer.Typer(
    no_args_is_help=True, help="List, create, describe, alter, adopt and drop streams."
)


def register(app: typer.Typer) -> None:
    app.add_typer(streams, name="stream")


@streams.command("list", epilog=examples("penstock stream list --all"))
def list_streams(
    context: typer.Context,
    all_: Annotated[bool, typer.Option("--all", help="Include system streams.")] = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """List the streams of the log."""
    with open_to_read(context, log, log_option) as opened:
        found = [s for s in opened.streams() if all_ or s.name.namespace != SYSTEM]
        rows = [(_summary(stream), count_from(opened, str(stream.name), {})) for stream in found]
    if json:
        for row, events in rows:
            say_json({**row, **_count_fields(events)})
    elif rows:
        columns = ("stream", "record", "key", "partitions", "events", "table")
        cells = [{**row, "events": events} for row, events in rows]
        table(columns, [[row[name] for name in columns] for row in cells])
    else:
        note("there are no streams yet: create one with `penstock stream create NAME`")


def _count_fields(events: Count) -> dict[str, object]:
    """On Kafka nobody knows the number without reading: it is at most so many then."""
    return {"events": events.events, "events_is_exact": events.is_exact}


def _summary(stream: Stream) -> dict[str, object]:
    return {
        "stream": str(stream.name),
        "record": stream.record.name if stream.record else stream.spec.content,
        "key": stream.spec.key,
        "partitions": stream.partitions,
        "table": stream.spec.table,
    }


@streams.command(
    "create",
    epilog=examples(
        "penstock stream create orders --key user --partitions 4",
        "penstock stream create orders -F user=str -F amount=float -F 'note=str | None'",
        "penstock stream create orders --record shop.models:Order --retention '30 days'",
    ),
)
def create_stream(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: NewStreamArgument,
    record: RecordOption = None,
    field: FieldsOption = None,
    bytes_: BytesOption = False,
    key: KeyOption = None,
    time: TimeOption = None,
    partitions: PartitionsOption = None,
    replication: ReplicationOption = None,
    retention: RetentionOption = None,
    retention_bytes: RetentionBytesOption = None,
    ids: Annotated[
        Literal["log", "producer"],
        typer.Option(help="Who assigns event ids; with producer, each id is stored once."),
    ] = "log",
    acks: Annotated[
        Literal["write", "majority", "all"], typer.Option(help="What a commit waits for.")
    ] = "majority",
    table_: TableOption = False,
    writer: WriterOption = None,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Create a stream, and the log itself if it does not exist yet.

    Without `--record`, `--field` or `--bytes`, the stream holds JSON.
    """
    schema, content = what_it_holds(stream, record, field, bytes_)
    spec = StreamSpec(
        name=stream,
        record=schema,
        content=content,
        key=key,
        time=time,
        partitions=partitions,
        replication=replication,
        retention_ms=parse_retention(retention),
        retention_bytes=parse_retention_bytes(retention_bytes),
        ids=ids,
        acks=acks,
        table=table_,
        writer=parse_writer(writer),
    )
    parse_stream(stream)

    def create(opened: Log) -> Stream:
        opened.apply([CreateStream(spec)])
        return opened.stream(stream)

    made = change_log(context, log, log_option, create)
    if json:
        say_json({"created": str(made.name), "partitions": made.partitions})
    else:
        say(f"created stream {made.name} with {count(made.partitions, 'partition')}")


def what_it_holds(
    stream: str, record: str | None, fields: list[str] | None, is_bytes: bool
) -> tuple[Schema | None, Content]:
    """What the options of a command declare a stream to hold."""
    schema = _schema(stream, record, fields)
    if schema and is_bytes:
        raise UsageError("a stream holds either records or bytes: omit --bytes, or the record")
    return schema, "record" if schema else "bytes" if is_bytes else "json"


def _schema(stream: str, record: str | None, fields: list[str] | None) -> Schema | None:
    if record and fields:
        raise UsageError("give --record or --field, not both")
    if record:
        return schema_of(import_record(record, Path.cwd()))
    if not fields:
        return None
    name = parse_stream(stream).stream.replace("-", "_").title().replace("_", "")
    return Schema(name, parse_fields(name, fields))


def parse_fields(record: str, texts: list[str]) -> tuple[Field, ...]:
    """Fields of a record as `--field` gives them."""
    made = []
    for text in texts:
        field, equals, type_ = text.partition("=")
        if not equals:
            raise UsageError(f"--field {text!r} is not NAME=TYPE, such as user=str")
        check_field_name(field.strip(), record)
        made.append(Field(field.strip(), parse_type(type_.strip(), {})))
    return tuple(made)


def parse_retention(text: str | None) -> int | None:
    return None if text in (None, NONE) else parse_duration(str(text), "--retention")


def parse_writer(text: str | None) -> str | None:
    return None if text == NONE else text


def parse_retention_bytes(text: str | None) -> int | None:
    return None if text in (None, NONE) else parse_size(str(text), "--retention-bytes")


@streams.command("describe", epilog=examples("penstock stream describe orders --json"))
def describe_stream(
    context: typer.Context,
    stream: StreamArgument,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Show everything about a stream: record, settings, partitions and offsets."""
    with open_to_read(context, log, log_option) as opened:
        found = find_stream(opened, stream)
        offsets = opened.offsets(stream)
        events = {p: opened.count(stream, p, o.first, o.next) for p, o in offsets.items()}
    if json:
        say_json(_describe(found, {p: msgspec.structs.asdict(o) for p, o in offsets.items()}))
        return
    spec = found.spec
    settings = [
        ("stream", found.name),
        ("holds", found.record.name if found.record else spec.content),
        ("key", spec.key),
        ("time", spec.time),
        ("ids", spec.ids),
        ("acks", spec.acks),
        ("table", "yes" if spec.table else None),
        ("writer", spec.writer),
        ("retention", _retention(spec)),
        ("record version", len(found.records) or None),
        ("catalogue", spec.origin or None),
        ("created", found.created.isoformat(timespec="seconds")),
    ]
    table(("setting", "value"), [row for row in settings if row[1] is not None])
    if found.record:
        say("")
        table(("field", "type"), [(f.name, f.type) for f in found.record.fields])
    say("")
    rows = [(p, o.first, o.next, events[p]) for p, o in offsets.items()]
    table(("partition", "first", "next", "events"), rows)


def _describe(stream: Stream, offsets: dict[int, dict[str, object]]) -> dict[str, object]:
    fields = {f.name: str(f.type) for f in stream.record.fields} if stream.record else None
    settings = msgspec.structs.asdict(stream.spec)
    settings.update(
        name=str(stream.name),
        record=stream.record.name if stream.record else None,
        fields=fields,
        record_version=len(stream.records),
        created=stream.created,
        grown=stream.grown,
        partitions=[{"partition": p, **o} for p, o in offsets.items()],
    )
    return settings


def _retention(spec: StreamSpec) -> str:
    if spec.retention_ms is None and spec.retention_bytes is None:
        return "for ever"
    kept = [] if spec.retention_ms is None else [format_duration(spec.retention_ms)]
    kept += [] if spec.retention_bytes is None else [size_text(spec.retention_bytes)]
    return ", and at most ".join(kept)


@streams.command(
    "drop", epilog=examples("penstock stream drop orders", "penstock stream drop orders --yes")
)
def drop_stream(
    context: typer.Context,
    stream: StreamArgument,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Drop a stream and all its events.

    Asks for confirmation; without a terminal, `--yes` is required.
    """
    with open_named(context, log, log_option) as opened:
        found = find_stream(opened, stream)
        events = count_from(opened, stream, {})
        what = f"{found.name} and its {count(events, 'event')}"
        confirm(f"Drop {what}?", f"this would drop {what}", yes=yes)
        opened.apply([DropStream(stream)])
    if json:
        say_json({"dropped": str(found.name), **_count_fields(events)})
    else:
        say(f"dropped stream {what}")
