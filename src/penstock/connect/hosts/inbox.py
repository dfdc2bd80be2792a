"""Committed messages, read one by one by the program that owns the sink.

How far the program has read is kept in a small file, written for each message: it survives
kill -9, but after a power failure some messages may be delivered again.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.connect.hosts.spool import Lot, Spool, StagedCommit
from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.protocol.marks import Mark

PLACE = "inbox.place"
PLACED = struct.Struct(">QQ")
ID_BITS = 32


class ReadMessage(NamedTuple):
    """A message that can be read. No two have the same `id`; they do not come in its order."""

    id: int
    worker: str
    key: bytes | None
    time_ns: int
    data: bytes


class Inbox:
    """Takes messages out of a spool. One thread at a time."""

    def __init__(self, spool: Spool, folder: Path) -> None:
        self._spool = spool
        self._place = os.open(folder / PLACE, os.O_RDWR | os.O_CREAT, 0o600)
        self._commit: StagedCommit | None = None
        self._lots: Iterator[Lot] = iter(())
        self._ready: deque[SinkMessage] = deque()
        self._read = 0
        """How many messages of the commit were handed out, in this process or an earlier one."""
        self._is_open = False
        """Whether the message handed out last does not count as read yet."""

    def close(self) -> None:
        """Close the inbox; a message that was taken but not confirmed is delivered again."""
        os.close(self._place)

    def take(self) -> ReadMessage | None:
        """The next message, if there is one. The previous one then counts as read."""
        self.confirm()
        while not self._ready:
            if self._commit is None and not self._begin():
                return None
            lot = next(self._lots, None)
            if lot is not None:
                self._ready.extend(lot[0])
            else:
                self._finish()
        assert self._commit is not None  # noqa: S101  the message belongs to it
        message = self._ready.popleft()
        self._read += 1
        self._is_open = True
        number = self._commit.number << ID_BITS | self._read
        name = self._commit.name
        return ReadMessage(number, name, message.key, message.time_ns, message.data)

    def confirm(self) -> None:
        """Mark the message that was taken last as read."""
        if self._is_open and self._commit is not None:
            os.pwrite(self._place, PLACED.pack(self._commit.number, self._read), 0)
            self._is_open = False
            if self._read == self._commit.end.messages - self._commit.start.messages:
                self._finish()

    def _begin(self) -> bool:
        self._commit = commit = self._spool.next_commit()
        if commit is None:
            return False
        number, read = PLACED.unpack(os.pread(self._place, PLACED.size, 0) or bytes(PLACED.size))
        self._read = read if number == commit.number else 0
        after = Mark(commit.start.offset, commit.start.messages + self._read)
        self._lots = self._spool.messages(commit.name, after, commit.end)
        return True

    def _finish(self) -> None:
        """Forget the commit: all of it was read, now or before the program was killed."""
        if self._commit is not None:
            self._spool.forget_commit(self._commit)
        self._commit, self._lots = None, iter(())
