"""Checks of declarations, whose errors name the file and line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from penstock.app.location import Location
from penstock.app.streams import AppStream
from penstock.app.tables import AppTable
from penstock.app.windows import Duration, duration_us
from penstock.errors import AppError, UsageError
from penstock.log.names import parse_stream
from penstock.log.objects import StreamSpec, check_spec, declare
from penstock.records.schema import Field, Maybe, Record, Schema, schema_of, type_of

PARTITIONS_MAX = 1000


def check_place(where: Location, name: str, check: Callable[[str], object]) -> None:
    try:
        check(name)
    except UsageError as error:
        raise AppError(f"{where}: {error}") from None


def place_name(where: Location, name: str) -> str:
    """The one name of a stream or table, however it was written: `default.orders` is `orders`."""
    try:
        return str(parse_stream(name))
    except UsageError as error:
        raise AppError(f"{where}: {error}") from None


def declared(
    where: Location, name: str, record: type[Record] | None, **settings: object
) -> StreamSpec:
    try:
        spec = declare(name, record, **cast(Any, settings))
    except UsageError as error:
        raise AppError(f"{where}: {error}") from None
    return checked(where, spec)


def checked(where: Location, spec: StreamSpec) -> StreamSpec:
    check_place(where, spec.name, lambda _: check_spec(spec, PARTITIONS_MAX))
    return spec


def length(where: Location, length: Duration | None, what: str) -> int | None:
    try:
        return None if length is None else duration_us(length, what)
    except UsageError as error:
        raise AppError(f"{where}: {error}") from None


def class_name(name: str) -> str:
    made = "".join(part.title() for part in name.replace("-", "_").split("_"))
    return made if made.isidentifier() else f"Row{made}"


def table_type(table: AppTable[object]) -> Any:
    if isinstance(table.value, type) and issubclass(table.value, Record):
        return schema_of(table.value)
    return type_of(table.value, table.name)


def why_not(table: AppTable[object]) -> str:
    return "windowed" if table.windows is not None else "derived from a DataFrame"


def looked_up(
    where: Location, name: str, stream: AppStream[object], table: AppTable[object]
) -> Schema:
    if stream.spec is None or stream.spec.record is None or table.spec is None:
        raise AppError(
            f"{where}: {name} needs records on both sides: give {stream.name} and {table.name} one"
        )
    if stream.spec.record.field(table.name) is not None:
        raise AppError(f"{where}: {stream.name} has a field {table.name} already: rename the table")
    joined = Field(table.name, Maybe(table_type(table)))
    return Schema(class_name(name), (*stream.spec.record.fields, joined))


def one_of(where: Location, what: str, given: object, words: object) -> None:
    """Raise unless the setting is one of the words that it may be."""
    allowed = get_args(words)
    if given not in allowed:
        raise AppError(f"{where}: {what} is {given!r}; it is {' or '.join(allowed)}")


def within(where: Location, what: str, given: int, least: int, most: int) -> None:
    """Raise unless the setting is between the two."""
    if not least <= given <= most:
        raise AppError(f"{where}: {what} is {least} to {most}, not {given}")


def no_changelog(where: Location, name: str, tables: Mapping[str, object]) -> None:
    """Raise for a table's changelog where events must have data."""
    if name in tables:
        raise AppError(
            f"{where}: {name} is a table's changelog, some of whose events have no data: let an "
            "agent pass on what you need of it"
        )


def check_late(
    where: Location,
    name: str,
    late: AppStream[object],
    source: AppStream[object] | AppTable[object],
) -> None:
    """Late events go to that stream as they came, so they must have its fields."""
    if late.app is not source.app:
        raise AppError(f"{where}: {name}: {late.name} is a stream of another app")
    given = source.spec.record if source.spec is not None else None
    wanted = late.spec.record if late.spec is not None else None
    if wanted is None:
        raise AppError(f"{where}: {name}: the stream {late.name} for late events has no record")
    if given is None:
        return  # a derived stream: its columns are known when it runs
    known = {field.name: field.type for field in given.fields}
    strange = [field.name for field in wanted.fields if known.get(field.name) != field.type]
    if strange:
        raise AppError(
            f"{where}: {name}: {late.name} has a field {strange[0]}, and late events have none of "
            f"this type: declare it with the record of {source.name}"
        )
