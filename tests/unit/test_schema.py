"""Record classes: what can be declared, and what the errors say."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
import pytest

from penstock.errors import EvolutionError, RecordError
from penstock.log.reading.collections import Collections
from penstock.records import Digits, Record, check_evolution, codec_of, schema_of
from penstock.records.arrow import conform
from penstock.records.schema import Choice, Field, Maybe, Scalar, Schema, parse_type


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


class Address(Record):
    street: str
    zip: str | None = None


class Person(Record):
    name: str
    home: Address
    colour: Colour
    level: Level
    kind: Literal["a", "b"]
    others: list[Address]


PERSON = Person("Ada", Address("x"), Colour.RED, Level.HIGH, "a", [Address("y", "z")])


def test_enums_literals_and_nested_records_survive() -> None:
    codec = codec_of(Person)
    codec.validate(PERSON)
    (back,) = codec.from_arrow(codec.to_arrow([PERSON]))
    assert back == PERSON
    assert isinstance(back, Person)
    assert back.colour is Colour.RED
    assert back.level is Level.HIGH
    assert schema_of(Person).field("colour").type == Choice(("blue", "red"))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"name": 3}, r"\$\.name"),
        ({"home": Address(3)}, r"\$\.home\.street"),  # type: ignore[arg-type]
        ({"others": [Address("a"), Address("b", 7)]}, r"\$\.others\[1\]\.zip"),  # type: ignore[arg-type]
        ({"kind": "c"}, r"\$\.kind"),
        ({"colour": "green"}, r"\$\.colour"),
        ({"level": None}, r"\$\.level"),
        ({"name": object()}, "Person"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(change: dict[str, object], path: str) -> None:
    with pytest.raises(RecordError, match=path):
        codec_of(Person).validate(msgspec.structs.replace(PERSON, **change))


def test_constraints_are_checked() -> None:
    class Paid(Record):
        amount: Annotated[float, msgspec.Meta(gt=0)]

    codec_of(Paid).validate(Paid(1.0))
    with pytest.raises(RecordError, match=r"\$\.amount"):
        codec_of(Paid).validate(Paid(-1.0))


def test_a_datetime_without_a_zone_is_refused_unless_declared() -> None:
    class At(Record):
        at: dt.datetime
        days: dict[str, list[dt.datetime]] = {}  # noqa: RUF012  msgspec copies it

    class Local(Record):
        at: Annotated[dt.datetime, msgspec.Meta(tz=False)]

    naive = dt.datetime(2026, 1, 1)
    with pytest.raises(RecordError, match=r"At\.at: .*no time zone.*datetime\.now\(UTC\)"):
        codec_of(At).validate(At(naive))
    good = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    with pytest.raises(RecordError, match=r"At\.days\['x'\]\[1\]"):
        codec_of(At).validate(At(good, {"x": [good, naive]}))
    codec = codec_of(Local)
    codec.validate(Local(naive))
    assert codec.from_arrow(codec.to_arrow([Local(naive)])) == [Local(naive)]


def test_a_decimal_that_would_be_cut_is_refused() -> None:
    class Price(Record):
        amount: Annotated[decimal.Decimal, Digits(6, 2)]

    codec = codec_of(Price)
    codec.validate(Price(decimal.Decimal("1234.56")))
    for text in ("0.001", "12345.00"):
        with pytest.raises(RecordError, match=r"Price\.amount: .*Decimal\(6, 2\)"):
            codec.validate(Price(decimal.Decimal(text)))


def test_json_is_decoded_with_its_types() -> None:
    found = codec_of(Person).from_json(
        '{"name": "A", "home": {"street": "s"}, "colour": "blue", "level": 1, "kind": "b", '
        '"others": []}'
    )
    assert found == Person("A", Address("s"), Colour.BLUE, Level.LOW, "b", [])
    for text, match in (('{"name": 1}', "name"), ("{", "not valid JSON"), ("[1]", "object")):
        with pytest.raises(RecordError, match=match):
            codec_of(Person).from_json(text)


class _HasTuple(Record):
    x: tuple[int, int]


class _HasUnion(Record):
    x: int | str


class _HasAny(Record):
    x: Any


class _HasMixed(Record):
    x: Literal["a", 1]


class _HasListKeys(Record):
    x: dict[Address, int]


class _HasBoolKeys(Record):
    value: dict[bool, int]


class _Hidden(Record):
    _x: int


class _Empty(Record):
    pass


class _Short(Record, omit_defaults=True):
    x: int = 1


class _Self(Record):
    inner: _Self | None = None


@pytest.mark.parametrize(
    "record",
    [
        _HasTuple,
        _HasUnion,
        _HasAny,
        _HasMixed,
        _HasListKeys,
        _HasBoolKeys,
        _Hidden,
        _Empty,
        _Short,
        _Self,
    ],
)
def test_what_cannot_be_stored_is_refused_when_declared(record: type[Record]) -> None:
    with pytest.raises(RecordError, match=record.__name__):
        schema_of(record)


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ({"name": pa.array([1])}, "name.*int64, not str"),
        ({"colour": pa.array(["green"])}, "colour.*green"),
        ({"level": pa.array([2])}, "level"),
        ({"others": pa.array([[{"street": None, "zip": None}]])}, "others.*street.*nulls"),
        ({"home": pa.array([{"street": "x"}])}, None),
        ({"name": pa.array(["x"]).dictionary_encode()}, None),
        ({"level": pa.array([5], pa.int8())}, None),
        ({"kind": pa.array([b"a"])}, "kind"),
    ],
)
def test_columns_are_checked_like_records(column: dict[str, pa.Array], match: str | None) -> None:
    batch = codec_of(Person).to_arrow([PERSON])
    columns = {name: batch.column(name) for name in batch.schema.names} | column
    given = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    if match is None:
        assert conform(given, schema_of(Person)).schema.names == batch.schema.names
    else:
        with pytest.raises(RecordError, match=match):
            conform(given, schema_of(Person))


@pytest.mark.parametrize("text", ["", "no uuid", "{}0", "urn:uuid:{}"])
def test_a_column_of_uuids_holds_nothing_else(text: str) -> None:
    class Named(Record):
        id: uuid.UUID | None

    good = str(uuid.uuid4())
    given = pa.RecordBatch.from_pydict({"id": [good, text.format(good), None]})
    with pytest.raises(RecordError, match="which is not uuid"):
        conform(given, schema_of(Named))
    (first, second) = codec_of(Named).from_arrow(conform(given.take([0, 2]), schema_of(Named)))
    assert (str(first.id), second.id) == (good, None)  # type: ignore[attr-defined]


def test_the_order_of_choices_does_not_matter() -> None:
    one, other = (parse_type(text, {}) for text in ("Literal['b', 'a']", "Literal['a', 'b']"))
    assert one == other == Choice(("a", "b"))


def test_evolution_reaches_into_nested_records() -> None:
    class Address2(Record):
        street: str
        zip: str | None = None
        city: str | None = None

    old = schema_of(Person)
    inner = schema_of(Address2)
    new = msgspec.structs.replace(
        old,
        fields=tuple(
            msgspec.structs.replace(f, type=inner) if f.name == "home" else f for f in old.fields
        ),
    )
    check_evolution(old, new)
    with pytest.raises(EvolutionError, match=r"home\.city was removed"):
        check_evolution(new, old)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Decimal(10, 2)", "Decimal(12, 2)"),
        ("date", "datetime"),
        ("Literal['a', 'b']", "Literal['a', 'b', 'c']"),
        ("str", "str | None"),
        ("str | None", "str"),
        ("list[int]", "list[float]"),
        ("list[int]", "set[int]"),
        ("dict[str, int]", "dict[int, int]"),
        ("dict[str, int]", "dict[str, str]"),
    ],
)
def test_no_field_becomes_of_another_type(old: str, new: str) -> None:
    before, after = (Schema("R", (Field("x", parse_type(text, {})),)) for text in (old, new))
    check_evolution(before, before)
    with pytest.raises(EvolutionError, match="changed from"):
        check_evolution(before, after)


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("str", Scalar("str")),
        ("str | None", Maybe(Scalar("str"))),
        ("Decimal(10, 2)", Digits(10, 2)),
        ("Literal['a', 'b']", Choice(("a", "b"))),
        ("UUID", Scalar("uuid")),
    ],
)
def test_types_are_written_as_in_python(text: str, type_: object) -> None:
    assert parse_type(text, {}) == type_


@pytest.mark.parametrize(
    "text", ["", "string", "list", "list[", "str | int", "__import__('os')", "Decimal(99, 1)", "1"]
)
def test_other_texts_are_no_types(text: str) -> None:
    with pytest.raises(RecordError, match="not a type"):
        parse_type(text, {})


class Tags(Record):
    tags: set[int]


def test_equal_sets_are_packed_alike() -> None:
    """However they came about: entries are compared by their bytes."""
    codec = codec_of(Tags)
    one, other = set(), set()
    for n in range(0, 64, 8):
        one.add(n)
    for n in range(56, -1, -8):
        other.add(n)
    assert one == other
    assert list(one) != list(other)
    assert codec.pack(Tags(one)) == codec.pack(Tags(other))


class Numbers(Record):
    some: list[int]
    others: set[int] = msgspec.field(default_factory=set)


@pytest.mark.parametrize("wrong", [1 << 63, -(1 << 63) - 1])
def test_one_of_many_integers_that_does_not_fit_is_named(wrong: int) -> None:
    codec = codec_of(Numbers)
    codec.validate(Numbers([], set()))
    codec.validate(Numbers([(1 << 63) - 1, -(1 << 63)], set(range(1000))))
    with pytest.raises(RecordError, match=rf"some\[2\]: {wrong} does not fit"):
        codec.validate(Numbers([1, 2, wrong]))
    with pytest.raises(RecordError, match=f"{wrong} does not fit"):
        codec.validate(Numbers([1], {5, wrong}))


@pytest.mark.parametrize("kind", ["set", "list"])
def test_a_collection_from_the_log_is_packed_as_one_that_was_checked(
    kind: Literal["set", "list"],
) -> None:
    collections = Collections(kind, Scalar("float"))
    stored = collections.unpack(collections.pack([1.5, 2.0]))
    assert collections.pack_stored(stored) == collections.pack(stored)
