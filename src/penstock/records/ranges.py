"""Which times, integers and decimals a record can have: those that Arrow stores without change."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import cast

import pyarrow as pa

from penstock.errors import RecordError
from penstock.records.schema import (
    INT_MAX,
    INT_MIN,
    DictOf,
    Digits,
    ListOf,
    Maybe,
    Record,
    Scalar,
    Schema,
    SetOf,
    Type,
    parts_of,
)

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_DAY_US = 86_400_000_000
#: the range of Python's times in UTC, years 1 to 9999, in the units of the Arrow type
_DAYS = ((dt.date.min - EPOCH.date()).days, (dt.date.max - EPOCH.date()).days)
TIME_US_MIN, TIME_US_MAX = _DAYS[0] * _DAY_US, (_DAYS[1] + 1) * _DAY_US - 1
TIME_RANGES = {
    "datetime": (TIME_US_MIN, TIME_US_MAX),
    "naive_datetime": (TIME_US_MIN, TIME_US_MAX),
    "date": _DAYS,
}
OUT_OF_RANGE = "a time outside the years 1 to 9999 in UTC"


def is_in_range(time: dt.datetime) -> bool:
    """Whether Python can represent a time in UTC as well, whatever its own time zone."""
    return TIME_US_MIN <= (time - EPOCH) // dt.timedelta(microseconds=1) <= TIME_US_MAX


def check_values(value: Record, schema: Schema) -> None:
    """Raise `RecordError`, with the path, if a value is outside its range."""
    for leaf, type_, path in _walk(value, schema, type(value).__name__):
        _check_leaf(leaf, type_, path)


def _check_leaf(leaf: object, type_: Type, path: str) -> None:
    """Refuse values that Arrow would change or reject: no zone, lost digits, a huge integer."""
    if isinstance(leaf, int) and not INT_MIN <= leaf <= INT_MAX:
        raise RecordError(f"{path}: {leaf} does not fit into 64 bits")
    if isinstance(type_, Digits):
        try:
            pa.scalar(leaf, pa.decimal128(type_.precision, type_.scale))
        except (pa.ArrowException, OverflowError):
            raise RecordError(f"{path}: {leaf} does not fit into {type_}") from None
    elif isinstance(leaf, dt.datetime):
        if leaf.tzinfo is None:
            raise RecordError(
                f"{path}: {leaf.isoformat()} has no time zone: use datetime.now(UTC), or declare "
                "the field as Annotated[datetime, msgspec.Meta(tz=False)] to store times without"
            )
        if not is_in_range(leaf):
            raise RecordError(f"{path}: {leaf.isoformat()} is {OUT_OF_RANGE}")


def _walk(value: object, type_: Type, path: str) -> Iterable[tuple[object, Type, str]]:
    """Every datetime, int and Decimal inside `value`, with its declared type and its path."""
    match type_:
        case _ if value is None:
            return
        case Maybe(of=of):
            yield from _walk(value, of, path)
        case Scalar(kind="datetime" | "int") | Digits():
            yield value, type_, path
        case ListOf(item=item) | SetOf(item=item) if _needs_walk(item) and not _fit(item, value):
            for index, element in enumerate(cast(Iterable[object], value)):
                yield from _walk(element, item, f"{path}[{index}]")
        case DictOf(key=key, value=inner) if _needs_walk(type_):
            for name, element in cast(Mapping[object, object], value).items():
                yield from _walk(name, key, f"{path}.keys")
                yield from _walk(element, inner, f"{path}[{name!r}]")
        case Schema(fields=fields) if _needs_walk(type_):
            for name, field in zip(type(value).__struct_fields__, fields, strict=True):  # type: ignore[attr-defined]
                yield from _walk(getattr(value, name), field.type, f"{path}.{field.name}")


def _fit(item: Type, values: object) -> bool:
    """Whether elements are integers that all fit into 64 bits; there may be very many."""
    if item != Scalar("int"):
        return False
    numbers = cast(Collection[int], values)
    return not numbers or (min(numbers) >= INT_MIN and max(numbers) <= INT_MAX)


@functools.cache
def _needs_walk(type_: Type) -> bool:
    return any(
        isinstance(part, Digits) or (isinstance(part, Scalar) and part.kind in ("datetime", "int"))
        for part in parts_of(type_)
    )
