"""Streams as an app declares and uses them: handles without data."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, ParamSpec, TypeVar

import msgspec

from penstock.app.declaring.location import Location
from penstock.app.declaring.windows import Duration
from penstock.log.declaring.objects import StreamSpec
from penstock.log.writing.compose import EventOptions
from penstock.records.event import Key
from penstock.records.schema import Record

if TYPE_CHECKING:
    from penstock.app.declaring.app import App
    from penstock.app.declaring.tables import AppTable

T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
D = TypeVar("D")
How = Literal["inner", "left", "right", "outer"]
OnError = Literal["stop", "skip", "dead-letter"]
OnGone = Literal["stop", "skip"]


class Emit(msgspec.Struct, frozen=True):
    """An event to be sent to a stream, with parts of its envelope besides the data."""

    stream: str
    data: object
    options: EventOptions


@dataclass(eq=False, frozen=True, kw_only=True)
class AppStream(Generic[T_co]):
    """A stream of an app; made by `App.stream`, a derivation or a join.

    `spec` is `None` for a stream that a DataFrame function derives without naming a record: its
    columns are known only once Spark has analyzed the function.
    """

    app: App = field(repr=False)
    name: str
    record: type[Record] | None
    spec: StreamSpec | None
    key: str | None
    time: str | None = None
    watermark_us: int | None = None
    on_damage: OnError = "stop"
    on_gone: OnGone = "stop"
    location: Location
    settings: Mapping[str, object] = field(default_factory=dict)

    def new(
        self,
        data: T_co,  # type: ignore[misc]  # an argument, though the class is covariant
        *,
        key: Key | None = None,
        id: str | None = None,  # noqa: A002  the word of the envelope
        time: dt.datetime | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Emit:
        """An event for an agent to yield, with a key, id, time or headers of its own."""
        return Emit(self.name, data, EventOptions(key=key, id=id, time=time, headers=headers))

    def group_by(self, field: str, name: str | None = None) -> AppStream[T_co]:
        """The same events with another key, as a new stream that is partitioned by `field`."""
        return self.app._group_by(self, field, name)

    def through(self, name: str, *, partitions: int | None = None) -> AppStream[T_co]:
        """The same events copied to a new stream, which may have another number of partitions."""
        return self.app._through(self, name, partitions)

    def lookup(
        self,
        table: AppTable[object] | AppStream[object],
        *,
        how: Literal["left", "inner"] = "left",
        name: str | None = None,
    ) -> AppStream[object]:
        """Each event with the entry of its key in the table, as a field with the table's name.

        The table may be a stream that was declared with `table=True`. `how="inner"` omits events
        whose key has no entry.
        """
        return self.app._lookup(self, table, how, name)

    def join(
        self,
        other: AppStream[object],
        *,
        on: str,
        within: Duration,
        how: How = "inner",
        name: str | None = None,
    ) -> AppStream[object]:
        """Pairs of events that agree in the field `on` and are at most `within` apart in time.

        In an outer join, an event without a partner appears once the watermark rules out that one
        can still arrive.
        """
        return self.app._join(self, other, on, within, how, name)

    def __reduce__(self) -> tuple[object, ...]:
        # Agents refer to streams: send the handle to a worker with them, not the whole app.
        return _rebuild, (self.name, self.record, self.key, self.location)


@dataclass(eq=False, frozen=True, kw_only=True)
class DerivedStream(AppStream[T_co], Generic[T_co, P, D]):
    """A stream as returned by its decorator: calling it calls the function, as in a test."""

    function: Callable[P, D] = field(repr=False)

    def __call__(self, *frames: P.args, **named: P.kwargs) -> D:
        return self.function(*frames, **named)


def _rebuild(
    name: str, record: type[Record] | None, key: str | None, location: Location
) -> AppStream[object]:
    missing: App = None  # type: ignore[assignment]
    return AppStream(app=missing, name=name, record=record, spec=None, key=key, location=location)
