"""Changelogs of sets and lists as messages, whose keys decide what a later message replaces.

The key of such a message is the event's key, a NUL, and what the action applies to: the element
of a set, as JSON; the slot of a list; nothing for an action on the whole collection. So Kafka's
compaction, which keeps the last message of each key, keeps everything that makes up the
collection: a list has a slot for each element added since it was last written as a whole.

A removal has no value: compaction eventually drops it, and the element with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from penstock.log.declaring.objects import EntriesKind, Stream
from penstock.log.reading.collections import LIST_SET_EVERY

_BETWEEN = b"\0"  # JSON contains none, so the last one in a key is ours
_DELETE = b'{"action":"delete"}'


class _Told(msgspec.Struct):
    action: str = ""
    value: msgspec.Raw = msgspec.Raw(b"")
    index: int | None = None


_decoder = msgspec.json.Decoder(_Told)


def tells_actions(stream: Stream) -> bool:
    return stream.spec.entries != "value"


def to_messages(
    stream: Stream, keys: Sequence[bytes], documents: Sequence[bytes | None]
) -> tuple[list[bytes], list[bytes | None]]:
    """The keys and values of the messages for these actions."""
    kind = stream.spec.entries
    made_keys: list[bytes] = []
    values: list[bytes | None] = []
    for key, document in zip(keys, documents, strict=True):
        # A deletion without a value would eventually be dropped, and the elements reappear.
        said = _DELETE if document is None else document
        told = _decoder.decode(said)
        made_keys.append(key + _BETWEEN + _about(kind, told))
        values.append(None if kind == "set" and told.action == "remove" else said)
    return made_keys, values


def _about(kind: EntriesKind, told: _Told) -> bytes:
    if told.action not in ("add", "remove"):
        return b""
    if kind == "set":
        return bytes(told.value)
    # An action without a slot in the list replaces nothing.
    slot = secrets.randbits(64) if told.index is None else told.index % LIST_SET_EVERY
    return str(slot).encode()


def event_key(key: bytes) -> bytes:
    """The key of the event; for another client's message, without the suffix, its own key."""
    return _split_key(key)[0]


def document(key: bytes, value: bytes | None) -> bytes | None:
    """The action that a message stands for; `None` if it deletes the entry."""
    about = _split_key(key)[1]
    if value is not None or not about:
        return value
    return b'{"action":"remove","value":' + about + b"}"


def _split_key(key: bytes) -> tuple[bytes, bytes]:
    before, between, about = key.rpartition(_BETWEEN)
    return (before, about) if between else (key, b"")
