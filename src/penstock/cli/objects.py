"""`penstock stream …` and `penstock apply`: what streams there are, and changing them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from penstock.cli.options import (
    JsonOption,
    LogOption,
    LogOptionsOption,
    StreamArgument,
    change_log,
    empty_log,
    examples,
    log_exists,
    log_url,
    open_named,
)
from penstock.cli.output import note, say, say_json, table
from penstock.errors import DestructiveChangeError, UsageError
from penstock.log import log_path
from penstock.log.api import Log
from penstock.log.catalogue import Step, import_record, load, make_plan
from penstock.log.names import SYSTEM, parse_stream
from penstock.log.objects import (
    Content,
    CreateNamespace,
    CreateStream,
    DropNamespace,
    DropStream,
    GrowStream,
    Stream,
    StreamSpec,
)
from penstock.log.quantities import parse_bytes, parse_duration_ms
from penstock.records.schema import Field, Schema, check_field_name, parse_type, schema_of

NewStreamArgument = Annotated[
    str, typer.Argument(metavar="STREAM", help="NAME, or NAMESPACE.NAME.")
]
RecordOption = Annotated[
    str | None, typer.Option(metavar="MODULE:CLASS", help="A penstock.Record class.")
]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option("--field", "-f", metavar="NAME=TYPE", help="A field, typed as in Python."),
]
BytesOption = Annotated[bool, typer.Option("--bytes", help="Hold bytes instead of JSON.")]
KeyOption = Annotated[str | None, typer.Option(help="The field that is the key.")]
TimeOption = Annotated[str | None, typer.Option(help="The field that is the event's time.")]
TableOption = Annotated[bool, typer.Option("--table", help="Keep the latest value per key.")]

streams = typer.Typer(no_args_is_help=True, help="List, create, describe, grow and drop streams.")


namespaces = typer.Typer(no_args_is_help=True, help="List, create and drop namespaces.")


def register(app: typer.Typer) -> None:
    app.add_typer(streams, name="stream")
    app.add_typer(namespaces, name="namespace")
    app.command("apply", epilog=examples("penstock apply shop.toml --dry-run"))(apply)


@streams.command("list", epilog=examples("penstock stream list --all"))
def list_streams(
    context: typer.Context,
    all_: Annotated[bool, typer.Option("--all", help="The system's own streams too.")] = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """List the streams of the log."""
    with open_named(context, log, log_option) as opened:
        found = [s for s in opened.streams() if all_ or s.name.namespace != SYSTEM]
        rows = [_summary(opened, stream) for stream in found]
    if json:
        for row in rows:
            say_json(row)
    elif rows:
        columns = ("stream", "record", "key", "partitions", "events", "table")
        table(columns, [[_cell(row[name]) for name in columns] for row in rows])
    else:
        note("There are no streams yet: penstock stream create NAME")


def _summary(log: Log, stream: Stream) -> dict[str, object]:
    offsets = log.offsets(str(stream.name)).values()
    return {
        "stream": str(stream.name),
        "record": stream.record.name if stream.record else stream.spec.content,
        "key": stream.spec.key,
        "partitions": stream.partitions,
        "events": sum(o.next - o.first for o in offsets),
        "table": stream.spec.table,
    }


def _cell(value: object) -> object:
    return {True: "yes", False: ""}.get(value, value) if isinstance(value, bool) else value


@streams.command(
    "create",
    epilog=examples(
        "penstock stream create orders --key user --partitions 4",
        "penstock stream create orders -f user=str -f amount=float -f 'note=str | None'",
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
    partitions: Annotated[int | None, typer.Option(help="How many; they only ever grow.")] = None,
    replication: Annotated[
        int | None, typer.Option(help="On how many brokers; means something on Kafka only.")
    ] = None,
    retention: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Keep events so long: '30 days'.")
    ] = None,
    retention_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep so much per partition: '10 GB'.")
    ] = None,
    ids: Annotated[
        Literal["log", "producer"], typer.Option(help="Who gives ids; a producer's are unique.")
    ] = "log",
    acks: Annotated[
        Literal["write", "majority", "all"], typer.Option(help="What a commit waits for.")
    ] = "majority",
    table_: TableOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Create a stream; the log's file too, if it is not there yet.

    Without a record or fields it holds JSON.
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
        retention_ms=None if retention is None else parse_duration_ms(retention),
        retention_bytes=None if retention_bytes is None else parse_bytes(retention_bytes),
        ids=ids,
        acks=acks,
        table=table_,
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
        raise UsageError("a stream holds records or bytes: leave out --bytes, or the record")
    return schema, "record" if schema else "bytes" if is_bytes else "json"


def _schema(stream: str, record: str | None, fields: list[str] | None) -> Schema | None:
    if record and fields:
        raise UsageError("give --record or --field, not both")
    if record:
        return schema_of(import_record(record, Path.cwd()))
    if not fields:
        return None
    name = parse_stream(stream).stream.replace("-", "_").title().replace("_", "")
    made = []
    for text in fields:
        field, equals, type_ = text.partition("=")
        if not equals:
            raise UsageError(f"--field {text!r} is not NAME=TYPE, such as user=str")
        check_field_name(field.strip(), name)
        made.append(Field(field.strip(), parse_type(type_.strip(), {})))
    return Schema(name, tuple(made))


def count(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@streams.command("describe", epilog=examples("penstock stream describe orders --json"))
def describe_stream(
    context: typer.Context,
    stream: StreamArgument,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Show everything about a stream: record, settings, partitions and offsets."""
    with open_named(context, log, log_option) as opened:
        found = opened.stream(stream)
        offsets = opened.offsets(stream)
    if json:
        say_json(_described(found, {p: msgspec.structs.asdict(o) for p, o in offsets.items()}))
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
        ("retention_ms", spec.retention_ms),
        ("retention_bytes", spec.retention_bytes),
        ("record version", len(found.records) or None),
        ("catalogue", spec.origin or None),
        ("created", found.created.isoformat(timespec="seconds")),
    ]
    table(("setting", "value"), [row for row in settings if row[1] is not None])
    if found.record:
        say("")
        table(("field", "type"), [(f.name, f.type) for f in found.record.fields])
    say("")
    rows = [(p, o.first, o.next, o.next - o.first) for p, o in offsets.items()]
    table(("partition", "first", "next", "events"), rows)


def _described(stream: Stream, offsets: dict[int, dict[str, object]]) -> dict[str, object]:
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


@streams.command("grow", epilog=examples("penstock stream grow orders --partitions 8"))
def grow_stream(
    context: typer.Context,
    stream: StreamArgument,
    partitions: Annotated[int, typer.Option(help="How many it shall have.", show_default=False)],
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Add partitions. Keys may move to new ones; their older events stay where they are."""
    with open_named(context, log, log_option) as opened:
        before = opened.stream(stream).partitions
        opened.apply([GrowStream(stream, partitions)])
    if json:
        say_json({"grown": stream, "from": before, "to": partitions})
    else:
        say(f"stream {stream} grew from {before} to {count(partitions, 'partition')}")


@streams.command("drop", epilog=examples("penstock stream drop orders --yes"))
def drop_stream(
    context: typer.Context,
    stream: StreamArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Remove a stream and all its events. On a terminal it asks first."""
    with open_named(context, log, log_option) as opened:
        found = opened.stream(stream)
        events = sum(o.next - o.first for o in opened.offsets(stream).values())
        if not yes and sys.stdin.isatty():
            question = f"Drop {found.name} and its {count(events, 'event')}?"
            if not typer.confirm(question, err=True):
                note("nothing was dropped")
                raise typer.Exit(1)
        opened.apply([DropStream(stream)])
    if json:
        say_json({"dropped": str(found.name), "events": events})
    else:
        say(f"dropped stream {found.name} and its {count(events, 'event')}")


@namespaces.command("list", epilog=examples("penstock namespace list --json"))
def list_namespaces(
    context: typer.Context,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """List the namespaces of the log."""
    with open_named(context, log, log_option) as opened:
        for name in opened.namespaces():
            if json:
                say_json({"namespace": name})
            else:
                say(name)


@namespaces.command("create", epilog=examples("penstock namespace create shop"))
def create_namespace(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Create a namespace."""
    change_log(context, log, log_option, lambda opened: opened.apply([CreateNamespace(name)]))
    say_json({"created": name}) if json else say(f"created namespace {name}")


@namespaces.command("drop", epilog=examples("penstock namespace drop shop"))
def drop_namespace(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Remove a namespace that holds no streams; `default` cannot be removed."""
    with open_named(context, log, log_option) as opened:
        opened.apply([DropNamespace(name)])
    say_json({"dropped": name}) if json else say(f"dropped namespace {name}")


def apply(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A catalogue file (TOML).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    allow_destructive: Annotated[
        bool, typer.Option("--allow-destructive", help="Allow changes that remove events.")
    ] = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Make the log what a catalogue file says: shows the plan, then applies it as one.

    Applied again, it does nothing.
    """
    catalogue = load(file)
    if dry_run:
        with _log_or_empty(context, log, log_option) as opened:
            _show_plan(make_plan(opened, catalogue), json)
        return

    url = log_url(context, log)

    def carry_out(opened: Log) -> list[Step]:
        plan = make_plan(opened, catalogue)
        if opened.url in (url, str(log_path(url))):  # not at the rehearsal
            _show_plan(plan, json)
        destructive = [step.description for step in plan if step.destructive]
        if destructive and not allow_destructive:
            raise DestructiveChangeError(
                f"{file} would {'; '.join(destructive)}. Nothing was changed: say "
                "--allow-destructive if that is what you want"
            )
        opened.apply([step.change for step in plan])
        return plan

    plan = change_log(context, log, log_option, carry_out)
    if json:
        say_json({"applied": len(plan)})
    elif plan:
        say(f"applied {count(len(plan), 'change')}")


@contextlib.contextmanager
def _log_or_empty(
    context: typer.Context, log: str | None, options: list[str] | None
) -> Iterator[Log]:
    """The log, or where there is none yet, an empty one that leaves nothing behind."""
    if log_exists(context, log, options):
        with open_named(context, log, options) as opened:
            yield opened
    else:
        with empty_log(options) as opened:
            yield opened


def _show_plan(plan: list[Step], json: bool) -> None:
    if json:
        for step in plan:
            say_json({"change": step.description, "destructive": step.destructive})
        return
    if not plan:
        say("nothing to change")
    for step in plan:
        say(f"{'! ' if step.destructive else '+ '}{step.description}")
