"""Changelogs of sets and lists as messages whose keys say what a later message replaces.

The key of such a message is the event's key, a NUL, and what the action is about: the element of
a set, as JSON; the slot of a list; nothing for an action on the whole collection. So Kafka's
compaction, which keeps the last message of each key, keeps all that makes up the collection:
a list has a slot for each element that was added since it was last told as a whole.

A removal has no value: compaction drops it in the end, and the element with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from penstock.log.collections import LIST_SET_EVERY
from penstock.log.objects import Entries, Stream

_BETWEEN = b"\0"  # JSON has none, so the last one of a key is ours
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
    """The keys and values of messages that tell these actions."""
    kind = stream.spec.entries
    made_keys: list[bytes] = []
    values: list[bytes | None] = []
    for key, document in zip(keys, documents, strict=True):
        # Without a value a deletion would be dropped in the end, and the elements be there again.
        said = _DELETE if document is None else document
        told = _decoder.decode(said)
        made_keys.append(key + _BETWEEN + _about(kind, told))
        values.append(None if kind == "set" and told.action == "remove" else said)
    return made_keys, values


def _about(kind: Entries, told: _Told) -> bytes:
    if told.action not in ("add", "remove"):
        return b""
    if kind == "set":
        return bytes(told.value)
    # Whoever does not say where in the list it goes replaces nothing.
    slot = secrets.randbits(64) if told.index is None else told.index % LIST_SET_EVERY
    return str(slot).encode()


def event_key(key: bytes) -> bytes:
    """The key of the event; of a message of somebody else, without the rest, its own."""
    return _parted(key)[0]


def document(key: bytes, value: bytes | None) -> bytes | None:
    """The action that a message tells; `None` where it deletes the entry."""
    about = _parted(key)[1]
    if value is not None or not about:
        return value
    return b'{"action":"remove","value":' + about + b"}"


def _parted(key: bytes) -> tuple[bytes, bytes]:
    before, between, about = key.rpartition(_BETWEEN)
    return (before, about) if between else (key, b"")
