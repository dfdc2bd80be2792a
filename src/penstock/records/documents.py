"""Records as JSON documents, converted column by column, for exchange with other programs.

Columns of plain types are converted to text, and back, by Arrow itself; others by msgspec. Both
write and read the same documents.
"""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from penstock.errors import RecordError
from penstock.records.arrow import (
    NOT_JSON,
    RecordCodec,
    arrow_schema,
    arrow_type,
    check_column,
    codec_of_schema,
    python_values,
)
from penstock.records.schema import (
    Choice,
    Digits,
    Maybe,
    Record,
    Scalar,
    Schema,
    Type,
    record_type,
)

JSON_DEPTH_MAX = 200
"""How deeply JSON may be nested: Python's own limit depends on where it is read."""
_NEEDS_ESCAPE = r'["\\\x00-\x1f]'
_NOT_FINITE = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
_NAMED = re.compile(rb'"(NaN|-?Infinity)"')
_SPACE = b" \t\r\n"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_encoder = msgspec.json.Encoder()
_READ_KINDS = ("bool", "int", "float", "str", "datetime", "naive_datetime", "date", "uuid")
#: how times are written here; Arrow's reader accepts other forms too, which msgspec refuses
_FORMS = {
    "datetime": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)$",
    "naive_datetime": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?$",
    "date": r"^\d{4}-\d\d-\d\d$",
}


class Documents(NamedTuple):
    """The contents of documents: columns of the valid ones, and what is wrong with the others."""

    rows: pa.RecordBatch
    wrong: list[tuple[int, str]]


def to_documents(batch: pa.RecordBatch, schema: Schema) -> pa.Array:
    """One JSON document for each row, as bytes; fields that are not in the batch are left out."""
    joined: list[object] = []
    for field in schema.fields:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            continue
        start = "{" if not joined else ","
        joined += [f"{start}{_encoder.encode(field.name).decode()}:"]
        joined += [_texts(batch.column(index), field.type).fill_null("null")]
    if not joined:
        return pa.repeat(pa.scalar(b"{}"), batch.num_rows)
    return pc.binary_join_element_wise(*joined, "}", "").cast(pa.binary())


def _texts(column: pa.Array, type_: Type) -> pa.Array:
    """A column as JSON texts; nulls stay nulls."""
    inner = type_.of if isinstance(type_, Maybe) else type_
    match inner:
        case Scalar(kind="bool" | "int") | Choice(of_text=False):
            return column.cast(pa.string())
        case Scalar(kind="float"):
            return _numbers(column)
        case Scalar(kind="datetime"):
            return _quote(_moments(column), "Z")
        case Scalar(kind="naive_datetime"):
            return _quote(_moments(column))
        case Scalar(kind="date"):
            return _quote(column.cast(pa.string()))
        case Digits():
            return _quote(column.cast(pa.string()))
        case Scalar(kind="str" | "uuid") | Choice():
            if not pc.any(pc.match_substring_regex(column, _NEEDS_ESCAPE)).as_py():
                return _quote(column)
    made = [
        None if value is None else _encoder.encode(_name_numbers(value))
        for value in python_values(column)
    ]
    return pa.array(made, pa.binary()).cast(pa.string())


def _name_numbers(value: object) -> object:
    """A value in which every number that JSON cannot represent is replaced by its name."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {key: _name_numbers(inner) for key, inner in value.items()}
        case list():
            return [_name_numbers(inner) for inner in value]
    return value


def _quote(texts: pa.Array, suffix: str = "") -> pa.Array:
    return pc.binary_join_element_wise('"', texts, f'{suffix}"', "")


def _moments(column: pa.Array) -> pa.Array:
    texts = column.cast(pa.timestamp("us")).cast(pa.string())
    return pc.replace_substring(texts, " ", "T", max_replacements=1)


def _numbers(column: pa.Array) -> pa.Array:
    """JSON has no NaN and no infinity; they are written as their names, in quotes."""
    texts = column.cast(pa.string())
    if pc.all(pc.is_finite(column)).as_py() is not False:
        return texts
    found = [None if t is None else _NOT_FINITE.get(t, t) for t in texts.to_pylist()]
    return pa.array(found, pa.string())


def from_documents(values: Sequence[bytes | None], schema: Schema) -> Documents:
    """The columns of documents. Documents that are not valid records are left out and reported.

    A `None` becomes a row of nulls: a deleted entry.
    """
    if None not in values:
        rows = _by_column(cast(Sequence[bytes], values), schema) if _is_plain(schema) else None
        if rows is None:
            rows = _by_record(values, schema)
        if rows is not None:
            return Documents(rows, [])
    return _one_by_one(values, schema)


@functools.cache
def _is_plain(schema: Schema) -> bool:
    """Whether Arrow's own reader interprets every field as msgspec does."""
    kinds = [f.type.of if isinstance(f.type, Maybe) else f.type for f in schema.fields]
    return all(
        isinstance(kind, Choice) or (isinstance(kind, Scalar) and kind.kind in _READ_KINDS)
        for kind in kinds
    )


def _by_column(values: Sequence[bytes], schema: Schema) -> pa.RecordBatch | None:
    """The documents as read by Arrow; `None` if that may not be reliable."""
    if not (_are_flat(values) or (_start_alike(values) and _are_separate(values))):
        return None
    wanted = arrow_schema(schema)
    text = b"\n".join(values)
    options = pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parsing = pyarrow.json.ParseOptions(
        explicit_schema=_with_text(schema), unexpected_field_behavior="ignore"
    )
    try:
        table = pyarrow.json.read_json(pa.BufferReader(text), options, parsing)
        if table.num_rows != len(values):
            return None
        table.validate(full=True)
        columns = []
        for field in schema.fields:
            column = _read(table.column(field.name).combine_chunks(), field.type)
            check_column(column, field.type, field.name)
            columns.append(column)
    except (pa.ArrowException, RecordError):
        return None
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def _are_flat(values: Sequence[bytes]) -> bool:
    """Whether each is a single object, or not valid at all, since there are no inner braces.

    A quick check: documents that are not flat may still be valid.
    """
    column = pa.array(values, pa.binary())
    return bool(
        pc.all(pc.starts_with(column, "{")).as_py()
        and pc.all(pc.ends_with(column, "}")).as_py()
        and pc.max(pc.count_substring(column, "{")).as_py() == 1
        and pc.max(pc.count_substring(column, "}")).as_py() == 1
        and pc.max(pc.count_substring(column, "[")).as_py() < JSON_DEPTH_MAX
    )


def _start_alike(values: Sequence[bytes]) -> bool:
    """Whether all documents start with a brace: Arrow's reader crashes on a bare null."""
    return all(value.startswith(b"{") for value in values)


def _are_separate(values: Sequence[bytes]) -> bool:
    """Whether each is JSON by itself: two invalid ones may be valid when joined.

    Documents that may be nested too deeply are not examined here.
    """
    if any(map(_may_be_deep, values)):
        return False
    try:
        found = msgspec.json.decode(b"[" + b",".join(values) + b"]", type=list[msgspec.Raw])
    except NOT_JSON:
        return False
    return len(found) == len(values) and all(
        bytes(raw) == value.strip(_SPACE) for raw, value in zip(found, values, strict=True)
    )


@functools.cache
def _with_text(schema: Schema) -> pa.Schema:
    """The columns to read, with times as text."""
    return pa.schema(
        [
            pa.field(field.name, pa.string() if _form_of(field.type) else column.type)
            for field, column in zip(schema.fields, arrow_schema(schema), strict=True)
        ]
    )


def _form_of(type_: Type) -> str | None:
    inner = type_.of if isinstance(type_, Maybe) else type_
    return _FORMS.get(inner.kind) if isinstance(inner, Scalar) else None


def _read(column: pa.Array, type_: Type) -> pa.Array:
    """Convert a column that was read. Raises `RecordError` if a time is not in its usual form."""
    form = _form_of(type_)
    if form is None:
        return column
    if pc.any(pc.invert(pc.match_substring_regex(column, form))).as_py():
        raise RecordError("a time is not in the expected format")
    return column.cast(arrow_type(type_))


def _by_record(values: Sequence[bytes | None], schema: Schema) -> pa.RecordBatch | None:
    texts = cast(Sequence[bytes], values)
    if not _are_separate(texts):
        return None
    try:
        records = _decoder(schema).decode(b"[" + b",".join(texts) + b"]")
        return codec_of_schema(schema).to_arrow(records)
    except (*NOT_JSON, RecordError):
        return None


def _one_by_one(values: Sequence[bytes | None], schema: Schema) -> Documents:
    codec = codec_of_schema(schema)
    kind = record_type(schema, strict=False)
    exact, lenient = msgspec.json.Decoder(kind), msgspec.json.Decoder(kind, strict=False)
    found: list[tuple[int, Record | None]] = []
    wrong: list[tuple[int, str]] = []
    for row, value in enumerate(values):
        try:
            # Only the lenient decoder knows names such as NaN.
            decoder = lenient if value and _NAMED.search(value) else exact
            check_depth(value or b"")
            found.append((row, None if value is None else decoder.decode(value)))
        except NOT_JSON as error:
            wrong.append((row, str(error)))
    try:
        return Documents(codec.to_arrow([record for _, record in found]), wrong)
    except RecordError:
        fitting, others = _that_fit(codec, found)
        return Documents(codec.to_arrow(fitting), sorted(wrong + others))


def _that_fit(
    codec: RecordCodec, found: Sequence[tuple[int, Record | None]]
) -> tuple[list[Record | None], list[tuple[int, str]]]:
    """Records whose values Arrow can represent, and what is wrong with the others."""
    fitting: list[Record | None] = []
    wrong: list[tuple[int, str]] = []
    for row, record in found:
        try:
            codec.to_arrow([record])
            fitting.append(record)
        except RecordError as error:
            wrong.append((row, str(error)))
    return fitting, wrong


@functools.cache
def _decoder(schema: Schema) -> msgspec.json.Decoder[list[Record]]:
    """A decoder of many documents at once; a field added later is `None` in older ones."""
    kind = types.GenericAlias(list, (record_type(schema, strict=False),))
    return cast(msgspec.json.Decoder[list[Record]], msgspec.json.Decoder(kind))


def not_json(values: Sequence[bytes | None]) -> list[tuple[int, str]]:
    """Which of these are not valid JSON, and why; `None` is accepted."""
    if _are_json([value for value in values if value is not None]):
        return []
    return [(row, why) for row, value in enumerate(values) if (why := _why_no_json(value))]


def _are_json(values: Sequence[bytes]) -> bool:
    try:
        pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return _are_separate(values)


def _why_no_json(value: bytes | None) -> str:
    try:
        if value is not None:
            value.decode()
            check_depth(value)
            msgspec.json.decode(value, type=msgspec.Raw)
    except NOT_JSON as error:
        return str(error)
    return ""


def check_depth(text: bytes) -> None:
    """Raise `msgspec.DecodeError` if JSON is nested too deeply for some readers."""
    if not _may_be_deep(text):
        return
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", text)):
        depth += 1 if bracket in b"[{" else -1
        if depth > JSON_DEPTH_MAX:
            raise msgspec.DecodeError(f"it is nested more than {JSON_DEPTH_MAX} levels deep")


def _may_be_deep(text: bytes) -> bool:
    return text.count(b"[") + text.count(b"{") > JSON_DEPTH_MAX
