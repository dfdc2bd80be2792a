"""Streams filled from this process: an iterable, or a channel that a program sends into."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from penstock.app.definitions import Feed
from penstock.app.positions import Position, progress_key, saved_position
from penstock.app.query import Step
from penstock.app.streams import Emit
from penstock.errors import ClosedError
from penstock.log.api import Log
from penstock.log.compose import EventOptions
from penstock.log.transaction import Transaction

T = TypeVar("T")
FEED_ROWS_MAX = 1000
CHANNEL_ROWS_MAX = 10_000


class Channel(Generic[T]):
    """A queue inside this process that an app reads as a stream: `app.feed(channel, to=orders)`.

    Holds at most `rows_max` events, then `send` waits. What is in it is lost with the process:
    use a `Producer` for what must not be.
    """

    def __init__(self, rows_max: int = CHANNEL_ROWS_MAX) -> None:
        self._queue: queue.Queue[T] = queue.Queue(rows_max)
        self._closed = threading.Event()

    def send(self, data: T, timeout_s: float = 30.0) -> None:
        """Raises `queue.Full` where nobody reads for that long."""
        if self._closed.is_set():
            raise ClosedError("the channel is closed")
        self._queue.put(data, timeout=timeout_s)

    def close(self) -> None:
        """No more will come; what was sent before is still read."""
        self._closed.set()

    def take(self, rows_max: int, timeout_s: float) -> list[T] | None:
        """What is there, after waiting for something; `None` when it is closed and empty."""
        try:
            found = [self._queue.get(timeout=timeout_s)]
        except queue.Empty:
            return None if self._closed.is_set() else []
        while len(found) < rows_max:
            try:
                found.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return found

    def is_empty(self) -> bool:
        return self._queue.empty()

    def __iter__(self) -> Iterator[T]:
        while (found := self.take(1, 0.1)) is not None:
            yield from found


class FeedQuery:
    """Appends what an iterable or channel gives, with how much of it was taken."""

    def __init__(self, log: Log, app: str, definition: Feed) -> None:
        self.name = definition.name
        self.definitions = (definition,)
        self._log = log
        self._app = app
        self._stream = definition.outputs[0].name
        self._source: Iterable[object] = definition.source
        self._is_done = False
        self._is_busy = True

    def run(self, stop: threading.Event, tell: Callable[[Step], None]) -> None:
        holder = self._log.hold(f"app/{self._app}/{self.name}")
        saved = saved_position(self._log, self._app, self.name)
        taken = 0 if saved is None else saved.next[self._stream][0]
        last = self._log.last_commit(holder.producer)
        sequence = 0 if last is None else last.sequence + 1
        channel = self._source if isinstance(self._source, Channel) else None
        items = iter(()) if channel is not None else itertools.islice(self._source, taken, None)
        while not stop.is_set() and not self._is_done:
            self._is_busy = channel is None or not channel.is_empty()
            began = time.monotonic()
            found = (
                list(itertools.islice(items, FEED_ROWS_MAX)) or None
                if channel is None
                else channel.take(FEED_ROWS_MAX, 0.1)
            )
            if found is None:
                self._is_done, self._is_busy = True, False
            elif found:
                self._is_busy = True
                taken += len(found)
                position = Position(
                    producer=holder.producer, sequence=sequence, next={self._stream: {0: taken}}
                )
                source = f"{self._app}.{self.name}"
                with Transaction(self._log, holder, sequence=sequence, source=source) as tx:
                    for data in found:
                        item = data if isinstance(data, Emit) else None
                        options = item.options if item else EventOptions()
                        tx.send(
                            self._stream, item.data if item else data,
                            **msgspec.structs.asdict(options),
                        )  # fmt: skip
                    tx.save(progress_key(self._app, self.name), msgspec.json.encode(position))
                committed = self._log.last_commit(holder.producer)
                assert committed is not None  # noqa: S101  it was committed just now
                tell(
                    Step(
                        sequence=sequence, rows_in=len(found), rows_out=len(found),
                        rows_skipped=0, took_s=time.monotonic() - began, hops_ms=(),
                        committed=committed,
                    )
                )  # fmt: skip
                sequence += 1
        stop.wait()

    def lag(self) -> int:
        return 0

    def is_idle(self) -> bool:
        channel = self._source if isinstance(self._source, Channel) else None
        return not self._is_busy and (channel is None or channel.is_empty())

    def close(self) -> None:
        pass
