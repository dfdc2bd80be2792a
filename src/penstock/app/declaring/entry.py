"""An agent's access to its table: the entry of its event's key, and of no other key."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.app.declaring.windows import Duration, Window, Windows, duration_us
from penstock.records.event import Key

V = TypeVar("V")


class Entry(Generic[V]):
    """The value of one key. Set `value`, or change it in place; it is saved with the batch.

    In a test, an entry can be made directly: `Entry({"apple"})`.
    """

    __slots__ = ("is_deleted", "key", "value")

    def __init__(self, value: V, key: Key | None = None) -> None:
        self.value = value
        self.key = key
        self.is_deleted = False

    def delete(self) -> None:
        """Remove the entry from the table, unless a value is set afterwards."""
        self.is_deleted = True
        self.value = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Entry({self.value!r}, key={self.key!r})"


class WindowedEntry(Generic[V]):
    """The entries of one key, one for each window of time.

    `current()` is the entry of the event's window (or of the clock's, if the table is relative to
    the clock), `now()` always that of the clock's window, and `delta(length)` that of the window
    `length` before the current time. With hopping windows, each of these is the latest of several;
    `windows()` returns all of those that hold the event.
    """

    __slots__ = ("_clock", "_find", "_time", "_windows", "key")

    def __init__(
        self,
        windows: Windows,
        find: Callable[[Window], Entry[V]],
        time: dt.datetime,
        clock: dt.datetime,
        key: Key | None = None,
    ) -> None:
        self._windows = windows
        self._find = find
        self._time = time
        self._clock = clock
        self.key = key

    def current(self) -> Entry[V]:
        return self._at(self._time)

    def now(self) -> Entry[V]:
        return self._at(self._clock)

    def delta(self, length: Duration) -> Entry[V]:
        return self._at(self._time - dt.timedelta(microseconds=duration_us(length, "the delta")))

    def windows(self) -> list[tuple[Window, Entry[V]]]:
        """Every window that holds the event, the latest first."""
        return [(window, self._find(window)) for window in self._windows.containing(self._time)]

    def _at(self, time: dt.datetime) -> Entry[V]:
        return self._find(self._windows.containing(time)[0])
