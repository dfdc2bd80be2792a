"""Records as Arrow columns, and back, without loss.

Plain columns are converted by pyarrow directly; nested values and those with a Python type of
their own go through msgspec's conversion to builtins, which is still one call per column.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import inspect
import types
from collections.abc import Sequence
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import RecordError
from penstock.records.ranges import EPOCH, OUT_OF_RANGE, TIME_RANGES, check_values
from penstock.records.schema import (
    Choice,
    DictOf,
    Digits,
    Field,
    ListOf,
    Maybe,
    Record,
    Scalar,
    Schema,
    SetOf,
    Type,
    parts_of,
    record_type,
    schema_of,
)

UTC_MICROSECONDS = pa.timestamp("us", tz="UTC")
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not JSON, or are nested too deeply to be read."""
_ARROW: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "bytes": pa.binary(),
    "datetime": UTC_MICROSECONDS,
    "naive_datetime": pa.timestamp("us"),
    "date": pa.date32(),
    "uuid": pa.string(),
}
_UUID = "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
_BUILTIN = (bytes, dt.datetime, dt.date, decimal.Decimal)


@functools.cache
def arrow_type(type_: Type) -> pa.DataType:
    match type_:
        case Scalar(kind=kind):
            return _ARROW[kind]
        case Digits(precision=precision, scale=scale):
            return pa.decimal128(precision, scale)
        case Choice():
            return pa.string() if type_.of_text else pa.int64()
        case ListOf(item=item) | SetOf(item=item):
            return pa.list_(_arrow_field("element", item))
        case DictOf(key=key, value=value):
            return pa.map_(arrow_type(key), _arrow_field("value", value))
        case Maybe(of=of):
            return arrow_type(of)
        case Schema(fields=fields):
            return pa.struct([_arrow_field(field.name, field.type) for field in fields])


def _arrow_field(name: str, type_: Type) -> pa.Field:
    return pa.field(name, arrow_type(type_), nullable=isinstance(type_, Maybe))


@functools.cache
def arrow_schema(schema: Schema) -> pa.Schema:
    return pa.schema([_arrow_field(field.name, field.type) for field in schema.fields])


def schema_of_arrow(name: str, columns: pa.Schema) -> Schema:
    """The record with such columns: the inverse of `arrow_schema`, as far as there is one.

    Raises `RecordError` naming a column whose type no record can have.
    """
    fields = [Field(column.name, _type_of(column, column.name)) for column in columns]
    return Schema(name, tuple(fields))


def _type_of(column: pa.Field, path: str) -> Type:
    found = _type_of_arrow(column.type, path)
    return Maybe(found) if column.nullable else found


def _type_of_arrow(kind: pa.DataType, path: str) -> Type:  # noqa: C901  one case per type
    types_ = pa.types
    if types_.is_integer(kind):
        return Scalar("int")
    if types_.is_floating(kind):
        return Scalar("float")
    if types_.is_string(kind) or types_.is_large_string(kind):
        return Scalar("str")
    if types_.is_binary(kind) or types_.is_large_binary(kind):
        return Scalar("bytes")
    if types_.is_timestamp(kind):
        return Scalar("naive_datetime" if kind.tz is None else "datetime")
    if types_.is_decimal128(kind):
        return Digits(kind.precision, kind.scale)
    if types_.is_list(kind) or types_.is_large_list(kind):
        return ListOf(_type_of(kind.value_field, f"{path}[]"))
    if types_.is_map(kind):
        value = _type_of(kind.item_field, f"{path}[]")
        return DictOf(_type_of_arrow(kind.key_type, f"{path} (its keys)"), value)
    if types_.is_struct(kind):
        fields = [Field(f.name, _type_of(f, f"{path}.{f.name}")) for f in kind]
        name = path.rpartition(".")[2].removesuffix("[]").title().replace("_", "")
        return Schema(name if name.isidentifier() else "Struct", tuple(fields))
    if types_.is_boolean(kind) or types_.is_date32(kind):
        return Scalar("bool" if types_.is_boolean(kind) else "date")
    raise RecordError(f"column {path} is {kind}, which no field of a record can have: cast it")


class RecordCodec:
    """Turns records of one class into columns and back.

    Validation is msgspec's, with the path of the field in the error.
    """

    def __init__(self, record: type[Record]) -> None:
        self.record = record
        self.schema = schema_of(record)
        self.arrow = arrow_schema(self.schema)
        self._pack = msgspec.msgpack.Encoder(order=_order(self.schema))
        self._one = msgspec.msgpack.Decoder(record)
        self._fields = msgspec.structs.fields(record)
        parameters = inspect.signature(record).parameters.values()
        self._is_positional = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self._annotations = {
            info.encode_name: types.GenericAlias(list, (info.type,)) for info in self._fields
        }
        self._nested = {
            info.encode_name: codec_of(info.type)
            for info in self._fields
            if isinstance(info.type, type) and issubclass(info.type, Record)
        }

    def validate(self, value: Record) -> Record:
        """The value as it will be stored; `RecordError` has the path of an invalid value."""
        if not isinstance(value, self.record):
            raise RecordError(
                f"expected a record of class {self.record.__name__}, not {type(value).__name__}"
            )
        try:
            found = self._one.decode(self._pack.encode(value))
        except (*NOT_JSON, msgspec.EncodeError, TypeError, OverflowError, ValueError) as error:
            if isinstance(error, OverflowError):
                check_values(value, self.schema)  # which can name the invalid value
            raise RecordError(f"{self.record.__name__}: {error}") from None
        check_values(found, self.schema)
        return found

    def from_json(self, text: bytes | str) -> Record:
        """Decode and validate one JSON object."""
        try:
            value = msgspec.json.decode(text, type=self.record)
        except msgspec.ValidationError as error:
            raise RecordError(f"{self.record.__name__}: {error}") from None
        except NOT_JSON as error:
            raise RecordError(f"not valid JSON: {error}") from None
        return self.validate(value)

    def pack(self, value: Record) -> bytes:
        return self._pack.encode(value)

    def unpack(self, data: bytes) -> Record:
        """Unpack a record, which may be of an older version of its class."""
        try:
            return self._one.decode(data)
        except msgspec.ValidationError:
            # A field without a default was added: it is None, also in nested records.
            filled = msgspec.msgpack.decode(data, type=record_type(self.schema, strict=False))
            return self._one.decode(self._pack.encode(filled))

    def to_arrow(self, records: Sequence[Record | None]) -> pa.RecordBatch:
        """Columns of `records`, in the record's field order; a `None` is a row of nulls."""
        columns = [
            self._column([None if r is None else getattr(r, info.name) for r in records], field)
            for info, field in zip(self._fields, self.schema.fields, strict=True)
        ]
        schema = self.arrow if None not in records else nullable(self.arrow)
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _column(self, values: list[object], field: Field) -> pa.Array:
        if not _is_plain(field.type):
            values = msgspec.to_builtins(values, builtin_types=_BUILTIN)
        path = f"{self.record.__name__}.{field.name}"
        try:
            column = pa.array(values, arrow_type(field.type))
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise RecordError(f"{path}: {error}") from None
        check_times(column, field.type, path)
        return column

    def from_arrow(self, batch: pa.RecordBatch) -> list[Record]:
        """The records in a batch; a field that the batch does not have yet is `None`."""
        columns = [self._values(batch, field) for field in self.schema.fields]
        make = self.record
        if self._is_positional:
            return list(map(make, *columns))
        names = [info.name for info in self._fields]
        return [make(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]

    def _values(self, batch: pa.RecordBatch, field: Field) -> list[object]:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            return [None] * batch.num_rows
        column = batch.column(index)
        nested = self._nested.get(field.name)
        if nested is not None and not column.null_count and nested.has_columns(column.type):
            return list(nested.from_arrow(pa.RecordBatch.from_struct_array(column)))
        values = python_values(column)
        if _is_plain(field.type):
            return values
        annotation = self._annotations[field.name]
        converted: list[object] = msgspec.convert(values, annotation, builtin_types=_BUILTIN)
        return converted

    def has_columns(self, struct: pa.DataType) -> bool:
        """Whether a struct has exactly the fields of the record."""
        return bool([field.name for field in struct] == self.arrow.names)


def _order(schema: Schema) -> Literal["deterministic"] | None:
    """The order option for packing, so that equal records give equal bytes: sets are sorted."""
    kinds = list(parts_of(schema))
    sortable = all(kind.key == Scalar("str") for kind in kinds if isinstance(kind, DictOf))
    return "deterministic" if sortable and any(isinstance(k, SetOf) for k in kinds) else None


def python_values(column: pa.Array) -> list[object]:
    """A column's values as Python objects: the same as `to_pylist`, but much faster.

    Times are converted here, each distinct one once: pyarrow looks up a time zone for each. Maps
    as dicts are requested only if there can be any, since that option is slow.
    """
    if column.type == UTC_MICROSECONDS:
        encoded = column.dictionary_encode()
        made = [
            EPOCH + dt.timedelta(microseconds=at)
            for at in encoded.dictionary.cast(pa.int64()).to_pylist()
        ]
        return [None if place is None else made[place] for place in encoded.indices.to_pylist()]
    maps = "strict" if pa.types.is_nested(column.type) else None
    values: list[object] = column.to_pylist(maps_as_pydicts=maps)
    return values


@functools.cache
def codec_of(record: type[Record]) -> RecordCodec:
    return RecordCodec(record)


def codec_of_schema(schema: Schema) -> RecordCodec:
    """A codec for programs that have the schema but not the class."""
    return codec_of(record_type(schema))


def nullable(schema: pa.Schema) -> pa.Schema:
    """The same columns, all nullable, as needed for deleted entries."""
    return pa.schema([field.with_nullable(True) for field in schema])


def conform(batch: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """Check and cast `batch` to the schema's columns: order, types, nulls and choices."""
    target = arrow_schema(schema)
    unknown = [name for name in batch.schema.names if schema.field(name) is None]
    if unknown:
        raise RecordError(
            f"{schema.name} has no field {unknown[0]!r}: it has {', '.join(target.names)}"
        )
    columns = [
        _conform_column(batch, field, arrow, schema.name)
        for field, arrow in zip(schema.fields, target, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _conform_column(batch: pa.RecordBatch, field: Field, arrow: pa.Field, record: str) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    if index < 0:
        if not arrow.nullable:
            raise RecordError(f"column {record}.{field.name} ({field.type}) is missing")
        return pa.nulls(batch.num_rows, arrow.type)
    column = batch.column(index)
    if column.type != arrow.type:
        try:
            if not is_alike(column.type, arrow.type):
                raise TypeError("convert it first")
            column = column.cast(arrow.type)
        except (pa.ArrowException, TypeError) as error:
            raise RecordError(
                f"column {record}.{field.name} is {batch.schema.field(index).type}, "
                f"not {field.type}: {error}"
            ) from None
    check_column(column, field.type, f"{record}.{field.name}")
    return column


_FAMILIES = (
    (pa.types.is_boolean,),
    (pa.types.is_integer,),
    (pa.types.is_floating, pa.types.is_integer),
    (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary),
    (pa.types.is_date,),
    (pa.types.is_decimal, pa.types.is_integer),
    (pa.types.is_list, pa.types.is_large_list),
    (pa.types.is_map,),
    (pa.types.is_struct,),
)


def is_alike(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a cast only changes the representation, never what the value means."""
    if pa.types.is_dictionary(given):
        given = given.value_type
    if pa.types.is_null(given):
        return True
    if pa.types.is_timestamp(wanted):
        return pa.types.is_timestamp(given) and (given.tz is None) == (wanted.tz is None)
    family = next(family for family in _FAMILIES if family[0](wanted))
    if not any(member(given) for member in family):
        return False
    if pa.types.is_list(wanted):
        return is_alike(given.value_type, wanted.value_type)
    if pa.types.is_map(wanted):
        return is_alike(given.key_type, wanted.key_type) and is_alike(
            given.item_type, wanted.item_type
        )
    if pa.types.is_struct(wanted):
        known = {field.name: field.type for field in wanted}
        return all(
            field.name in known and is_alike(field.type, known[field.name]) for field in given
        )
    return True


def check_column(column: pa.Array, type_: Type, path: str) -> None:
    """Raise `RecordError` if a column of the right Arrow type has values that are not allowed."""
    if isinstance(type_, Maybe):
        column, type_ = column.drop_null(), type_.of
    elif column.null_count:
        raise RecordError(f"column {path} has nulls, which {type_} does not allow")
    check_times(column, type_, path)
    match type_:
        case Choice(values=values):
            _check_all(column, pc.is_in(column, value_set=pa.array(values)), type_, path)
        case Scalar(kind="uuid"):
            _check_all(column, pc.match_substring_regex(column, _UUID), type_, path)
        case ListOf(item=item) | SetOf(item=item):
            check_column(column.flatten(), item, f"{path}[]")
        case DictOf(key=key, value=value):
            if any(len(dict(row)) != len(row) for row in column.to_pylist() if row):
                raise RecordError(f"column {path} has the same key twice in one row")
            check_column(column.keys, key, f"{path}.keys")
            check_column(column.items, value, f"{path}[]")
        case Schema(fields=fields):
            for field, inner in zip(fields, column.flatten(), strict=True):
                check_column(inner, field.type, f"{path}.{field.name}")


def check_times(column: pa.Array, type_: Type, path: str) -> None:
    """Raise `RecordError` if Python's own types cannot represent a time or date."""
    if not _holds_times(type_):
        return
    match type_:
        case Maybe(of=of):
            check_times(column, of, path)
        case Scalar(kind=kind):
            units = column.cast(pa.int32() if kind == "date" else pa.int64())
            found = pc.min_max(units).as_py()
            least, most = TIME_RANGES[kind]
            if found["min"] is not None and (found["min"] < least or found["max"] > most):
                raise RecordError(f"{path} contains {OUT_OF_RANGE}")
        case ListOf(item=item) | SetOf(item=item):
            check_times(column.flatten(), item, f"{path}[]")
        case DictOf():
            try:
                python_values(column)
            except (OverflowError, ValueError):
                raise RecordError(f"{path} contains {OUT_OF_RANGE}") from None
        case Schema(fields=fields):
            for field, inner in zip(fields, column.flatten(), strict=True):
                check_times(inner, field.type, f"{path}.{field.name}")


def _check_all(column: pa.Array, fits: pa.Array, type_: Type, path: str) -> None:
    if pc.any(pc.invert(fits)).as_py():
        value = column.filter(pc.invert(fits))[0].as_py()
        raise RecordError(f"column {path} contains {value!r}, which is not {type_}")


def _is_plain(type_: Type) -> bool:
    """Whether pyarrow converts values of the type by itself, in both directions."""
    inner = type_.of if isinstance(type_, Maybe) else type_
    return isinstance(inner, Digits) or (isinstance(inner, Scalar) and inner.kind != "uuid")


@functools.cache
def _holds_times(type_: Type) -> bool:
    return any(isinstance(part, Scalar) and part.kind in TIME_RANGES for part in parts_of(type_))
