"""`penstock stream alter`: changing the settings of a stream that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from penstock.cli.finding import find_stream
from penstock.cli.options import (
    DryRunOption,
    JsonOption,
    LogOption,
    LogOptionsOption,
    StreamArgument,
    YesOption,
    examples,
    open_named,
)
from penstock.cli.output import confirm, note, say, say_json
from penstock.cli.streams import (
    FieldsOption,
    PartitionsOption,
    RecordOption,
    ReplicationOption,
    RetentionBytesOption,
    RetentionOption,
    TimeOption,
    WriterOption,
    parse_fields,
    parse_retention,
    parse_retention_bytes,
    parse_writer,
    streams,
)
from penstock.errors import UsageError
from penstock.log.api import Limits
from penstock.log.catalogue import import_record
from penstock.log.declaring.objects import (
    AlterStream,
    Change,
    GrowStream,
    Stream,
    check_alter,
    check_spec,
    describe_change,
    is_destructive,
)
from penstock.records.schema import Schema, schema_of


@streams.command(
    "alter",
    epilog=examples(
        "penstock stream alter orders --retention '30 days'",
        "penstock stream alter orders --partitions 8",
        "penstock stream alter orders -F 'note=str | None'",
        "penstock stream alter orders --retention none --dry-run",
    ),
)
def alter_stream(  # noqa: PLR0913  one parameter per option
    context: typer.Context,
    stream: StreamArgument,
    record: RecordOption = None,
    field: FieldsOption = None,
    time: TimeOption = None,
    partitions: PartitionsOption = None,
    replication: ReplicationOption = None,
    retention: RetentionOption = None,
    retention_bytes: RetentionBytesOption = None,
    acks: Annotated[
        Literal["write", "majority", "all"] | None,
        typer.Option("--acks", help="What a commit waits for."),
    ] = None,
    writer: WriterOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Change the settings of a stream; settings that are not given stay as they are.

    Fields given with `--field` are added to its record and must be optional (`X | None`). When
    partitions are added, keys may move to new ones; their older events stay where they are.
    Reducing retention removes events, so it asks for confirmation; without a terminal, `--yes` is
    required.
    """
    given = {"time": time, "acks": acks, "replication": replication}
    changed: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if retention is not None:
        changed["retention_ms"] = parse_retention(retention)
    if retention_bytes is not None:
        changed["retention_bytes"] = parse_retention_bytes(retention_bytes)
    if writer is not None:
        changed["writer"] = parse_writer(writer)
    with open_named(context, log, log_option) as opened:
        before = find_stream(opened, stream)
        if record or field:
            changed["record"] = _alter_record(before, record, field)
        changes = _changes(before, changed, partitions, opened.limits)
        plan = [describe_change(change, before) for change in changes]
        is_removing = any(is_destructive(change, before) for change in changes)
        if is_removing and not dry_run:
            what = "; ".join(plan)
            refusal = f"this would {what}, which removes events"
            confirm(f"{what}: this removes events. Continue?", refusal, yes=yes)
        if changes and not dry_run:
            opened.apply(changes)
    _show(before, plan, is_removing, dry_run, json)


def _alter_record(before: Stream, record: str | None, fields: list[str] | None) -> Schema:
    if record and fields:
        raise UsageError("give --record or --field, not both")
    if record:
        return schema_of(import_record(record, Path.cwd()))
    if before.record is None:
        raise UsageError(
            f"stream {before.name} holds {before.spec.content}, not records, so fields cannot be "
            "added: create a new stream and copy the events over"
        )
    old = before.record
    return Schema(old.name, (*old.fields, *parse_fields(old.name, fields or [])))


def _changes(
    before: Stream, changed: dict[str, object], partitions: int | None, limits: Limits
) -> list[Change]:
    """What is to be done; raises where it may not be, before anybody is asked."""
    spec = msgspec.structs.replace(before.spec, **changed)
    check_spec(spec, limits.partitions_max)
    check_alter(before, spec)
    changes: list[Change] = [AlterStream(spec)] if spec != before.spec else []
    if partitions is not None and partitions != before.partitions:
        changes.append(GrowStream(str(before.name), partitions))
    return changes


def _show(before: Stream, plan: list[str], is_removing: bool, dry_run: bool, json: bool) -> None:
    if json:
        done = {"stream": str(before.name), "changes": plan, "applied": not dry_run}
        say_json({**done, "destructive": is_removing})
        return
    if not plan:
        say("nothing to change")
    for step in plan:
        say(f"{'! ' if is_removing else '+ '}{step}")
    if plan and before.spec.origin and not dry_run:
        note(
            f"{before.name} is declared in the catalogue {before.spec.origin}: change it there "
            "too, or the next `penstock apply` will change it back"
        )
