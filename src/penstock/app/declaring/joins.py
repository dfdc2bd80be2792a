"""Declaring re-keyed streams, lookups and joins: what streams and tables offer as methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from penstock.app.declaring.checks import (
    check_declaration,
    check_word,
    class_name,
    length,
    no_changelog,
    place_name,
    schema_of_lookup,
    table_type,
    why_not,
)
from penstock.app.declaring.definitions import Lookup, Rekey, StreamJoin, StreamOrTable, TableJoin
from penstock.app.declaring.location import Location, caller
from penstock.app.declaring.streams import AppStream, How
from penstock.app.declaring.tables import AppTable
from penstock.app.declaring.windows import Duration
from penstock.errors import AppError
from penstock.log.declaring.objects import StreamSpec
from penstock.records.schema import Field, Maybe, Schema, record_type

if TYPE_CHECKING:
    from penstock.app.declaring.app import App

T = TypeVar("T")


def group_by(app: App, stream: AppStream[T], field: str, name: str | None) -> AppStream[T]:
    where = caller()
    name = None if name is None else place_name(where, name)
    app.check_input(where, name or stream.name, stream)
    no_changelog(where, stream.name, app.tables)
    if stream.spec is None or stream.spec.record is None:
        raise AppError(
            f"{where}: {stream.name} has no record, so it cannot be re-keyed: derive a stream with "
            f"key={field!r} instead"
        )
    return _copy_stream(app, stream, name or f"{stream.name}_by_{field}", field, None, where)


def through(app: App, stream: AppStream[T], name: str, partitions: int | None) -> AppStream[T]:
    where = caller()
    name = place_name(where, name)
    app.check_input(where, name, stream)
    no_changelog(where, stream.name, app.tables)
    return _copy_stream(app, stream, name, stream.key, partitions, where)


def _copy_stream(
    app: App,
    stream: AppStream[T],
    name: str,
    key: str | None,
    partitions: int | None,
    where: Location,
) -> AppStream[T]:
    if stream.spec is None:
        raise AppError(f"{where}: the columns of {stream.name} are unknown: declare its record")
    count = partitions if partitions is not None else stream.spec.partitions
    spec = StreamSpec(
        name=name,
        record=stream.spec.record,
        content=stream.spec.content,
        key=key,
        time=stream.time,
        partitions=count,
    )
    check_declaration(where, spec)
    made: AppStream[T] = AppStream(
        app=app,
        name=name,
        record=stream.record,
        spec=spec,
        key=key,
        time=stream.time,
        watermark_us=stream.watermark_us,
        location=where,
    )
    app.define(Rekey(name=name, inputs=(stream,), outputs=(made,), location=where))
    return app.add_stream(made)


def lookup(
    app: App,
    stream: AppStream[object],
    place: StreamOrTable,
    how: Literal["left", "inner"],
    name: str | None,
) -> AppStream[object]:
    where = caller()
    called = place_name(where, name or f"{stream.name}_with_{place.name}")
    check_word(where, f"{called}: how", how, Literal["left", "inner"])
    for given in (stream, place):
        app.check_input(where, called, given)
    table = as_table(where, called, place)
    if stream.key is None:
        raise AppError(
            f"{where}: {stream.name} has no key to look up in {table.name}: declare it with key="
        )
    if table.windows is not None:
        raise AppError(
            f"{where}: table {table.name} has windows, so it cannot be looked up by key alone"
        )
    schema = schema_of_lookup(where, called, stream, table)
    spec = StreamSpec(
        name=called,
        record=schema,
        content="record",
        key=stream.key,
        time=stream.time,
        partitions=None if stream.spec is None else stream.spec.partitions,
    )
    check_declaration(where, spec)
    made: AppStream[object] = AppStream(
        app=app,
        name=called,
        record=record_type(schema),
        spec=spec,
        key=stream.key,
        time=stream.time,
        watermark_us=stream.watermark_us,
        location=where,
    )
    app.define(
        Lookup(
            name=called, inputs=(stream,), outputs=(made,), location=where, reads=(table,), how=how
        )
    )
    return app.add_stream(made)


def as_table(where: Location, name: str, place: StreamOrTable) -> AppTable[object]:
    """The table to look up; a stream declared with `table=True` is a table that others fill."""
    if isinstance(place, AppTable):
        return place
    if place.spec is None or not place.spec.table or place.record is None:
        raise AppError(
            f"{where}: {name} looks up {place.name}, which is a stream, not a table: declare it "
            "with app.table(…), or with table=True and a record"
        )
    return AppTable(
        app=place.app,
        name=place.name,
        key_type=str,
        value=place.record,
        default=None,
        spec=place.spec,
        location=place.location,
    )


def join(
    app: App,
    left: AppStream[object],
    right: AppStream[object],
    on: str,
    within: Duration,
    how: How,
    name: str | None,
) -> AppStream[object]:
    where = caller()
    called = place_name(where, name or f"{left.name}_{right.name}")
    check_word(where, f"{called}: how", how, How)
    for given in (left, right):
        app.check_input(where, called, given)
        if given.time is None or given.watermark_us is None:
            raise AppError(
                f"{where}: {called} joins {given.name}, which lacks a time field or a watermark: "
                "declare both, or the state of the join would grow forever"
            )
    made: AppStream[object] = AppStream(
        app=app, name=called, record=None, spec=None, key=on, location=where
    )
    within_us = length(where, within, "within") or 0
    app.define(
        StreamJoin(
            name=called,
            inputs=(left, right),
            outputs=(made,),
            location=where,
            on=on,
            within_us=within_us,
            how=how,
        )
    )
    return app.add_stream(made)


def join_tables(
    app: App, left: AppTable[object], right: AppTable[object], how: How, name: str | None
) -> AppTable[object]:
    where = caller()
    called = place_name(where, name or f"{left.name}_{right.name}")
    check_word(where, f"{called}: how", how, How)
    sides = []
    for given in (left, right):
        app.check_input(where, called, given)
        if given.windows is not None or given.spec is None:
            raise AppError(
                f"{where}: {called} joins table {given.name}, which is {why_not(given)}: only "
                "other tables can be joined"
            )
        sides.append(table_type(given))
    schema = Schema(
        class_name(called),
        (Field(left.name, Maybe(sides[0])), Field(right.name, Maybe(sides[1]))),
    )
    spec = StreamSpec(name=called, record=schema, content="record", table=True)
    check_declaration(where, spec)
    made: AppTable[object] = AppTable(
        app=app,
        name=called,
        key_type=left.key_type,
        value=record_type(schema),
        default=None,
        spec=spec,
        location=where,
    )
    app.define(
        TableJoin(
            name=called,
            inputs=(left, right),
            outputs=(made,),
            location=where,
            reads=(left, right),
            how=how,
        )
    )
    return app.add_table(made)
