"""CloudEvents 1.0: the forms as the specification shows them, and what is refused."""

from __future__ import annotations

import datetime as dt

import pytest

from penstock.errors import RecordError
from penstock.records.cloudevents import (
    from_batched,
    from_binary,
    from_structured,
    to_binary,
    to_structured,
)
from penstock.records.event import Event

EVENT: Event[object] = Event(
    data={"a": 1}, id="1", source="/shop", type="order.placed", key=b"ada",
    time=dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC), headers={"subject": "x"},
)  # fmt: skip


@pytest.mark.row("H12")
def test_the_structured_form() -> None:
    assert to_structured(EVENT) == {  # type: ignore[arg-type]
        "specversion": "1.0", "id": "1", "source": "/shop", "type": "order.placed",
        "time": "2026-01-02T03:04:05Z", "partitionkey": "ada", "subject": "x",
        "datacontenttype": "application/json", "data": {"a": 1},
    }  # fmt: skip


@pytest.mark.row("H12")
def test_the_binary_form() -> None:
    attributes, body = to_binary(EVENT)  # type: ignore[arg-type]
    assert body == b'{"a":1}'
    assert attributes["datacontenttype"] == "application/json"
    assert "data" not in attributes


def test_events_of_others_are_understood() -> None:
    found = from_structured(
        {
            "specversion": "1.0", "type": "t", "source": "s", "id": "i",
            "time": "2026-01-02T05:04:05.5+02:00", "dataschema": "http://x", "count": 7,
            "flag": True, "datacontenttype": "text/xml", "data_base64": "AAE=",
        }
    )  # fmt: skip
    assert found.data == b"\x00\x01"
    assert found.time == dt.datetime(2026, 1, 2, 3, 4, 5, 500000, tzinfo=dt.UTC)
    assert found.headers == {
        "dataschema": "http://x", "count": "7", "flag": "true", "datacontenttype": "text/xml",
    }  # fmt: skip
    assert from_structured(to_structured(found)) == found
    bare = from_structured({"specversion": "1.0", "type": "t", "source": "s", "id": "i"})
    assert bare.data is None


GOOD = {"specversion": "1.0", "type": "t", "source": "s", "id": "i"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"specversion": "0.3"}, "specversion"),
        ({"id": ""}, "no id"),
        ({"source": None}, "source"),
        ({"time": "yesterday"}, "RFC 3339"),
        ({"time": "2026-01-01T00:00:00"}, "time zone"),
        ({"time": "9999-12-31T23:59:59-05:00"}, "outside the years"),
        ({"data": 1, "data_base64": "AA=="}, "not both"),
        ({"data_base64": "%"}, "base64"),
        ({"Bad-Name": "x"}, "header name"),
        ({"nested": {}}, "nested"),
    ],
)
def test_wrong_events_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(RecordError, match=match):
        from_structured({**GOOD, **change})


def test_other_shapes_are_refused() -> None:
    shapes: list[object] = [[], "x", None]
    for body in shapes:
        with pytest.raises(RecordError, match="JSON object"):
            from_structured(body)
    with pytest.raises(RecordError, match="JSON array"):
        from_batched({})
    with pytest.raises(RecordError, match="not valid JSON"):
        from_binary(GOOD, b"{")
    with pytest.raises(RecordError, match="not valid JSON"):
        from_binary(GOOD, b"[" * 5000 + b"]" * 5000)
