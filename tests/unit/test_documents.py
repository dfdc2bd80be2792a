"""JSON documents of others: what is a record, what is not, and that neighbours do not matter."""

from __future__ import annotations

import datetime as dt
import math

import pytest

from penstock import Record
from penstock.records.arrow import codec_of
from penstock.records.documents import JSON_DEPTH_MAX, from_documents, not_json, to_documents
from penstock.records.schema import schema_of


class Reading(Record):
    n: int
    at: dt.datetime
    day: dt.date | None = None
    note: str | None = None


GOOD = b'{"n": 1, "at": "2026-01-02T03:04:05Z"}'
WRONG = [
    b"null",
    b"",
    b"[]",
    b"no json",
    b'{"n": 1}',
    b'{"n": 1.5, "at": "2026-01-02T03:04:05Z"}',
    b'{"n": 9223372036854775808, "at": "2026-01-02T03:04:05Z"}',
    b'{"n": "1", "at": "2026-01-02T03:04:05Z"}',
    b'{"n": 1, "at": "2026-01-02"}',
    b'{"n": 1, "at": "2026-01-02T03:04:05"}',
    b'{"n": 1, "at": "2026-01-02T03:04Z"}',
    b'{"n": 1, "at": "2026-01-02T03:04:05+02"}',
    b'{"n": 1, "at": "2026-01-02T03:04:05Z", "day": 19000}',
    b'{"n": 1, "at": "2026-01-02T03:04:05Z", "note": "\xff"}',
    GOOD + GOOD,
    GOOD + b"}",
    b'{"n": 1, "at": "9999-12-31T23:59:59-05:00"}',
    b'{"n": 1, "at": "0001-01-01T00:00:00+23:00"}',
    b'{"n": 1, "at": "2026-01-02T03:04:05Z", "x": ' + b"[" * 2000 + b"]" * 2000 + b"}",
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_record_is_told_wherever_it_stands(wrong: bytes) -> None:
    schema = schema_of(Reading)
    for values, row in (([wrong], 0), ([wrong, GOOD], 0), ([GOOD, wrong], 1)):
        rows, told = from_documents(values, schema)
        assert [number for number, _ in told] == [row]
        assert rows.num_rows == len(values) - 1


@pytest.mark.parametrize(
    "document",
    [
        GOOD,
        b'\n {"n": 1, "at": "2026-01-02T03:04:05Z"}',
        b'{"at": "2026-01-02T05:04:05+02:00",\n "n": 1, "unknown": [1]}',
        b'{"n": 1, "at": "2026-01-02T03:04:05.000000Z", "note": null}',
    ],
)
def test_a_record_may_be_written_in_other_ways(document: bytes) -> None:
    rows, told = from_documents([document, GOOD], schema_of(Reading))
    assert not told
    wanted = Reading(1, dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC))
    assert codec_of(Reading).from_arrow(rows) == [wanted, wanted]


class Numbers(Record):
    one: float
    many: list[float]
    named: dict[str, float]


def test_what_is_no_number_keeps_its_name_also_inside() -> None:
    codec = codec_of(Numbers)
    sent = Numbers(math.nan, [1.0, math.inf], {"a": -math.inf})
    documents = to_documents(codec.to_arrow([sent]), schema_of(Numbers)).to_pylist()
    rows, told = from_documents(documents, schema_of(Numbers))
    (found,) = codec.from_arrow(rows)
    assert not told
    assert isinstance(found, Numbers)
    assert math.isnan(found.one)
    assert (found.many, found.named) == ([1.0, math.inf], {"a": -math.inf})


class Count(Record):
    n: int


class Nested(Record):
    n: int
    names: list[str] | None = None
    inner: dict[str, int] | None = None


#: as many records as messages, if they are joined before they are looked at
MENDED = [
    [b'{"n": 1, "x": {}', b'{"y": 2}}, {"n": 2}', b'{"n": 3}'],
    [b'{"n": 1, "x": [{}', b"{}]}", b'{"n": 2}', b'{"n": 3}, {"n": 4}'],
    [b'{"n": 1, "x":', b'{"y": 2}} {"n": 3}'],
    [b'{"n": 1}, {"n": 2', b'"x": 3}'],
    [b'{"n": 1, "x": "}', b'{", "y": 2} {"n": 3}'],
]


@pytest.mark.parametrize("values", MENDED)
@pytest.mark.parametrize("record", [Count, Nested])
def test_a_broken_message_is_not_mended_by_its_neighbour(
    values: list[bytes], record: type[Record]
) -> None:
    schema = schema_of(record)
    alone = [not from_documents([value], schema).wrong for value in values]
    rows, told = from_documents(values, schema)
    assert rows.num_rows == sum(alone)
    assert [row for row, _ in told] == [row for row, good in enumerate(alone) if not good]
    assert [row for row, _ in not_json(values)] == [
        row for row, value in enumerate(values) if not_json([value])
    ]
    assert not_json(values)


def test_json_that_is_nested_too_deep_is_told() -> None:
    deep = b"[" * (JSON_DEPTH_MAX + 1) + b"]" * (JSON_DEPTH_MAX + 1)
    wide = b"[" + b",".join([b'{"[": []}'] * JSON_DEPTH_MAX) + b"]"
    assert not_json([wide, b"[]", deep]) == [(2, "it is nested more than 200 levels deep")]
    assert [row for row, _ in not_json([b"[]", b"[" * 5000 + b"]" * 5000])] == [1]
