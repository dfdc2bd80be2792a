"""Streams filled from this process: from an iterable, or a channel that a program sends to."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from penstock.app.declaring.definitions import Feed
from penstock.app.declaring.streams import Emit
from penstock.app.running.batches import BatchReport
from penstock.app.running.positions import (
    AppRun,
    FeedPosition,
    Mover,
    pack_position,
    producer_name,
    progress_key,
    read_own_position,
)
from penstock.errors import AppError, ClosedError
from penstock.log.api import Count, Holder, Log
from penstock.log.writing.commit import next_sequence
from penstock.log.writing.compose import EventOptions
from penstock.log.writing.transaction import Transaction

T = TypeVar("T")
FEED_ROWS_MAX = 1000
CHANNEL_ROWS_MAX = 10_000


class Channel(Generic[T]):
    """A queue inside this process that an app reads as a stream: `app.feed(channel, to=orders)`.

    Holds at most `rows_max` events; if it is full, `send` waits. Its contents are lost with the
    process: use a `Producer` for events that must not be lost.
    """

    def __init__(self, rows_max: int = CHANNEL_ROWS_MAX) -> None:
        self._queue: queue.Queue[T] = queue.Queue(rows_max)
        self._closed = threading.Event()

    def send(self, data: T, timeout_s: float | None = 30.0) -> None:
        """Add an event. Raises `queue.Full` if the channel stays full for `timeout_s`."""
        if self._closed.is_set():
            raise ClosedError("the channel is closed: nothing can be sent to it any more")
        self._queue.put(data, timeout=timeout_s)

    def close(self) -> None:
        """Accept no more events; those sent before are still read."""
        self._closed.set()

    def take(self, rows_max: int, timeout_s: float) -> list[T] | None:
        """Wait for events and return those that are there; `None` once it is closed and empty."""
        is_closed = self._closed.is_set()  # read first, so that all that was sent before is found
        try:
            found = [self._queue.get(block=not is_closed, timeout=timeout_s)]
        except queue.Empty:
            return None if is_closed else []
        while len(found) < rows_max:
            try:
                found.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return found

    def done(self, rows: int) -> None:
        """Report that `rows` of the events taken are in the log."""
        for _ in range(rows):
            self._queue.task_done()

    def is_empty(self) -> bool:
        """Whether everything sent was taken and is in the log."""
        return self._queue.unfinished_tasks == 0

    def __iter__(self) -> Iterator[T]:
        while (found := self.take(1, 0.1)) is not None:
            self.done(len(found))
            yield from found


class _Pump(Generic[T]):
    """Reads an iterable in a thread of its own, so that items it has yielded need not wait for the
    next one, however long that takes."""

    def __init__(self, items: Iterator[T], name: str) -> None:
        self._items = items
        self.channel: Channel[T] = Channel(FEED_ROWS_MAX)
        self.error: BaseException | None = None
        threading.Thread(target=self._run, name=f"feed {name}", daemon=True).start()

    def _run(self) -> None:
        try:
            for item in self._items:
                self.channel.send(item, timeout_s=None)
        except BaseException as error:
            self.error = error
        finally:
            self.channel.close()


class FeedQuery:
    """Appends the items of an iterable or channel, and saves how many were taken."""

    position_kind = FeedPosition

    def __init__(self, log: Log, run: AppRun, definition: Feed) -> None:
        self.name = definition.name
        self.definitions = (definition,)
        self._log = log
        self._run = run
        self._app = run.app
        self._stream = definition.outputs[0].name
        self._source: Iterable[object] = definition.source
        self._pump: _Pump[object] | None = None
        self._waiting: list[object] = []
        self._taken = 0
        """The number of items up to the last one that is waiting."""
        self._is_done = False

    def run(self, stop: threading.Event, tell: Callable[[BatchReport], None]) -> None:
        producer = producer_name(self._app, self.name)
        self._read_taken(producer)
        holder = self._log.hold(producer)
        taken = self._read_taken(producer)
        sequence = next_sequence(self._log, holder.producer)
        channel = self._channel(taken)
        if self._waiting and taken == self._taken:
            self._safe(channel)  # they were committed, but the answer was lost
        while not stop.is_set():
            began = time.monotonic()
            self._take(channel)
            if self._is_done:
                break
            if not self._waiting:
                continue
            rows = len(self._waiting)
            self._taken = taken = taken + rows
            self._commit(holder, sequence, taken)
            self._safe(channel)
            committed = self._log.last_commit(holder.producer)
            assert committed is not None  # noqa: S101  it was committed just now
            tell(
                BatchReport(
                    sequence=sequence,
                    rows_in=rows,
                    rows_out=rows,
                    rows_skipped=0,
                    took_s=time.monotonic() - began,
                    hops_ms=(),
                    committed=committed,
                )
            )
            sequence += 1
        stop.wait()

    def _read_taken(self, producer: str) -> int:
        """How many items are in the log; raises `ClaimLostError` if another run took over."""
        return read_own_position(self._log, self._run, self.name, producer, FeedPosition).taken

    def _channel(self, taken: int) -> Channel[object]:
        if isinstance(self._source, Channel):
            return self._source
        if self._pump is None:
            items = itertools.islice(self._begin_source(), taken, None)
            self._pump = _Pump(items, self.name)
        return self._pump.channel

    def _begin_source(self) -> Iterator[object]:
        definition, found = self.definitions[0], iter(self._source)
        if found is self._source and definition.begun:
            raise AppError(
                f"{definition.location}: the iterable that feeds {self._stream} cannot be read "
                "from the beginning a second time: pass an iterable that can, or restart the app"
            )
        definition.begun.append(True)
        return found

    def _safe(self, channel: Channel[object]) -> None:
        """Mark the waiting items as committed."""
        channel.done(len(self._waiting))
        self._waiting = []

    def _take(self, channel: Channel[object]) -> None:
        """Take the next items, unless a failed commit left some waiting."""
        if self._waiting:
            return
        found = channel.take(FEED_ROWS_MAX, 0.05)
        self._waiting = found or []
        if found is None and self._pump is not None and self._pump.error is not None:
            error, self._pump = self._pump.error, None  # the iterable failed; it did not end
            raise error
        self._is_done = found is None

    def _commit(self, holder: Holder, sequence: int, taken: int) -> None:
        position = FeedPosition(mover=Mover(holder.producer, self._run.token), taken=taken)
        source = f"{self._app}.{self.name}"
        numbered = self._log.stream(self._stream).spec.ids == "producer"
        first = taken - len(self._waiting)
        with Transaction(self._log, holder, sequence=sequence, source=source) as tx:
            for number, data in enumerate(self._waiting, first):
                options = data.options if isinstance(data, Emit) else EventOptions()
                if numbered and options.id is None:
                    options = msgspec.structs.replace(options, id=number)
                sent = data.data if isinstance(data, Emit) else data
                tx.send(self._stream, sent, **msgspec.structs.asdict(options))
            tx.save(progress_key(self._app, self.name), pack_position(position))

    def lag(self) -> Count:
        return Count()

    def is_idle(self) -> bool:
        return self._source.is_empty() if isinstance(self._source, Channel) else self._is_done

    def late_rows(self) -> int:
        return 0

    def close(self) -> None:
        pass
