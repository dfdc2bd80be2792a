"""Messages that a sink has taken and its program has not read yet: a file on disk.

What is voted for is durable in it; what is committed can be read, in the order of the commits,
and goes once it was. How far the program has read is in a small file of its own, written for
each message: it survives kill -9, and after a loss of power some messages may come again.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.connect.wire import Message
from penstock.errors import BufferFullError, UsageError
from penstock.log.statements import statements

SQL = statements("penstock.connect", "spool.sql")
FILE = "spool.db"
PLACE = "spool.place"
ROWS = 1000
PLACED = struct.Struct(">QQ")
NOWHERE = PLACED.pack(0, 0)


class Kept(NamedTuple):
    """A message that can be read. No two have the same `id`; they do not come in its order."""

    id: int
    worker: str
    key: bytes | None
    time_ns: int
    data: bytes


class Stretch(NamedTuple):
    """Messages of one commit, of one worker: those of its ids from `first` to `last`."""

    number: int
    worker: str
    first: int
    last: int


class Spool:
    """The file. For any thread."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._bytes_max = bytes_max
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._database = sqlite3.connect(
            folder / FILE, isolation_level=None, check_same_thread=False
        )
        self._place = os.open(folder / PLACE, os.O_RDWR | os.O_CREAT, 0o600)
        self._database.execute("PRAGMA journal_mode = WAL")
        for name, text in SQL.items():
            if name.startswith("create "):
                self._database.execute(text)
        self._stretch: Stretch | None = None
        self._rows: deque[Kept] = deque()
        self._loaded = 0
        """The last message of the stretch that was brought to memory, or was read before."""
        self._handed: Kept | None = None

    def confirm(self) -> None:
        """The message that was taken last counts as read."""
        with self._lock:
            self._confirm()

    def close(self) -> None:
        """What was taken last and not confirmed comes again."""
        with self._lock:
            self.changed.notify_all()
            self._database.close()
            os.close(self._place)

    @contextlib.contextmanager
    def writing(self, durable: bool) -> Iterator[sqlite3.Connection]:
        """A transaction; a durable one makes everything durable that was written before it too."""
        with self._lock:
            self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # SQLite may have done so already
                    self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")
            self.changed.notify_all()

    def check_room(self) -> None:
        """Raises `BufferFullError` while too much was not read."""
        with self._lock:
            (waiting,) = self._database.execute(SQL["waiting bytes"]).fetchone()
        if waiting >= self._bytes_max:
            raise BufferFullError(
                f"{waiting:,} bytes wait to be read, and {self._bytes_max:,} may: the program "
                "reads too slowly, or not at all"
            )

    # Reading

    def take(self) -> Kept | None:
        """The next message, if there is one. The one before it counts as read."""
        with self._lock:
            self._confirm()
            if not self._rows and not self._load():
                return None
            self._handed = self._rows.popleft()
            return self._handed

    def _confirm(self) -> None:
        if self._handed is None:
            return
        assert self._stretch is not None  # noqa: S101  it was taken from one
        os.pwrite(self._place, PLACED.pack(self._stretch.number, self._handed.id), 0)
        if self._handed.id == self._stretch.last:
            self._forget(self._stretch)
        self._handed = None

    def _load(self) -> bool:
        """Bring the next messages to memory; False if there are none."""
        while self._stretch is None:
            row = self._database.execute(SQL["next stretch"]).fetchone()
            if row is None:
                return False
            self._stretch = Stretch(*row)
            number, read = PLACED.unpack(os.pread(self._place, PLACED.size, 0) or NOWHERE)
            self._loaded = read if number == self._stretch.number else self._stretch.first - 1
            if self._loaded == self._stretch.last:  # killed before it could be forgotten
                self._forget(self._stretch)
        _, worker, _, last = self._stretch
        chosen = (worker, self._loaded + 1, last, ROWS)
        self._rows.extend(Kept(*row) for row in self._database.execute(SQL["messages"], chosen))
        self._loaded = self._rows[-1].id
        return True

    def _forget(self, stretch: Stretch) -> None:
        with self.writing(durable=False) as database:
            number, *which = stretch
            database.execute(SQL["forget messages"], which)
            database.execute(SQL["forget stretch"], (number,))
        self._stretch = None


class SpoolSink:
    """A worker's way into the spool."""

    def __init__(self, spool: Spool, worker: str) -> None:
        self._spool = spool
        self._worker = worker
        self._at = 0

    def open(self, committed: int, kept: int | None) -> None:
        with self._spool.writing(durable=False) as database:
            last, _ = self._end(database)
            if kept is not None:
                vote = self._vote(database)
                last = last if vote is None else vote[0]
            database.execute(SQL["discard"], (self._worker, last))
        self._at = committed if kept is None else kept

    def append(self, messages: Sequence[Message]) -> None:
        self._spool.check_room()
        with self._spool.writing(durable=False) as database:
            database.executemany(
                SQL["add"],
                ((self._worker, m.key, m.event_time, m.payload) for m in messages),
            )
        self._at += sum(len(message.payload) for message in messages)

    def flush(self) -> None:
        with self._spool.writing(durable=True) as database:
            database.execute(SQL["forget vote"], (self._worker,))
            database.execute(SQL["vote"], {"worker": self._worker, "end": self._at})

    def commit(self, start: int, end: int) -> None:  # noqa: ARG002  what was voted for says it
        with self._spool.writing(durable=True) as database:
            after, so_far = self._end(database)
            vote = self._vote(database)
            if vote is None and so_far == end:
                return
            if vote is None or vote[1] != end:
                raise UsageError(f"the spool does not hold worker {self._worker} up to {end}")
            values = {"worker": self._worker, "after": after, "last": vote[0], "end": end}
            database.execute(SQL["make ready"], values)
            database.execute(SQL["end"], values)
            database.execute(SQL["forget vote"], (self._worker,))

    def abort(self, start: int) -> None:
        with self._spool.writing(durable=True) as database:
            last, _ = self._end(database)
            database.execute(SQL["forget vote"], (self._worker,))
            database.execute(SQL["discard"], (self._worker, last))
        self._at = start

    def close(self) -> None:
        """The spool stays open for others."""

    def _vote(self, database: sqlite3.Connection) -> tuple[int, int] | None:
        row: tuple[int, int] | None = database.execute(SQL["vote of"], (self._worker,)).fetchone()
        return row

    def _end(self, database: sqlite3.Connection) -> tuple[int, int]:
        return database.execute(SQL["end of"], (self._worker,)).fetchone() or (0, 0)
