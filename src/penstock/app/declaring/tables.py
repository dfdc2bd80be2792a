"""Tables as an app declares them, and how their values are stored in the log."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, ParamSpec, TypeVar, cast

import msgspec

from penstock.app.declaring.location import Location
from penstock.app.declaring.streams import AppStream, How
from penstock.app.declaring.windows import Window, Windows
from penstock.errors import AppError
from penstock.log.declaring.objects import StreamSpec
from penstock.log.reading.collections import Collections, action_schema, element_of
from penstock.log.reading.table import unpacker
from penstock.records.arrow import codec_of, codec_of_schema
from penstock.records.event import Key, key_bytes, microseconds
from penstock.records.schema import Field, Maybe, Record, Schema, record_type, schema_of, type_of

if TYPE_CHECKING:
    from penstock.app.declaring.app import App
    from penstock.log.declaring.objects import Stream

V_co = TypeVar("V_co", covariant=True)
P = ParamSpec("P")
D = TypeVar("D")
KeyType = type[str] | type[int] | type[bytes]
RelativeTo = Literal["event", "clock"]


@dataclass(eq=False, frozen=True, kw_only=True)
class AppTable(Generic[V_co]):
    """A table of an app; made by `App.table`, `App.derive_table` or a join of tables."""

    app: App = field(repr=False)
    name: str
    key_type: KeyType
    value: object
    default: object
    spec: StreamSpec | None
    location: Location
    windows: Windows | None = None
    relative_to: RelativeTo = "event"
    public: bool = False
    key: str | tuple[str, ...] | None = None

    @property
    def changes(self) -> AppStream[object]:
        """The table's changelog as a stream, so that an agent can be called for each change."""
        record = None if self.spec is None or self.spec.record is None else self.record
        return AppStream(
            app=self.app,
            name=self.name,
            record=record,
            spec=self.spec,
            key="",
            location=self.location,
        )

    @property
    def has_default(self) -> bool:
        """Whether a key without an entry has a value: sets and lists start empty."""
        return self.default is not None or (self.spec is not None and self.spec.entries != "value")

    @property
    def record(self) -> type[Record]:
        """The class of the changelog's events."""
        if isinstance(self.value, type) and issubclass(self.value, Record):
            return self.value
        if self.spec is None or self.spec.record is None:
            raise AppError(
                f"{self.location}: the columns of table {self.name} are unknown until the app runs"
            )
        return record_type(self.spec.record)

    def join(
        self, other: AppTable[object], *, how: How = "inner", name: str | None = None
    ) -> AppTable[object]:
        """A table with the keys of both tables, updated whenever either of them changes.

        A value has two fields, named after the tables.
        """
        return self.app._join_tables(self, other, how, name)

    def key_of(self, key: bytes) -> Key:
        """A stored key as a value of the table's key type."""
        if self.key_type is bytes:
            return key
        return int(key) if self.key_type is int else key.decode()

    def __reduce__(self) -> tuple[object, ...]:
        rest = (self.spec, self.location, self.windows, self.relative_to)
        return _rebuild, (self.name, self.key_type, self.value, self.default, *rest)


@dataclass(eq=False, frozen=True, kw_only=True)
class DerivedTable(AppTable[V_co], Generic[V_co, P, D]):
    """A table as returned by its decorator: calling it calls the function, as in a test."""

    function: Callable[P, D] = field(repr=False)

    def __call__(self, *frames: P.args, **named: P.kwargs) -> D:
        return self.function(*frames, **named)


def _rebuild(
    name: str,
    key_type: KeyType,
    value: object,
    default: object,
    spec: StreamSpec | None,
    location: Location,
    windows: Windows | None,
    relative_to: RelativeTo,
) -> AppTable[object]:
    missing: App = None  # type: ignore[assignment]
    return AppTable(
        app=missing,
        name=name,
        key_type=key_type,
        value=value,
        default=default,
        spec=spec,
        location=location,
        windows=windows,
        relative_to=relative_to,
    )


def value_schema(name: str, value: object, where: Location) -> tuple[Schema, dict[str, object]]:
    """The record of the changelog for a table of such values, and the settings it needs."""
    if isinstance(value, type) and issubclass(value, Record):
        return schema_of(value), {}
    found = type_of(value, f"{where}: table {name}")
    if isinstance(found, Maybe):
        raise AppError(
            f"{where}: a value of table {name} cannot be None: declare the type without None, and "
            "delete entries that have no value"
        )
    made = "".join(part.title() for part in name.replace("-", "_").split("_")) or "Value"
    made = made if made.isidentifier() else f"Value{made}"
    collection = element_of(found)
    if collection is not None:
        entries, element = collection
        return action_schema(made, entries, element), {"entries": entries}
    return Schema(made, (Field("value", found),)), {}


def timers_table(app: App, agent: str, where: Location) -> AppTable[object]:
    """The table that holds an agent's timers; created only for agents that need it."""
    schema, settings = value_schema(f"{agent}_timers", int, where)
    spec = StreamSpec(
        name=f"{agent}_timers",
        record=schema,
        content="record",
        table=True,
        **settings,  # type: ignore[arg-type]
    )
    return AppTable(
        app=app, name=spec.name, key_type=bytes, value=int, default=0, spec=spec, location=where
    )


#: types whose values are always valid; an int can be too large, and a str may be invalid Unicode
_EXACT: dict[str, type] = {"float": float, "bool": bool}


class Values:
    """Converts the values of a table to the bytes of its entries, and back."""

    def __init__(self, table: AppTable[object], stream: Stream) -> None:
        self.collections: Collections | None = None
        self.is_plain = False
        value = table.value
        if stream.spec.entries != "value":
            self.collections = Collections.of(stream)
            self.pack: Callable[[object], bytes] = cast(
                Callable[[object], bytes], self.collections.pack
            )
            self.unpack: Callable[[bytes], object] = self.collections.unpack
        elif isinstance(value, type) and issubclass(value, Record):
            codec = codec_of(value)
            self.pack = lambda held: codec.pack(codec.validate(cast(Record, held)))
            self.unpack = codec.unpack
        elif stream.record is not None and value is not None:
            self.is_plain = True
            plain = codec_of_schema(stream.record)
            made = record_type(stream.record)
            exact = _EXACT.get(str(type_of(value, table.name)))
            encode = msgspec.msgpack.Encoder().encode

            def pack(held: object) -> bytes:
                if type(held) is exact:  # needs no check, and is much faster without
                    return encode({"value": held})
                return plain.pack(plain.validate(made(value=held)))

            self.pack = pack
            self.unpack = lambda packed: typing.cast(typing.Any, plain.unpack(packed)).value
        else:
            self.pack = _no_packing
            self.unpack = unpacker(stream)


def _no_packing(value: object) -> bytes:
    raise AppError(f"an agent cannot write a value of a derived table: {value!r}")


def window_key(key: Key, window: Window) -> bytes:
    """The key under which a windowed table stores the entry of `key` for that window."""
    return cast(bytes, key_bytes(key)) + b"@%d" % (microseconds(window.start) // 1000)


def without_window(key: bytes) -> tuple[bytes, int]:
    """A windowed table's key and the start of its window in milliseconds."""
    own, _, start = key.rpartition(b"@")
    return own, int(start)
