"""The streams and tables of an app, created in the log or brought up to date."""

from __future__ import annotations

import msgspec

from penstock.app.declaring.definitions import Agent, StreamOrTable
from penstock.app.declaring.plan import Plan
from penstock.app.declaring.tables import AppTable
from penstock.app.running.positions import writer_name
from penstock.errors import AppError, EvolutionError, UnknownObjectError, UsageError
from penstock.log.api import Log
from penstock.log.declaring.objects import (
    AlterStream,
    Change,
    CreateStream,
    GrowStream,
    StreamSpec,
    check_alter,
)
from penstock.records.evolution import evolution_reasons
from penstock.records.schema import Schema


def make_streams(log: Log, plan: Plan) -> None:
    """Create the streams and tables that the plan declares, or bring them up to date."""
    wanted: dict[str, tuple[StreamSpec, object]] = {}
    written = {
        output.name
        for definition in plan.app.definitions.values()
        for output in definition.outputs
        if isinstance(output, AppTable)
    }
    places: list[StreamOrTable] = [*plan.app.streams.values(), *plan.app.tables.values()]
    for place in places:
        if place.spec is not None:
            wanted[place.name] = (place.spec, place.location)
    for definition in plan.definitions:
        if isinstance(definition, Agent) and definition.timers and definition.keeps_timers:
            spec = definition.timers.spec
            if spec is not None:
                wanted[spec.name] = (spec, definition.location)
                written.add(spec.name)
    changes: list[Change] = []
    for spec, location in wanted.values():
        try:
            owned = own(spec, plan.app.name) if spec.name in written else spec
            changes += changes_for(log, owned)
        except UsageError as error:
            raise AppError(f"{location}: {error}") from error
    if changes:
        log.apply(changes)


def own(spec: StreamSpec, app: str) -> StreamSpec:
    """A table that an app writes to, and nobody else."""
    return msgspec.structs.replace(spec, writer=writer_name(app))


def changes_for(log: Log, spec: StreamSpec) -> list[Change]:
    """The changes that make the stream match its declaration; none if it already does.

    An app adds to what is there and removes nothing: settings that it does not name stay as they
    are, and so does a record with fields that this app does not know (added by a newer version, or
    by another app).
    """
    try:
        found = log.stream(spec.name)
    except UnknownObjectError:
        return [CreateStream(spec)]
    said = {
        name: getattr(spec, name)
        for name in ("key", "time", "partitions", "retention_ms", "retention_bytes", "writer")
        if getattr(spec, name) is not None
    }
    if None not in (found.spec.time, spec.time) and found.spec.time != spec.time:
        raise EvolutionError(
            f"stream {found.name} takes the time of its events from {found.spec.time!r}, but is "
            f"declared here with {spec.time!r}, which would change it for all of its readers: use "
            "the same field, or another stream"
        )
    if None not in (found.spec.writer, spec.writer) and found.spec.writer != spec.writer:
        raise EvolutionError(
            f"table {found.name} is written by {found.spec.writer}, and a table has one writer: "
            f"use another table, or `penstock stream alter {found.name} --writer {spec.writer}`"
        )
    wanted = msgspec.structs.replace(
        found.spec,
        record=_newest(found.record, spec.record),
        content=spec.content,
        table=spec.table,
        entries=spec.entries,
        **said,
    )
    if wanted.partitions is not None and wanted.partitions < found.partitions:
        wanted = msgspec.structs.replace(wanted, partitions=found.partitions)  # grown since
    check_alter(found, wanted)
    changes: list[Change] = []
    if wanted.partitions is not None and wanted.partitions > found.partitions:
        changes.append(GrowStream(spec.name, wanted.partitions))
    as_it_is = msgspec.structs.replace(found.spec, record=found.record, partitions=None)
    if msgspec.structs.replace(wanted, partitions=None) != as_it_is:
        changes.append(AlterStream(msgspec.structs.replace(wanted, partitions=None)))
    return changes


def _newest(there: Schema | None, declared: Schema | None) -> Schema | None:
    """The record that has the fields of both, if one has evolved from the other."""
    if there is None or declared is None or evolution_reasons(declared, there):
        return declared
    return there
