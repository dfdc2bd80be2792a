"""Feeding a stream by writing to it, or from a generator: sources that keep unsafe messages.

with SourceClient("127.0.0.1:6067", "orders") as client:
    client.write(b'{"user": "ada"}', sequence=1)
    client.flush()
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Self

from penstock.connect.clients.codecs import Encoder, encode_plainly
from penstock.connect.clients.origin import End
from penstock.connect.clients.source import (
    END,
    ConnectorOptions,
    Item,
    Source,
    SourceConnector,
)
from penstock.connect.protocol.numbering import COUNTED_HERE, OwnNumbers
from penstock.errors import BufferFullError, ConnectorError, ConnectorTimeoutError, UsageError
from penstock.records.event import Key, key_bytes

Yielded = tuple[Any, ...] | None
"""Data and number and, if known, key and time; `None` if there is nothing at the moment."""
Generated = Callable[[int | None], Iterator[Yielded]]
BUFFER_BYTES_MAX = 32 << 20
ITEM_BYTES = 200
"""Approximately how much memory a waiting message takes besides its data."""


class BufferedSource(Source):
    """Keeps written messages until they are safe, and sends them again after a reset.

    Any thread may write; `room` is shared by the sources of a client.
    """

    def __init__(self, name: str, room: Room) -> None:
        super().__init__(name)
        self._room = room
        self._held: deque[Item] = deque()
        self._sent = 0
        self._last: int | None = None
        self._top = -1
        """The highest number ever sent."""
        self._safe = -1
        self._numbers = OwnNumbers()
        self._numbered_by: Literal["author", "us"] | None = None
        self._is_open = False
        self.changed = threading.Condition()

    # The author's side

    def put(self, data: bytes, sequence: int | None, key: bytes | None, time_ns: int) -> bool:
        """Keep a message; False if it is safe already. Raises `UsageError` for a wrong number."""
        with self.changed:
            number = self._number(sequence)
            if 0 <= number <= self._safe:
                return False
            following = 0 if self._last is None else self._last + 1
            if number < following or number < 0:
                raise UsageError(
                    f"message {number} of {self.name} follows {self._last}: use 0, 1, 2, …"
                )
            self._held.append(Item(data, number, key, time_ns))
            self._last = number
            return True

    def _number(self, sequence: int | None) -> int:
        """A message's number: the author's, or our next one, which may follow an author's."""
        if sequence is None and self._numbered_by == "author":
            return 0 if self._last is None else self._last + 1
        if sequence is None:
            self._numbered_by = "us"
            return self._numbers.take()
        is_behind_ours = sequence < COUNTED_HERE <= self._safe
        if is_behind_ours or self._numbered_by == "us":
            raise UsageError(
                f"{self.name} was written to without numbers before, so message {sequence} would "
                "be mistaken for one that is safe: omit the numbers, use another name, or rewind "
                "the stream with `penstock connector rewind`"
            )
        self._numbered_by = "author"
        return sequence

    def wait_open(self, deadline: float) -> bool:
        """Wait until it is known where to resume."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self._is_open, max(0.0, deadline - time.monotonic())
            )

    def wait_safe(self, deadline: float) -> bool:
        """Wait until everything written is safe."""
        with self.changed:
            left_s = max(0.0, deadline - time.monotonic())
            return self.changed.wait_for(lambda: not self._held, left_s)

    @property
    def point_of_ref(self) -> int | None:
        """The last message that is safe or was written."""
        with self.changed:
            return self._last

    # The connector's side

    def handle_reset(self, point_of_ref: int | None) -> None:
        """Resume there. Raises `ConnectorError` if another program's messages replaced ours."""
        with self.changed:
            if not self._numbers.resume(point_of_ref) and self._numbered_by != "author":
                self._renumber()
            self._forget(point_of_ref)
            self._sent = 0
            point = -1 if point_of_ref is None else point_of_ref
            if point >= 0 and (self._last is None or point > self._last):
                self._last = point
            self._safe = max(self._safe, point)
            self._is_open = True
            self.changed.notify_all()

    def _renumber(self) -> None:
        """Number our messages after those that another program has written in the meantime."""
        if any(item.point_of_ref <= self._top for item in self._held):
            raise ConnectorError(
                f"another program has written to {self.name} in the meantime, so it is not known "
                "whether the last messages of this program were stored"
            )
        self._held = deque(item._replace(point_of_ref=self._numbers.take()) for item in self._held)
        if self._held:
            self._last = self._held[-1].point_of_ref

    def handle_next(self) -> Item | None:
        with self.changed:
            if self._sent == len(self._held):
                return None
            item = self._held[self._sent]
            self._sent += 1
            self._top = max(self._top, item.point_of_ref)
            return item

    def handle_progress(self, stream: str, point_of_ref: int) -> None:  # noqa: ARG002
        with self.changed:
            self._safe = max(self._safe, point_of_ref)
            self._forget(point_of_ref)
            self.changed.notify_all()

    def _forget(self, point_of_ref: int | None) -> None:
        freed = 0
        while (
            point_of_ref is not None and self._held and (self._held[0].point_of_ref <= point_of_ref)
        ):
            freed += size_of(self._held.popleft().data)
            self._sent -= 1
        self._sent = max(0, self._sent)
        self._room.give_back(freed)


class Room:
    """Limits the bytes that are waiting to become safe, over all streams of a client."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._changed = threading.Condition()

    def take(self, size: int, deadline: float, check: Callable[[], None]) -> bool:
        with self._changed:
            while self._used and self._used + size > self._most:
                check()
                if time.monotonic() >= deadline:
                    return False
                self._changed.wait(min(0.2, max(0.0, deadline - time.monotonic())))
            self._used += size
            return True

    def give_back(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()


def size_of(data: bytes) -> int:
    return len(data) + ITEM_BYTES


class SourceClient:
    """Writes messages to streams of a listener. Safe to use from any thread.

    A partition is a separate stream, `NAME.PARTITION`, with its own order and numbers. Messages
    that were not safe when the connection broke are sent again.
    """

    def __init__(
        self,
        address: str,
        stream: str,
        *,
        encoder: Encoder = encode_plainly,
        options: ConnectorOptions = ConnectorOptions(),
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
    ) -> None:
        self._stream = stream
        self._encoder = encoder
        self._room = Room(buffer_bytes_max)
        self._sources: dict[str, BufferedSource] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self.connector = SourceConnector(address, [], options)

    def __enter__(self) -> Self:
        self.connector.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(flush=kind is None)

    def write(
        self,
        message: object,
        partition: object = None,
        sequence: int | None = None,
        *,
        key: Key | None = None,
        time_ns: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """Send a message in the background.

        `sequence` is its number, which must increase; a message whose number is already safe is
        dropped, so a program may write everything again after a restart. Without `sequence`,
        messages are numbered here, after all existing ones; a stream written to in this way no
        longer accepts numbers.
        If another program took the stream while messages were in transit, the connector gives up,
        since it cannot know whether they arrived.

        Waits while too many bytes are not yet safe; raises `BufferFullError` after the timeout,
        `ConnectorError` if the connector has given up.
        """
        deadline = time.monotonic() + timeout_s
        source = self._source(partition)
        if sequence is None:
            self._wait_open(source, deadline)
        data = self._encoder(message)
        if not self._room.take(size_of(data), deadline, self.connector.check):
            raise BufferFullError(
                f"the buffer is full, and the listener has confirmed no message of {source.name} "
                f"for {timeout_s} s: it is unavailable, or slower than this program"
            )
        try:
            is_new = source.put(data, sequence, key_bytes(key), time_ns)
        except UsageError:
            self._room.give_back(size_of(data))
            raise
        if is_new:
            self.connector.wake(source.name)
        else:
            self._room.give_back(size_of(data))

    def point_of_ref(self, partition: object = None, timeout_s: float = 60.0) -> int | None:
        """After which message to resume, according to the listener; waits until that is known."""
        source = self._source(partition)
        self._wait_open(source, time.monotonic() + timeout_s)
        return source.point_of_ref

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until everything is safe.

        Raises `ConnectorTimeoutError`, or the error for which the connector gave up.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            sources = list(self._sources.values())
        for source in sources:
            while not source.wait_safe(min(deadline, time.monotonic() + 0.2)):
                self.connector.check()
                if time.monotonic() >= deadline:
                    raise ConnectorTimeoutError(
                        f"not all messages of {source.name} were safe within {timeout_s} s"
                    )

    def close(self, *, flush: bool = True) -> None:
        """Wait until everything is safe, and close the connection; a second call does nothing."""
        try:
            if flush and not self._is_closed:
                self.flush()
        finally:
            self._is_closed = True
            self.connector.stop()

    def _wait_open(self, source: BufferedSource, deadline: float) -> None:
        while not source.wait_open(min(deadline, time.monotonic() + 0.2)):
            self.connector.check()
            if time.monotonic() >= deadline:
                raise ConnectorTimeoutError(f"no listener granted stream {source.name} in time")

    def _source(self, partition: object) -> BufferedSource:
        name = self._stream if partition is None else f"{self._stream}.{partition}"
        with self._lock:
            found = self._sources.get(name)
            if found is None:
                found = self._sources[name] = BufferedSource(name, self._room)
                self.connector.add(found)
            return found


class GeneratedSource(Source):
    """A source made of a generator, which yields `(data, number)` after the number it is given."""

    def __init__(self, name: str, function: Generated) -> None:
        super().__init__(name)
        self._function = function
        self._items: Iterator[Yielded] = iter(())

    def handle_reset(self, point_of_ref: int | None) -> None:
        self._items = self._function(point_of_ref)

    def handle_next(self) -> Item | End | None:
        for found in self._items:
            if found is None:
                return None
            data, number, *more = found
            return Item(encode_plainly(data), number, *more)
        return END


def source(name: str) -> Callable[[Generated], Callable[[], Source]]:
    """Make a source from a generator function.

        @source("lines")
        def lines(after):
            with open("x.txt") as file:
                for number, line in enumerate(file):
                    if after is None or number > after:
                        yield line, number

        SourceConnector("127.0.0.1:6067", [lines()])

    It yields `None` when there is nothing at the moment.
    """

    def decorate(function: Generated) -> Callable[[], Source]:
        @functools.wraps(function)
        def make() -> Source:
            return GeneratedSource(name, function)

        return make

    return decorate
