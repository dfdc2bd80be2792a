"""Any record, of any type that can be declared, survives Arrow, JSON and msgpack."""

from __future__ import annotations

import datetime as dt
import decimal
import string
import uuid
from typing import Annotated

import hypothesis.strategies as st
import msgspec
import pyarrow as pa
from hypothesis import given, settings

from penstock.log.batch import decode_blob, encode_blob
from penstock.records import schema as schemas
from penstock.records.arrow import RecordCodec, arrow_type, codec_of, codec_of_schema, conform
from penstock.records.cloudevents import (
    from_batched,
    from_binary,
    from_structured,
    to_batched,
    to_binary,
    to_structured,
)
from penstock.records.documents import from_documents, to_documents
from penstock.records.event import Event
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
    record_type,
    schema_of,
)

utc_times = st.datetimes(timezones=st.just(dt.UTC))
SCALARS: dict[str, st.SearchStrategy[object]] = {
    "bool": st.booleans(),
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "str": st.text(max_size=8),
    "bytes": st.binary(max_size=8),
    "datetime": utc_times,
    "naive_datetime": st.datetimes(),
    "date": st.dates(),
    "uuid": st.uuids(),
}
names = st.text(string.ascii_lowercase, min_size=1, max_size=6).filter(
    lambda name: name.isidentifier() and not __import__("keyword").iskeyword(name)
)
choices = st.one_of(
    st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(-5, 5), min_size=1, max_size=4, unique=True),
).map(lambda values: Choice(tuple(sorted(values))))
digits = st.integers(1, 38).flatmap(
    lambda precision: st.integers(0, precision).map(lambda scale: Digits(precision, scale))
)
single = st.one_of(
    st.sampled_from([Scalar(kind) for kind in SCALARS]),  # type: ignore[arg-type]
    choices,
    digits,
)
keys = single.filter(lambda type_: type_ != Scalar("bool"))


def plain_types(inner: st.SearchStrategy[Type]) -> st.SearchStrategy[Type]:
    return st.one_of(
        inner.map(ListOf),
        single.map(SetOf),
        st.tuples(keys, inner).map(lambda pair: DictOf(*pair)),
        inner.filter(lambda t: not isinstance(t, Maybe)).map(Maybe),
        records_of(inner),
    )


def records_of(inner: st.SearchStrategy[Type]) -> st.SearchStrategy[Schema]:
    fields = st.lists(st.tuples(names, inner), min_size=1, max_size=4, unique_by=lambda f: f[0])
    return fields.map(lambda found: Schema("Made", tuple(Field(*field) for field in found)))


types = st.recursive(single, plain_types, max_leaves=6)
record_schemas = records_of(types)


def values_of(type_: Type) -> st.SearchStrategy[object]:
    match type_:
        case Scalar(kind=kind):
            return SCALARS[kind]
        case Choice(values=values):
            return st.sampled_from(values)
        case Digits(precision=precision, scale=scale):
            most = 10**precision - 1
            return st.integers(-most, most).map(
                lambda n: decimal.Decimal(n).scaleb(-scale, decimal.Context(prec=60))
            )
        case ListOf(item=item):
            return st.lists(values_of(item), max_size=3)
        case SetOf(item=item):
            return st.sets(values_of(item), max_size=3)
        case DictOf(key=key, value=value):
            return st.dictionaries(values_of(key), values_of(value), max_size=3)
        case Maybe(of=of):
            return st.none() | values_of(of)
        case Schema(fields=fields):
            made = {field.name: values_of(field.type) for field in fields}
            return st.builds(record_type(type_), **made)


@st.composite
def records(draw: st.DrawFn) -> tuple[Schema, list[Record]]:
    schema = draw(record_schemas)
    found = draw(st.lists(values_of(schema), max_size=4))
    return schema, found  # type: ignore[return-value]


@settings(max_examples=300, deadline=None)
@given(records())
def test_any_record_survives_arrow(case: tuple[Schema, list[Record]]) -> None:
    schema, found = case
    codec = codec_of_schema(schema)
    for record in found:
        codec.validate(record)
    batch = codec.to_arrow(found)
    assert batch.schema.types == [arrow_type(field.type) for field in schema.fields]
    assert codec.from_arrow(batch) == found
    for compression in ("none", "lz4", "zstd"):
        stored = decode_blob(encode_blob(batch, compression))
        assert codec.from_arrow(stored) == found
    assert conform(batch, schema).equals(batch)


@settings(max_examples=300, deadline=None)
@given(records())
def test_any_record_survives_json_by_the_column(case: tuple[Schema, list[Record]]) -> None:
    """Among many and alone: which way a document is read must not depend on its neighbours."""
    schema, found = case
    codec = codec_of_schema(schema)
    documents = to_documents(codec.to_arrow(found), schema).to_pylist()
    for some in (documents, *([one] for one in documents)):
        rows, wrong = from_documents(some, schema)
        assert not wrong
        again = codec.from_arrow(rows)
        assert again == (found if len(some) != 1 else [found[documents.index(some[0])]])


@settings(max_examples=200, deadline=None)
@given(records())
def test_any_record_survives_packing(case: tuple[Schema, list[Record]]) -> None:
    schema, found = case
    codec = codec_of_schema(schema)
    for record in found:
        assert codec.unpack(codec.pack(record)) == record


@settings(max_examples=200, deadline=None)
@given(record_schemas)
def test_any_schema_survives_json_and_its_class(schema: Schema) -> None:
    assert schemas.decode(schemas.encode(schema)) == schema
    assert schema_of(record_type(schema)) == schema


@settings(max_examples=200, deadline=None)
@given(types)
def test_any_type_without_records_survives_its_text(type_: Type) -> None:
    text = str(type_)
    if "Made" not in text:
        assert schemas.parse_type(text, {}) == type_


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
words = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=10)
reserved = {"specversion", "id", "source", "type", "time", "data", "partitionkey", "database64"}
events = st.builds(
    Event,
    data=json_values.filter(lambda v: v is not None) | st.binary(max_size=10),
    id=st.text(min_size=1, max_size=10),
    type=st.text(min_size=1, max_size=10),
    source=st.text(min_size=1, max_size=10),
    time=utc_times,
    key=st.none() | st.binary(min_size=1, max_size=6),
    headers=st.dictionaries(
        words.filter(lambda w: w not in reserved and w != "datacontenttype"), st.text(max_size=5)
    ),
)


@settings(max_examples=300, deadline=None)
@given(events)
def test_any_event_survives_cloudevents(event: Event[object]) -> None:
    structured = to_structured(event)  # type: ignore[arg-type]
    over_the_wire = msgspec.json.decode(msgspec.json.encode(structured))
    assert from_structured(over_the_wire) == event
    assert from_batched(to_batched([event, event])) == [event, event]  # type: ignore[list-item]
    assert from_binary(*to_binary(event)) == event  # type: ignore[arg-type]


class Everything(Record):
    """One field of each type, as a person would write them."""

    number: int
    text: str
    flag: bool
    ratio: float
    raw: bytes
    at: dt.datetime
    day: dt.date
    price: Annotated[decimal.Decimal, Digits(10, 2)]
    key: uuid.UUID
    tags: set[str]
    lines: list[dict[str, int | None]]
    maybe: list[uuid.UUID] | None = None


def test_a_record_of_everything() -> None:
    value = Everything(
        number=-1, text="straße", flag=True, ratio=float("inf"), raw=b"\x00",
        at=dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=5))),
        day=dt.date(1, 1, 1), price=decimal.Decimal("12345678.90"), key=uuid.UUID(int=7),
        tags={"b", "a"}, lines=[{"x": None, "y": 2}, {}], maybe=[uuid.UUID(int=1)],
    )  # fmt: skip
    codec: RecordCodec = codec_of(Everything)
    codec.validate(value)
    batch = codec.to_arrow([value])
    assert codec.from_arrow(batch) == [value]
    assert isinstance(codec.from_arrow(batch)[0], Everything)
    assert pa.types.is_decimal(batch.schema.field("price").type)
