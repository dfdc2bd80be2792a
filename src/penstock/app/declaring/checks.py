"""Checks of declarations; their errors name the file and line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from penstock.app.declaring.location import Location
from penstock.app.declaring.streams import AppStream
from penstock.app.declaring.tables import AppTable
from penstock.app.declaring.windows import Duration, duration_us
from penstock.errors import AppError, UsageError
from penstock.log.declaring.names import parse_stream
from penstock.log.declaring.objects import StreamSpec, check_spec, declare
from penstock.records.schema import Field, Maybe, Record, Schema, schema_of, type_of

PARTITIONS_MAX = 1000


def check_place(where: Location, name: str, check: Callable[[str], object]) -> None:
    try:
        check(name)
    except UsageError as error:
        raise AppError(f"{where}: {error}") from None


def place_name(where: Location, name: str) -> str:
    """The canonical name of a stream or table: `default.orders` becomes `orders`."""
    try:
        return str(parse_stream(name))
    except UsageError as error:
        raise AppError(f"{where}: {error}") from None


def declare_stream(
    where: Location, name: str, record: type[Record] | None, **settings: object
) -> StreamSpec:
    try:
        spec = declare(name, record, **cast(Any, settings))
    except UsageError as error:
        raise AppError(f"{where}: {error}") from None
    return check_declaration(where, spec)


def check_declaration(where: Location, spec: StreamSpec) -> StreamSpec:
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


def schema_of_lookup(
    where: Location, name: str, stream: AppStream[object], table: AppTable[object]
) -> Schema:
    if stream.spec is None or stream.spec.record is None or table.spec is None:
        raise AppError(
            f"{where}: {name} needs a record on both sides: declare {stream.name} and {table.name} "
            "with one"
        )
    if stream.spec.record.field(table.name) is not None:
        raise AppError(f"{where}: {stream.name} already has a field {table.name}: rename the table")
    joined = Field(table.name, Maybe(table_type(table)))
    return Schema(class_name(name), (*stream.spec.record.fields, joined))


def check_word(where: Location, what: str, given: object, words: object) -> None:
    """Raise unless the setting has one of the allowed values."""
    allowed = get_args(words)
    if given not in allowed:
        raise AppError(f"{where}: {what} is {given!r}; it must be {' or '.join(allowed)}")


def check_between(where: Location, what: str, given: int, least: int, most: int) -> None:
    """Raise unless the setting is between `least` and `most`."""
    if not least <= given <= most:
        raise AppError(f"{where}: {what} must be between {least} and {most}, not {given}")


def no_changelog(where: Location, name: str, tables: Mapping[str, object]) -> None:
    """Raise if the name is that of a table, where every event must have data."""
    if name in tables:
        raise AppError(
            f"{where}: {name} is a table's changelog, in which some events have no data: write an "
            "agent that passes on the events you need"
        )


def check_late(
    where: Location,
    name: str,
    late: AppStream[object],
    source: AppStream[object] | AppTable[object],
) -> None:
    """Late events go to `late` unchanged, so they must have all of its fields."""
    if late.app is not source.app:
        raise AppError(
            f"{where}: {name}: {late.name} is a stream of another app: declare it on this one"
        )
    given = source.spec.record if source.spec is not None else None
    wanted = late.spec.record if late.spec is not None else None
    if wanted is None:
        raise AppError(
            f"{where}: {name}: the stream {late.name} for late events has no record: declare it "
            "with one"
        )
    if given is None:
        return  # a derived stream: its columns are known only when it runs
    known = {field.name: field.type for field in given.fields}
    strange = [field.name for field in wanted.fields if known.get(field.name) != field.type]
    if strange:
        raise AppError(
            f"{where}: {name}: {late.name} has a field {strange[0]}, but late events have no field "
            f"of that name and type: declare {late.name} with the record of {source.name}"
        )
