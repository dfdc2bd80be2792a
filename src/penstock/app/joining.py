"""Declaring re-keyed streams, lookups and joins: what streams and tables offer as methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from penstock.app.checks import (
    checked,
    class_name,
    length,
    looked_up,
    no_changelog,
    one_of,
    place_name,
    table_type,
    why_not,
)
from penstock.app.definitions import Lookup, Place, Rekey, StreamJoin, TableJoin
from penstock.app.location import Location, caller
from penstock.app.streams import AppStream, How
from penstock.app.tables import AppTable
from penstock.app.windows import Duration
from penstock.errors import AppError
from penstock.log.objects import StreamSpec
from penstock.records.schema import Field, Maybe, Schema, record_type

if TYPE_CHECKING:
    from penstock.app.app import App

T = TypeVar("T")


def group_by(app: App, stream: AppStream[T], field: str, name: str | None) -> AppStream[T]:
    where = caller()
    name = None if name is None else place_name(where, name)
    app.check_input(where, name or stream.name, stream)
    no_changelog(where, stream.name, app.tables)
    if stream.spec is None or stream.spec.record is None:
        raise AppError(
            f"{where}: {stream.name} has no record: derive a stream with key={field!r} instead"
        )
    return _copied(app, stream, name or f"{stream.name}_by_{field}", field, None, where)


def through(app: App, stream: AppStream[T], name: str, partitions: int | None) -> AppStream[T]:
    where = caller()
    name = place_name(where, name)
    app.check_input(where, name, stream)
    no_changelog(where, stream.name, app.tables)
    return _copied(app, stream, name, stream.key, partitions, where)


def _copied(
    app: App, stream: AppStream[T], name: str, key: str | None, partitions: int | None,
    where: Location,
) -> AppStream[T]:  # fmt: skip
    if stream.spec is None:
        raise AppError(f"{where}: the columns of {stream.name} are not known: name its record")
    count = partitions if partitions is not None else stream.spec.partitions
    spec = StreamSpec(
        name=name, record=stream.spec.record, content=stream.spec.content, key=key,
        time=stream.time, partitions=count,
    )  # fmt: skip
    checked(where, spec)
    made: AppStream[T] = AppStream(
        app=app, name=name, record=stream.record, spec=spec, key=key, time=stream.time,
        watermark_us=stream.watermark_us, location=where,
    )  # fmt: skip
    app.define(Rekey(name=name, inputs=(stream,), outputs=(made,), location=where))
    return app.add_stream(made)


def lookup(
    app: App, stream: AppStream[object], place: Place, how: Literal["left", "inner"],
    name: str | None,
) -> AppStream[object]:  # fmt: skip
    where = caller()
    called = place_name(where, name or f"{stream.name}_with_{place.name}")
    one_of(where, f"{called}: how", how, Literal["left", "inner"])
    for given in (stream, place):
        app.check_input(where, called, given)
    table = as_table(where, called, place)
    if stream.key is None:
        raise AppError(f"{where}: {stream.name} has no key to look up in {table.name}")
    if table.windows is not None:
        raise AppError(f"{where}: {table.name} has windows and cannot be looked up by key alone")
    schema = looked_up(where, called, stream, table)
    spec = StreamSpec(
        name=called, record=schema, content="record", key=stream.key, time=stream.time,
        partitions=None if stream.spec is None else stream.spec.partitions,
    )  # fmt: skip
    checked(where, spec)
    made: AppStream[object] = AppStream(
        app=app, name=called, record=record_type(schema), spec=spec, key=stream.key,
        time=stream.time, watermark_us=stream.watermark_us, location=where,
    )  # fmt: skip
    app.define(
        Lookup(name=called, inputs=(stream,), outputs=(made,), location=where, reads=(table,),
               how=how)
    )  # fmt: skip
    return app.add_stream(made)


def as_table(where: Location, name: str, place: Place) -> AppTable[object]:
    """A stream that is declared with `table=True` is a table that others fill."""
    if isinstance(place, AppTable):
        return place
    if place.spec is None or not place.spec.table or place.record is None:
        raise AppError(
            f"{where}: {name} looks up {place.name}, which is a stream and no table: declare it "
            "with app.table(…), or with table=True and a record"
        )
    return AppTable(
        app=place.app, name=place.name, key_type=str, value=place.record, default=None,
        spec=place.spec, location=place.location,
    )  # fmt: skip


def join(
    app: App, left: AppStream[object], right: AppStream[object], on: str, within: Duration,
    how: How, name: str | None,
) -> AppStream[object]:  # fmt: skip
    where = caller()
    called = place_name(where, name or f"{left.name}_{right.name}")
    one_of(where, f"{called}: how", how, How)
    for given in (left, right):
        app.check_input(where, called, given)
        if given.time is None or given.watermark_us is None:
            raise AppError(
                f"{where}: {called} joins {given.name}, which needs a time and a watermark: "
                "without them its state would grow for ever"
            )
    made: AppStream[object] = AppStream(
        app=app, name=called, record=None, spec=None, key=on, location=where
    )
    within_us = length(where, within, "within") or 0
    app.define(
        StreamJoin(name=called, inputs=(left, right), outputs=(made,), location=where, on=on,
                   within_us=within_us, how=how)
    )  # fmt: skip
    return app.add_stream(made)


def join_tables(
    app: App, left: AppTable[object], right: AppTable[object], how: How, name: str | None
) -> AppTable[object]:
    where = caller()
    called = place_name(where, name or f"{left.name}_{right.name}")
    one_of(where, f"{called}: how", how, How)
    sides = []
    for given in (left, right):
        app.check_input(where, called, given)
        if given.windows is not None or given.spec is None:
            raise AppError(f"{where}: {called} joins {given.name}, which is {why_not(given)}")
        sides.append(table_type(given))
    schema = Schema(
        class_name(called),
        (Field(left.name, Maybe(sides[0])), Field(right.name, Maybe(sides[1]))),
    )
    spec = StreamSpec(name=called, record=schema, content="record", table=True)
    checked(where, spec)
    made: AppTable[object] = AppTable(
        app=app, name=called, key_type=left.key_type, value=record_type(schema), default=None,
        spec=spec, location=where,
    )  # fmt: skip
    app.define(
        TableJoin(name=called, inputs=(left, right), outputs=(made,), location=where,
                  reads=(left, right), how=how)
    )  # fmt: skip
    return app.add_table(made)
