"""One writer per process, and many commits per SQLite transaction.

Threads that want to write queue up; the one that gets the writer's lock commits for all that are
waiting by then. So a single commit costs no hand-over, and many small ones share one fsync.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import apsw

from penstock.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    LogBusyError,
    LogFormatError,
    LogFullError,
    LogReadOnlyError,
    PenstockError,
)
from penstock.failpoints import failpoint
from penstock.log.sqlite.connection import (
    SqlRow,
    check_process,
    connect,
    many,
    one,
    translate,
    translate_errors,
)
from penstock.records.event import now_us

T = TypeVar("T")
GROUP_MAX = 256


class Write:
    """An open SQLite write transaction, with the counters that its commits share."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.dirty = False
        self.commit_number: int
        self.epoch: int
        self.commit_number, self.epoch, last_us = self.must("state")
        self.time_us: int = max(now_us(), last_us)
        self._partitions: dict[tuple[int, int], _Partition] = {}

    def run(self, name: str, *values: object) -> None:
        """Run a statement that changes something."""
        self.dirty = True
        many(self.connection, name, *values)

    def insert(self, name: str, *values: object) -> int:
        """Run a statement that adds a row and returns its id."""
        self.dirty = True
        return int(self.must(name, *values)[0])

    def must(self, name: str, *values: object) -> SqlRow:
        """The one row that always exists. Raises `LogFormatError` if it is missing nevertheless."""
        row = one(self.connection, name, *values)
        if row is None:
            raise LogFormatError(
                f"the log is damaged: the row for {name!r} is missing; run `penstock verify`, then "
                "restore a backup"
            )
        return row

    def look(self, name: str, *values: object) -> SqlRow | None:
        """The first row of a statement that only reads."""
        return one(self.connection, name, *values)

    def look_all(self, name: str, *values: object) -> list[SqlRow]:
        """All rows of a statement that only reads."""
        return many(self.connection, name, *values)

    def next_commit(self) -> int:
        self.dirty = True
        self.commit_number += 1
        return self.commit_number

    def take_offsets(self, stream_id: int, partition: int, rows: int, size: int) -> int:
        """The first of `rows` new offsets for a batch of `size` bytes."""
        self.dirty = True
        place = (stream_id, partition)
        if place not in self._partitions:
            self._partitions[place] = _Partition(*self.must("next_offset", *place))
        found = self._partitions[place]
        first = found.next_offset
        found.next_offset += rows
        found.bytes_added += size
        found.batches_added += 1
        return first

    def finish(self) -> None:
        """Write the shared counters; called once, before COMMIT."""
        for (stream_id, partition), found in self._partitions.items():
            added = (found.next_offset, found.bytes_added, found.batches_added)
            self.run("save_partition", *added, stream_id, partition)
        self.run("save_state", self.commit_number, self.epoch, self.time_us)


@dataclass
class _Partition:
    """What a transaction adds to a partition, whose size others may change meanwhile."""

    next_offset: int
    bytes_added: int = 0
    batches_added: int = 0


class _Ticket(Generic[T]):
    """One thread's request to write, and its outcome.

    Until it is known to have happened, it counts as failed: the error is set from the start.
    """

    def __init__(self, work: Callable[[Write], T], durable: bool, deadline: float) -> None:
        self.work = work
        self.durable = durable
        self.deadline = deadline
        self.done = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self.reset()

    def reset(self) -> None:
        self.result = None
        self.error = LogBusyError("the write was interrupted before it began: try again")

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]


class Committer:
    """Runs work in write transactions, in the order of arrival, grouped where possible.

    Work checks before it writes: an error before its first change concerns that work alone; an
    error after that rolls back the group, whose members are then run one by one.
    """

    def __init__(
        self,
        path: Path,
        vfs: str | None,
        on_commit: Callable[[], None],
        *,
        read_only: bool = False,
    ) -> None:
        self._path = path
        self._vfs = vfs
        self._on_commit = on_commit
        self._read_only = read_only
        self._lock = threading.Lock()
        self._queue: deque[_Ticket[object]] = deque()
        self._connection: apsw.Connection | None = None
        self._durable: bool | None = None
        self._closed = False
        self._process = os.getpid()

    def submit(self, work: Callable[[Write], T], *, durable: bool, timeout_s: float) -> T:
        """Do the work in a committed transaction.

        Raises what the work raised; `LogBusyError` if the writer was not free in time (the work
        was not done); `CommitOutcomeUnknownError` if COMMIT itself failed.
        """
        check_process(self._process, self._path)
        if self._read_only:
            raise LogReadOnlyError(f"log {self._path} was opened read-only")
        deadline = time.monotonic() + timeout_s
        ticket: _Ticket[T] = _Ticket(work, durable, deadline)
        held = False
        try:
            self._queue.append(ticket)  # type: ignore[arg-type]
            held = self._lock.acquire(timeout=timeout_s)
            while held and not ticket.done:
                self._commit_waiting(max(0.0, deadline - time.monotonic()))
        except BaseException:
            self._withdraw(ticket)
            raise
        finally:
            if held:
                self._lock.release()
        if not held:
            self._give_up(ticket)
        return ticket.outcome()

    def _withdraw(self, ticket: _Ticket[T]) -> bool:
        """Withdraw a ticket; False if another thread has started on it meanwhile."""
        try:
            self._queue.remove(ticket)  # type: ignore[arg-type]
        except ValueError:
            return False
        return True

    def _give_up(self, ticket: _Ticket[T]) -> None:
        if self._withdraw(ticket):
            raise LogBusyError(f"{self._path}: the write lock was not free in time: try again")
        if not ticket.done:
            raise CommitOutcomeUnknownError(
                f"the commit to {self._path} did not finish in time, and may still happen: "
                "commit again under the same name to find out"
            )

    def _commit_waiting(self, timeout_s: float) -> None:
        """Commit everything waiting as one group; the leader's own wait for the file binds no one.

        So nothing is removed from the queue before a transaction is open: a thread that gives up
        while the leader waits withdraws its ticket, and knows that nothing happened.
        """
        durable = any(ticket.durable for ticket in self._queue.copy())
        write = self._begin(durable, timeout_s)
        group: list[_Ticket[object]] = []
        try:
            self._take(group, durable)
            if not self._run(write, group):
                for ticket in group:
                    ticket.reset()
                for ticket in group:
                    self._run_alone(ticket, timeout_s)
        except BaseException:
            self._roll_back()
            raise
        finally:
            for ticket in group:
                ticket.done = True
            self._on_commit()

    def _take(self, group: list[_Ticket[object]], durable: bool) -> None:
        """Move waiting tickets into the group, unless they need more durability than it has.

        A ticket is in the group before it leaves the queue, so that an interrupt loses none.
        """
        while len(group) < GROUP_MAX:
            try:
                ticket = self._queue[0]
            except IndexError:
                return
            if ticket.durable and not durable:
                return
            group.append(ticket)
            if not self._withdraw(ticket):
                group.pop()

    def _run_alone(self, ticket: _Ticket[object], timeout_s: float) -> None:
        try:
            write = self._begin(ticket.durable, timeout_s)
        except Exception as error:
            ticket.error = error
        else:
            self._run(write, [ticket])

    def _run(self, write: Write, group: list[_Ticket[object]]) -> bool:
        """Run a group in its transaction; False if its members must be run one by one."""
        try:
            results = [self._work(write, ticket) for ticket in group if not ticket.done]
            if write.dirty:
                write.finish()
                failpoint("commit.producer")
        except Exception as error:
            self._roll_back()
            if len(group) > 1:
                return False
            known = translate(error, self._path) if isinstance(error, apsw.Error) else error
            group[0].error = known
            return True
        self._commit(write, [ticket for ticket in results if ticket is not None])
        return True

    def _begin(self, durable: bool, timeout_s: float) -> Write:
        with translate_errors(self._path):
            connection = self._writer()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if durable != self._durable:
                level = "FULL" if durable else "NORMAL"
                connection.execute(f"PRAGMA synchronous = {level}").fetchall()
                self._durable = durable
            connection.set_busy_timeout(int(timeout_s * 1000))
            try:
                connection.execute("BEGIN IMMEDIATE")
                write = Write(connection)
                failpoint("commit.begun")
            except BaseException:
                self._roll_back()
                raise
            return write

    def _writer(self) -> apsw.Connection:
        if self._closed:
            raise ClosedError(f"log {self._path} is closed")
        if self._connection is None:
            self._connection = connect(self._path, self._vfs)
        return self._connection

    def _work(self, write: Write, ticket: _Ticket[object]) -> _Ticket[object] | None:
        """Do a ticket's work; return the ticket, unless the work failed before any change."""
        before, write.dirty = write.dirty, False
        try:
            ticket.result = ticket.work(write)
        except PenstockError as error:
            if write.dirty:
                raise
            ticket.error = error
            return None
        finally:
            write.dirty = write.dirty or before
        return ticket

    def _commit(self, write: Write, group: list[_Ticket[object]]) -> None:
        """Run COMMIT. While it runs, its outcome is unknown."""
        for ticket in group:
            ticket.error = self._unknown("it was interrupted")
        try:
            write.connection.execute("COMMIT" if write.dirty else "ROLLBACK")
            failpoint("commit.committed")
        except Exception as error:
            self._roll_back()
            known = self._failure_of(error)
            for ticket in group:
                ticket.error = known
            return
        for ticket in group:
            ticket.error = None

    def _failure_of(self, error: Exception) -> PenstockError:
        if isinstance(error, apsw.FullError):
            return LogFullError(
                f"the disk that holds {self._path} is full, and nothing was written: free some "
                "space and try again"
            )
        if isinstance(error, apsw.BusyError):
            return translate(error, self._path)
        return self._unknown(str(error))

    def _unknown(self, why: str) -> CommitOutcomeUnknownError:
        return CommitOutcomeUnknownError(
            f"COMMIT on {self._path} failed ({why}), but after a crash it may turn out to have "
            "happened: commit again under the same name to find out"
        )

    def _roll_back(self) -> None:
        """End a failed transaction; if even that fails, use a new connection."""
        connection = self._connection
        try:
            if connection is not None and connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            self._connection = None
            self._durable = None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
