"""Tables of sets and lists: the changelog has actions, an entry is the whole collection.

An event of such a changelog says what was done to the collection of its key: `add` or
`remove` of one `value`, `set` to all of `values`, or `delete`. An element added to a list goes to
its end, at `index`. A reader of a compacted log need not know what came before, since a list is
written as a whole from time to time. The writer also supplies the whole collection, packed, for
the entry; so nobody has to replay actions to read an entry.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import cast

import msgspec

from penstock.errors import UsageError
from penstock.log.declaring.objects import EntriesKind, Stream
from penstock.records.arrow import codec_of_schema
from penstock.records.schema import (
    Choice,
    Field,
    ListOf,
    Maybe,
    Scalar,
    Schema,
    SetOf,
    Type,
    record_type,
)

LIST_SET_EVERY = 64
"""A list that has grown to a multiple of this length is written as a whole, so that its
changelog can be compacted."""

Collection = set[object] | list[object]


class Action(msgspec.Struct, frozen=True):
    """One change of a collection; `value` is used by add and remove, `values` by set."""

    action: str
    value: object = None
    values: list[object] | None = None
    index: int | None = None


def action_schema(name: str, kind: EntriesKind, element: Type) -> Schema:
    """The record of a changelog of actions on collections of `element`."""
    actions = Choice(("add", "delete", "remove", "set"))
    fields = (
        Field("action", actions),
        Field("value", Maybe(element)),
        Field("values", Maybe(ListOf(element))),
    )
    index = Field("index", Maybe(Scalar("int")))
    return Schema(name, fields if kind == "set" else (*fields, index))


class Collections:
    """Packs collections for entries, and finds the actions between two of them."""

    def __init__(self, kind: EntriesKind, element: Type) -> None:
        self.kind = kind
        held = SetOf(element) if kind == "set" else ListOf(element)
        schema = Schema("Collection", (Field("values", held),))
        self._codec = codec_of_schema(schema)
        self._made = record_type(schema)

    @staticmethod
    def of(stream: Stream) -> Collections:
        """The collections of the table whose changelog the stream is."""
        field = stream.record.field("value") if stream.record else None
        if field is None or not isinstance(field.type, Maybe) or stream.spec.entries == "value":
            raise UsageError(f"stream {stream.name} is not a changelog of sets or lists")
        return _collections(stream.spec.entries, field.type.of)

    def empty(self) -> Collection:
        return set() if self.kind == "set" else []

    def pack(self, collection: Iterable[object]) -> bytes:
        """Pack a collection. Raises `RecordError` if an element is not of the table's type."""
        held = set(collection) if self.kind == "set" else list(collection)
        return self._codec.pack(self._codec.validate(self._made(values=held)))

    def pack_stored(self, collection: Collection) -> bytes:
        """Pack a collection whose elements come from the log, which has checked each."""
        return self._codec.pack(self._made(values=collection))

    def unpack(self, packed: bytes) -> Collection:
        return cast(Collection, self._codec.unpack(packed).values)  # type: ignore[attr-defined]

    def actions(self, old: Collection | None, new: Collection | None) -> list[Action]:
        """The actions that turn `old` into `new`, in an order that can be replayed."""
        if new is None:
            return [] if old is None else [Action("delete")]
        if isinstance(new, set):
            before = set(old or ())
            gone = [Action("remove", value) for value in _sort(before - new)]
            made = [Action("add", value) for value in _sort(new - before)]
            return gone + made or ([Action("set", None, [])] if old is None else [])
        before_list = list(old or ())
        added = new[len(before_list) :]
        is_whole = len(added) > 0 and len(new) % LIST_SET_EVERY < len(added)
        is_longer = new[: len(before_list)] == before_list and (old is not None or len(added) > 0)
        if is_longer and not is_whole:
            places = enumerate(added, len(before_list))
            return [Action("add", value, index=index) for index, value in places]
        return [Action("set", None, list(new))]


def replay(kind: EntriesKind, collection: Collection | None, action: Action) -> Collection | None:
    """The collection after an action."""
    if action.action == "delete":
        return None
    if action.action == "set":
        return set(action.values or ()) if kind == "set" else list(action.values or ())
    made: Collection = (
        set(collection or ()) if kind == "set" else list(cast(list[object], collection or []))
    )
    if isinstance(made, set):
        (made.add if action.action == "add" else made.discard)(action.value)
    elif action.action == "add":
        made.append(action.value)
    else:
        made.remove(action.value)
    return made


def _sort(values: set[object]) -> list[object]:
    return sorted(values, key=repr)


@functools.cache
def _collections(kind: EntriesKind, element: Type) -> Collections:
    return Collections(kind, element)


def element_of(type_: Type) -> tuple[EntriesKind, Type] | None:
    """Whether a table's value is a set or a list, and of what."""
    match type_:
        case SetOf(item=item):
            return "set", item
        case ListOf(item=item):
            return "list", item
    return None
