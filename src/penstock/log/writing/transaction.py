"""Transactions over streams: many events and progress values, visible together or not at all.

A transaction belongs to the object, and so to the process, that opened it. If that ends first,
the transaction never happened: nothing is visible before COMMIT, and what it staged is removed.
"""

from __future__ import annotations

import datetime as dt
import math
import secrets
from collections.abc import Mapping
from time import monotonic
from types import TracebackType
from typing import Literal, NamedTuple, Self

import pyarrow as pa

from penstock.errors import SequenceError, TransactionStateError
from penstock.log.api import Commit, CommitOptions, Committed, Holder, Log, Part, Piece
from penstock.log.declaring.objects import Stream
from penstock.log.writing.commit import next_sequence
from penstock.log.writing.compose import Composer, EventOptions, Outgoing
from penstock.log.writing.fate import Fate, fate_of
from penstock.records.event import Key, ids_of

TransactionState = Literal["new", "open", "unknown", "committed", "rolled back"]
Step = Literal["open", "write", "commit", "roll back"]

_ALLOWED: dict[Step, tuple[TransactionState, ...]] = {
    "open": ("new",),
    "write": ("open",),
    "commit": ("open", "unknown"),
    "roll back": ("new", "open", "rolled back"),
}


class _OpenTransaction(NamedTuple):
    """What a transaction has once it is open."""

    holder: Holder
    sequence: int
    composer: Composer


class Transaction:
    """Collects events and progress, and commits them together.

        with Transaction(log, "billing") as tx:
            tx.send("invoices", invoice)
            tx.save("billing/position", b"42")

    Leaving the block commits; an exception rolls back, except one of `commit` itself that is
    retriable: then `commit` may be called again. `producer` is a name (opening it
    fences its older holder), an existing holder, or nothing for a unique name.
    `sequence` names the commit; by default it follows the producer's latest. The transaction is
    rolled back when its block has been open for `timeout_s`. Memory is bounded: what exceeds
    `transaction_memory_bytes_max` waits in the log, unseen.

    Not thread-safe.
    """

    def __init__(
        self,
        log: Log,
        producer: str | Holder | None = None,
        *,
        sequence: int | None = None,
        source: str | None = None,
        options: CommitOptions = CommitOptions(),
        timeout_s: float = math.inf,
    ) -> None:
        self._log = log
        self._timeout_s = timeout_s
        self._deadline_s = math.inf
        self._producer = producer
        self._sequence = sequence
        self._source = source
        self._options = options
        self._state: TransactionState = "new"
        self._opened: _OpenTransaction | None = None
        self._streams: dict[str, Stream] = {}
        self._events: dict[str, list[Outgoing]] = {}
        self._parts: list[Part] = []
        self._pieces: list[Piece] = []
        self._progress: dict[str, bytes | None] = {}
        self._bytes = 0
        self._postponed: Exception | None = None

    @property
    def state(self) -> TransactionState:
        return self._state

    @property
    def holder(self) -> Holder:
        """Who commits it."""
        return self._get().holder

    @property
    def sequence(self) -> int:
        """The number of its commit."""
        return self._get().sequence

    @property
    def has_staged(self) -> bool:
        """Whether some of it waits in the log, unseen."""
        return bool(self._pieces)

    def move(self, holder: Holder, sequence: int) -> None:
        """Commit as another holder, after this one was fenced; what was staged stays behind."""
        if self._pieces:
            raise TransactionStateError(
                "the producer was fenced after part of the transaction was staged: begin another"
            )
        self._opened = self._get()._replace(holder=holder, sequence=sequence)

    def _check(self, step: Step) -> None:
        if self._state == "open" and monotonic() > self._deadline_s:
            self._forget()
            raise TransactionStateError(
                f"the transaction was open for more than {self._timeout_s:g} s (timeout_s) and was "
                "rolled back: begin another"
            )
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
            holder = self._producer
        else:
            name = self._producer or f"transaction-{secrets.token_hex(8)}"
            holder = self._log.hold(name, ephemeral=self._producer is None)
        sequence = self._sequence
        if sequence is None:
            sequence = next_sequence(self._log, holder.producer)
        composer = Composer(self._source or holder.producer, self._log.limits)
        self._opened = _OpenTransaction(holder, sequence, composer)
        self._deadline_s = monotonic() + self._timeout_s
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
        """Add an event; return its id, which is final although the event is not committed yet."""
        self._check("write")
        options = EventOptions(key=key, id=id, time=time, type=type, headers=headers)
        found = self._stream(stream)
        event = self._get().composer.admit(found, data, options)
        self._make_room(event.size)
        self._events.setdefault(str(found.name), []).append(event)
        return event.id

    def put(self, table: str, key: Key, value: object) -> str:
        """Set the entry of a table's key; `None` deletes it. Returns the id of the change."""
        self._check("write")
        found = self._stream(table)
        event = self._get().composer.admit_entry(found, key, value)
        self._make_room(event.size)
        self._events.setdefault(str(found.name), []).append(event)
        return event.id

    def append(self, stream: str, batch: pa.RecordBatch | pa.Table) -> pa.Array:
        """Add a batch of columns; return the events' ids."""
        self._check("write")
        found = self._stream(stream)
        part = self._get().composer.arrow_part(found, batch)
        self._make_room(part.batch.nbytes)
        self._close_events(str(found.name))
        self._parts.append(part)
        return ids_of(part.batch)

    def save(self, key: str, value: bytes | None) -> None:
        """Save a progress value with the commit; `None` removes it."""
        self._check("write")
        self._progress[key] = value

    def commit(self) -> Committed:
        """Make everything visible.

        Raises `CommitOutcomeUnknownError` if the outcome is unknown; then call `commit` again.
        After any other error nothing has happened, and it may be called again as well.
        """
        self._check("commit")
        if self._pieces:
            self._stage()
        for name in list(self._events):
            self._close_events(name)
        commit = Commit(parts=self._parts, pieces=self._pieces, progress=self._progress)
        holder, sequence, _ = self._get()
        before: TransactionState = self._state
        self._state = "unknown"  # also if an interrupt ends this call
        try:
            done = self._log.commit(holder, sequence, commit, self._options)
        except Exception as error:
            fate = fate_of(error)
            if fate is not Fate.UNKNOWN:
                self._state = before
            self._postponed = error if fate is Fate.POSTPONED else None
            raise
        if done.repeated and before == "open" and self._sequence is None:
            self._state = "rolled back"
            raise SequenceError(
                f"another transaction of {holder.producer} was committed as {sequence} meanwhile, "
                "and nothing of this one was: use one transaction at a time, or separate producers"
            )
        self._state = "committed"
        return done

    def roll_back(self) -> None:
        """Discard everything; staged events are removed later."""
        self._check("roll back")
        self._forget()

    def _forget(self) -> None:
        self._state = "rolled back"
        if self._pieces and self._producer is None:
            # Nobody will open this name again; doing so now lets its pieces be removed at once.
            self._log.hold(self._get().holder.producer, ephemeral=True)
        self._events.clear()
        self._parts.clear()
        self._progress.clear()

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self._log.stream(name)
        return self._streams[name]

    def _get(self) -> _OpenTransaction:
        if self._opened is None:
            raise TransactionStateError("the transaction is new: enter its `with` block first")
        return self._opened

    def _close_events(self, name: str) -> None:
        """Turn the single events of a stream into a part, so that order is kept."""
        events = self._events.pop(name, None)
        if events:
            self._parts.append(self._get().composer.part(self._stream(name), events))

    def _make_room(self, size: int) -> None:
        """Stage what is in memory if adding more would exceed the limit; done before adding, so
        that a failure leaves the transaction as it was."""
        if self._bytes and self._bytes + size > self._log.limits.transaction_memory_bytes_max:
            self._stage()
        self._bytes += size

    def _stage(self) -> None:
        for name in list(self._events):
            self._close_events(name)
        holder, sequence, _ = self._get()
        while self._parts:
            self._pieces.append(self._log.stage(holder, sequence, self._parts[0], self._options))
            del self._parts[0]
        self._bytes = 0
