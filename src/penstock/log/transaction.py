"""Transactions over streams: many events and progress values, visible together or not at all.

A transaction belongs to the object, and so to the process, that opened it. When that goes
away, it never happened: nothing is visible before COMMIT, and what it staged is swept.
"""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

import pyarrow as pa

from penstock.errors import (
    CommitOutcomeUnknownError,
    PenstockError,
    SequenceError,
    TransactionStateError,
)
from penstock.log.api import Commit, CommitOptions, Committed, Holder, Log, Part, Piece
from penstock.log.compose import Composer, EventOptions, Outgoing
from penstock.log.objects import Stream
from penstock.records.event import Key, ids_of

State = Literal["new", "open", "unknown", "committed", "rolled back"]
Step = Literal["open", "write", "commit", "roll back"]

_ALLOWED: dict[Step, tuple[State, ...]] = {
    "open": ("new",),
    "write": ("open",),
    "commit": ("open", "unknown"),
    "roll back": ("new", "open", "rolled back"),
}


class Transaction:
    """Collects events and progress, and commits them as one.

        with Transaction(log, "billing") as tx:
            tx.send("invoices", invoice)
            tx.save("billing/position", b"42")

    Leaving the block commits; an exception rolls back, except one of `commit` itself that is
    retriable: then `commit` may be called again. `producer` is a name (opening it
    fences its older holder), a holder that you have, or nothing for a name of its own.
    `sequence` names the commit; by default it follows the producer's latest. Memory is
    bounded: what exceeds `transaction_memory_bytes_max` waits in the log, unseen.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        log: Log,
        producer: str | Holder | None = None,
        *,
        sequence: int | None = None,
        source: str | None = None,
        options: CommitOptions = CommitOptions(),
    ) -> None:
        self._log = log
        self._producer = producer
        self._sequence = sequence
        self._numbered_here = sequence is None
        self._source = source
        self._options = options
        self._state: State = "new"
        self._holder: Holder | None = None
        self._composer: Composer | None = None
        self._streams: dict[str, Stream] = {}
        self._events: dict[str, list[Outgoing]] = {}
        self._parts: list[Part] = []
        self._pieces: list[Piece] = []
        self._progress: dict[str, bytes | None] = {}
        self._bytes = 0
        self._postponed: PenstockError | None = None

    @property
    def state(self) -> State:
        return self._state

    def _check(self, step: Step) -> None:
        if self._state not in _ALLOWED[step]:
            hint = {
                "new": "enter its `with` block first",
                "unknown": "its outcome is unknown: commit again to find out",
            }.get(self._state, "begin another")
            raise TransactionStateError(
                f"the transaction is {self._state} and cannot {step}: {hint}"
            )

    def __enter__(self) -> Self:
        self._check("open")
        if isinstance(self._producer, Holder):
            self._holder = self._producer
        else:
            name = self._producer or f"transaction-{secrets.token_hex(8)}"
            self._holder = self._log.hold(name, ephemeral=self._producer is None)
        if self._numbered_here:
            last = self._log.last_commit(self._holder.producer)
            self._sequence = last.sequence + 1 if last else 0
        self._composer = Composer(self._source or self._holder.producer, self._log.limits)
        self._state = "open"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._state != "open":
            return
        if error is None:
            self.commit()
        elif error is not self._postponed:
            self.roll_back()

    def send(
        self,
        stream: str,
        data: object,
        *,
        key: Key | None = None,
        id: str | int | None = None,  # noqa: A002  the word for it
        time: dt.datetime | None = None,
        type: str | None = None,  # noqa: A002  the word for it
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Add an event; returns its id, which is final although the commit is not."""
        self._check("write")
        options = EventOptions(key=key, id=id, time=time, type=type, headers=headers)
        found = self._stream(stream)
        event = self._made().admit(found, data, options)
        self._make_room(event.size)
        self._events.setdefault(str(found.name), []).append(event)
        return event.id

    def append(self, stream: str, batch: pa.RecordBatch | pa.Table) -> pa.Array:
        """Add a batch of columns; returns the events' ids."""
        self._check("write")
        found = self._stream(stream)
        part = self._made().arrow_part(found, batch)
        self._make_room(part.batch.nbytes)
        self._close_events(str(found.name))
        self._parts.append(part)
        return ids_of(part.batch)

    def save(self, key: str, value: bytes | None) -> None:
        """Save a progress value with the commit; `None` removes it."""
        self._check("write")
        self._progress[key] = value

    def commit(self) -> Committed:
        """Make it all visible.

        Raises `CommitOutcomeUnknownError` when that cannot be told; call `commit` again then.
        After any other error nothing has happened, and it may be called again too.
        """
        self._check("commit")
        if self._pieces:
            self._stage()
        for name in list(self._events):
            self._close_events(name)
        commit = Commit(parts=self._parts, pieces=self._pieces, progress=self._progress)
        holder, sequence = self._name()
        before: State = self._state
        self._state = "unknown"  # also if an interrupt ends this call
        try:
            done = self._log.commit(holder, sequence, commit, self._options)
        except CommitOutcomeUnknownError:
            raise
        except PenstockError as error:
            self._state = before
            self._postponed = error if error.retriable else None
            raise
        if done.repeated and before == "open" and self._numbered_here:
            self._state = "rolled back"
            raise SequenceError(
                f"another transaction of {holder.producer} was committed as {sequence} meanwhile; "
                "nothing of this one was: use one transaction at a time, or a producer each"
            )
        self._state = "committed"
        return done

    def roll_back(self) -> None:
        """Forget everything; what was staged is swept later."""
        self._check("roll back")
        self._state = "rolled back"
        if self._pieces and self._producer is None:
            # Nobody will open this name again; doing so now lets its pieces be swept at once.
            self._log.hold(self._name()[0].producer, ephemeral=True)
        self._events.clear()
        self._parts.clear()
        self._progress.clear()

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self._log.stream(name)
        return self._streams[name]

    def _made(self) -> Composer:
        assert self._composer is not None  # noqa: S101  open means made
        return self._composer

    def _name(self) -> tuple[Holder, int]:
        assert self._holder is not None  # noqa: S101  open means held
        assert self._sequence is not None  # noqa: S101  open means numbered
        return self._holder, self._sequence

    def _close_events(self, name: str) -> None:
        """Turn the single events of a stream into a part, so that order is kept."""
        events = self._events.pop(name, None)
        if events:
            self._parts.append(self._made().part(self._stream(name), events))

    def _make_room(self, size: int) -> None:
        """Stage what is here if more would be too much; before more is taken in, so that a
        failure leaves the transaction as it was."""
        if self._bytes and self._bytes + size > self._log.limits.transaction_memory_bytes_max:
            self._stage()
        self._bytes += size

    def _stage(self) -> None:
        for name in list(self._events):
            self._close_events(name)
        holder, sequence = self._name()
        while self._parts:
            self._pieces.append(self._log.stage(holder, sequence, self._parts[0], self._options))
            del self._parts[0]
        self._bytes = 0
