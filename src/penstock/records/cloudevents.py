"""CloudEvents 1.0, in and out: structured, batched and binary forms as plain data.

The bindings for HTTP and Kafka put these into requests and messages. The key is sent as
the extension `partitionkey` (or `partitionkeybase64` if it is not text); headers are
extension attributes, so their names are limited to what CloudEvents allows.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import re
from collections.abc import Iterable, Mapping

import msgspec

from penstock.errors import RecordError
from penstock.records.arrow import NOT_JSON
from penstock.records.event import Event, JsonValue
from penstock.records.ranges import OUT_OF_RANGE, is_in_range

SPEC_VERSION = "1.0"
STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
JSON = "application/json"
BINARY = "application/octet-stream"
HEADER_CHARS_MAX = 64

_KEY, _KEY_BASE64 = "partitionkey", "partitionkeybase64"
_RESERVED = frozenset(
    {"specversion", "id", "source", "type", "time", "data", "database64", _KEY, _KEY_BASE64}
)
_NAME = re.compile(r"[a-z0-9]+")

Data = JsonValue | bytes


def check_header(name: str, value: str) -> None:
    """Raise `RecordError` unless the header can be a CloudEvents attribute."""
    if not _NAME.fullmatch(name) or len(name) > HEADER_CHARS_MAX or name in _RESERVED:
        raise RecordError(
            f"{name!r} is not a valid header name: use 1 to {HEADER_CHARS_MAX} lower-case letters "
            f"and digits, but none of {', '.join(sorted(_RESERVED))}"
        )
    if not isinstance(value, str):
        raise RecordError(f"header {name} must be a string, not {type(value).__name__}")


def to_structured(event: Event[Data]) -> dict[str, JsonValue]:
    """The event as a JSON object in structured mode."""
    body: dict[str, JsonValue] = {"specversion": SPEC_VERSION, **_attributes(event)}
    if isinstance(event.data, bytes):
        body.setdefault("datacontenttype", BINARY)
        body["data_base64"] = base64.b64encode(event.data).decode()
    elif event.data is not None:
        body.setdefault("datacontenttype", JSON)
        body["data"] = event.data
    return body


def from_structured(body: object) -> Event[Data]:
    """The event in a structured JSON object; `RecordError` names what is missing or wrong."""
    if not isinstance(body, Mapping):
        raise RecordError("a CloudEvent must be a JSON object")
    attributes = {k: v for k, v in body.items() if k not in ("data", "data_base64")}
    data: Data = body.get("data")
    if "data_base64" in body:
        if "data" in body:
            raise RecordError("a CloudEvent may have data or data_base64, not both")
        data = _from_base64(body["data_base64"], "data_base64")
    return _event(attributes, data)


def to_batched(events: Iterable[Event[Data]]) -> list[dict[str, JsonValue]]:
    return [to_structured(event) for event in events]


def from_batched(body: object) -> list[Event[Data]]:
    if not isinstance(body, list):
        raise RecordError("a batch of CloudEvents must be a JSON array")
    return [from_structured(item) for item in body]


def to_binary(event: Event[Data]) -> tuple[dict[str, str], bytes | None]:
    """Attributes (without a prefix such as `ce-` or `ce_`) and body in binary mode."""
    attributes = {"specversion": SPEC_VERSION, **_attributes(event)}
    if event.data is None:
        return attributes, None
    if isinstance(event.data, bytes):
        attributes.setdefault("datacontenttype", BINARY)
        return attributes, event.data
    attributes.setdefault("datacontenttype", JSON)
    return attributes, msgspec.json.encode(event.data)


def from_binary(attributes: Mapping[str, str], body: bytes | None) -> Event[Data]:
    """The event with binary-mode attributes and body; JSON unless `datacontenttype` differs."""
    content = attributes.get("datacontenttype", JSON)
    if body is None or not is_json(content):
        return _event(attributes, body)
    try:
        return _event(attributes, msgspec.json.decode(body))
    except NOT_JSON as error:
        raise RecordError(f"the CloudEvent's data is not valid JSON: {error}") from None


def is_json(content_type: str) -> bool:
    media = content_type.split(";", maxsplit=1)[0].strip().lower()
    return media.endswith(("/json", "+json"))


def _attributes(event: Event[Data]) -> dict[str, str]:
    found = {"id": event.id, "source": event.source, "type": event.type}
    found["time"] = event.time.isoformat().replace("+00:00", "Z")
    if event.key is not None:
        try:
            found[_KEY] = event.key.decode()
        except UnicodeDecodeError:
            found[_KEY_BASE64] = base64.b64encode(event.key).decode()
    return {**found, **event.headers}


def _event(attributes: Mapping[str, object], data: Data) -> Event[Data]:
    texts = {name: _text(name, value) for name, value in attributes.items()}
    if texts.pop("specversion", None) != SPEC_VERSION:
        raise RecordError(f"a CloudEvent must have specversion {SPEC_VERSION}")
    for name in ("id", "source", "type"):
        if not texts.get(name):
            raise RecordError(
                f"the CloudEvent has no {name}, which is required and must not be empty"
            )
    key: bytes | None = None
    if _KEY in texts:
        key = texts.pop(_KEY).encode()
    elif _KEY_BASE64 in texts:
        key = _from_base64(texts.pop(_KEY_BASE64), _KEY_BASE64)
    event_id, source, type_ = texts.pop("id"), texts.pop("source"), texts.pop("type")
    time = _time(texts.pop("time", None))
    if texts.get("datacontenttype") in (JSON, BINARY):
        del texts["datacontenttype"]
    for name, value in texts.items():
        check_header(name, value)
    return Event(
        id=event_id, source=source, type=type_, time=time, key=key, headers=texts, data=data
    )


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise RecordError(
        f"the CloudEvent's attribute {name} must be a string, not {type(value).__name__}"
    )


def _time(text: str | None) -> dt.datetime:
    if text is None:
        return dt.datetime.now(dt.UTC)
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        raise RecordError(f"the CloudEvent's time {text!r} is not an RFC 3339 time") from None
    if time.tzinfo is None:
        raise RecordError(f"the CloudEvent's time {text!r} has no time zone: add Z or +hh:mm")
    if not is_in_range(time):
        raise RecordError(f"the CloudEvent's time {text!r} is {OUT_OF_RANGE}")
    return time.astimezone(dt.UTC)


def _from_base64(text: object, name: str) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except binascii.Error as error:
        raise RecordError(f"the CloudEvent's {name} is not valid base64: {error}") from None
