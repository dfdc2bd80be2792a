"""Transactions of a group: messages acknowledged together with what follows from them.

    with group.transaction() as tx:
        tx.ack(message)
        tx.send("receipts", Receipt(order=message.data.number))
        tx.put("balances", "ada", Balance(total=12))

One commit of the group's coordinator has it all. Nothing of it is written before: when its block
ends by an exception, or its process ends, it never happened, and the messages come again.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar, cast

from penstock.errors import (
    ConflictError,
    LimitError,
    SequenceError,
    TransactionStateError,
    UsageError,
)
from penstock.groups.outcomes import Settlement
from penstock.groups.saved import SavedClient
from penstock.log.api import Condition, Log, Part
from penstock.log.declaring.objects import Stream
from penstock.log.engine.checks import check_writer
from penstock.log.reading.table import unpacker
from penstock.log.writing.compose import Composer, EventOptions, Outgoing
from penstock.records.event import Key, key_bytes, keys_of, now_us
from penstock.records.schema import Record

T = TypeVar("T")
GroupTransactionState = Literal["new", "open", "committed", "rolled back"]
KAFKA = "kafka:"
TIMEOUT_S = 600.0
"""How long a transaction may be open."""
CLIENT_US = 30 * 24 * 3600 * 1_000_000
"""How long the latest transaction of a client is remembered."""


class Acknowledged(Protocol):
    """A message as a transaction sees it."""

    @property
    def lease(self) -> int: ...

    @property
    def epoch(self) -> int: ...


class PreparedTransaction:
    """Everything that is to be committed as one; `done` says whether it was."""

    def __init__(
        self,
        leases: Sequence[int],
        parts: Sequence[Part],
        streams: Mapping[str, int],
        conditions: Sequence[Condition],
        name: tuple[str, int] | None,
    ) -> None:
        self.leases = list(dict.fromkeys(leases))
        self.parts = parts
        self.streams = streams
        """The ids of the streams it writes to, when it was composed."""
        self.conditions = conditions
        self.name = name
        self.settled: list[Settlement] = []
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()

    def keys_written(self) -> set[tuple[str, bytes]]:
        """The entries that it changes."""
        return {
            (part.stream, key)
            for part in self.parts
            for key in keys_of(part.batch).to_pylist()
            if key is not None
        }

    def check(self, log: Log, written: set[tuple[str, bytes]]) -> None:
        """Raises a `UsageError` if it cannot be committed, beside what others have `written`."""
        for name, number in self.streams.items():
            if log.stream(name).id != number:
                raise UsageError(f"stream {name} was dropped and created again meanwhile")
        for one in self.conditions:
            if (one.table, one.key) in written:
                raise ConflictError(
                    f"another transaction has just written {one.key!r} of {one.table}"
                )


class TransactionBook:
    """Which transactions of clients were committed, or are under way. The group's lock is held."""

    def __init__(self, clients: dict[str, SavedClient]) -> None:
        self._saved = clients
        self._under_way: dict[str, PreparedTransaction] = {}

    def find(self, given: PreparedTransaction) -> Future[None] | None:
        """What became, or will become, of a transaction that was given before under its name.

        Raises `SequenceError` for one that is too old.
        """
        if given.name is None:
            return None
        client, number = given.name
        under_way, saved = self._under_way.get(client), self._saved.get(client)
        latest = [one.number for one in (saved,) if one is not None]
        if under_way is not None and under_way.name is not None:
            latest.append(under_way.name[1])
        if any(number < one for one in latest):
            raise SequenceError(
                f"transaction {number} of {client} is older than its latest, {max(latest)}: "
                "the numbers of a client's transactions must increase"
            )
        if under_way is not None and under_way.name == given.name:
            return under_way.done
        if number in latest:
            given.done.set_result(None)
            return given.done
        return None

    def begin(self, given: PreparedTransaction) -> None:
        """It is under way."""
        if given.name is not None:
            self._under_way[given.name[0]] = given

    def end(self, given: PreparedTransaction, *, is_saved: bool) -> None:
        """It was committed, or refused."""
        if given.name is None:
            return
        client, number = given.name
        if is_saved:
            self._saved[client] = SavedClient(number, now_us())
        if self._under_way.get(client) is given:
            del self._under_way[client]

    def find_expired(self) -> list[str]:
        """Clients that have not been here for long: they do not come again with what they had."""
        before_us = now_us() - CLIENT_US
        return [name for name, client in self._saved.items() if client.time_us < before_us]

    def forget(self, clients: Iterable[str]) -> None:
        for name in clients:
            self._saved.pop(name, None)


Execute = Callable[[int | None, PreparedTransaction], Future[None]]
"""Has a transaction committed, that acknowledges messages of a coordinator's epoch."""


class GroupTransaction:
    """Collects acknowledgements, events and entries, and commits them as one.

    Leaving the block commits; an exception rolls back. `timeout_s` after the block was entered it
    is rolled back, whatever has become of it. `name` is the client's own name and a number that
    grows with each of its transactions: one that was committed is not committed again.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        log: Log,
        producer: str,
        execute: Execute,
        name: tuple[str, int] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = math.inf
        self._log = log
        self._execute = execute
        self._name = name
        self._producer = producer
        self._composer = Composer(producer, log.limits)
        self._state: GroupTransactionState = "new"
        self._epoch: int | None = None
        self._leases: list[int] = []
        self._events: dict[str, list[Outgoing]] = {}
        self._streams: dict[str, Stream] = {}
        self._conditions: list[Condition] = []
        self._bytes = 0

    @property
    def state(self) -> GroupTransactionState:
        return self._state

    def __enter__(self) -> Self:
        if self._state != "new":
            raise TransactionStateError(f"the transaction is {self._state}: begin another")
        self._state = "open"
        self._deadline_s = monotonic() + self._timeout_s
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._state == "open":
            if error is None:
                self.commit()
            else:
                self.roll_back()

    def ack(self, *messages: Acknowledged) -> None:
        """Acknowledge messages with it."""
        self._check()
        for message in messages:
            if self._epoch not in (None, message.epoch):
                raise UsageError(
                    "the group was taken over between the deliveries of these messages, so they "
                    "cannot share a transaction: take them again"
                )
            self._epoch = message.epoch
            self._leases.append(message.lease)

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
        self._check()
        found = self._stream(stream)
        options = EventOptions(key=key, id=id, time=time, type=type, headers=headers)
        return self._add(found, self._composer.admit(found, data, options))

    def get(self, table: str, key: Key, record: type[T]) -> T | None:
        """The entry of a key as it is, with everything that was acknowledged before; not what this
        transaction puts.
        """
        self._check()
        found = self._table(table)
        (entry,) = self._log.get(table, [key_bytes(key) or b""], settled=True)
        if entry is None:
            return None
        return cast(T, unpacker(found, cast("type[Record]", record))(entry.value))

    def put(self, table: str, key: Key, value: object) -> None:
        """Set the entry of a key; `None` deletes it."""
        self._check()
        found = self._stream(table)
        self._add(found, self._composer.admit_entry(found, key, value))

    def put_if(self, table: str, key: Key, value: object, offset: int | None) -> None:
        """Set the entry of a key, if it is still the one at `offset` (`None`: if there is none).

        Otherwise nothing of the transaction happens, and it raises `ConflictError`.
        """
        found = self._table(table)
        if is_on_kafka(self._log) and found.spec.writer != self._producer:
            raise UsageError(
                f"put_if on table {found.name}: others may write to it, and Kafka has no atomic "
                f'compare-and-write: declare it with writer="{self._producer}" (penstock stream '
                f"alter {found.name} --writer {self._producer})"
            )
        self.put(table, key, value)
        packed = key_bytes(key)
        assert packed is not None  # noqa: S101  a key was given
        self._conditions.append(Condition(str(found.name), packed, offset))

    def commit(self) -> None:
        """Commit, and wait for the outcome.

        Raises `LeaseLostError` if the lease of a message is over, `ConflictError` if an entry has
        changed, or another `UsageError`: then nothing has happened.
        """
        self.begin_commit().result()
        self._state = "committed"

    def begin_commit(self) -> Future[None]:
        """Begin to commit; the future is done once it is committed."""
        self._check()
        self._state = "rolled back"
        parts = [
            self._composer.part(self._streams[name], events)
            for name, events in self._events.items()
        ]
        streams = {name: self._streams[name].id for name in self._events}
        prepared = PreparedTransaction(self._leases, parts, streams, self._conditions, self._name)
        done = self._execute(self._epoch, prepared)
        done.add_done_callback(self._note_end)
        return done

    def _note_end(self, done: Future[None]) -> None:
        if done.exception() is None:
            self._state = "committed"

    def roll_back(self) -> None:
        """Forget everything. The messages keep their leases."""
        if self._state == "committed":
            raise TransactionStateError("the transaction is committed")
        self._state = "rolled back"
        self._events.clear()

    def _check(self) -> None:
        if self._state == "open" and monotonic() > self._deadline_s:
            self.roll_back()
            raise TransactionStateError(
                f"the transaction was open for more than {self._timeout_s:g} s (timeout_s) and was "
                "rolled back: begin another"
            )
        if self._state != "open":
            hint = "enter its `with` block first" if self._state == "new" else "begin another"
            raise TransactionStateError(f"the transaction is {self._state}: {hint}")

    def _stream(self, name: str) -> Stream:
        found = self._log.stream(name)
        if found.spec.ids == "producer" and is_on_kafka(self._log):
            raise UsageError(
                f'stream {found.name} has ids="producer" and, on Kafka, its own transactional '
                "session, so it cannot be part of a group's transaction: send to another stream "
                "and copy from there"
            )
        check_writer(found, self._producer)
        return self._streams.setdefault(str(found.name), found)

    def _table(self, name: str) -> Stream:
        found = self._stream(name)
        if not found.spec.table:
            raise UsageError(f"stream {name} is not a table: use send")
        return found

    def _add(self, stream: Stream, event: Outgoing) -> str:
        most = self._log.limits.transaction_memory_bytes_max
        if self._bytes + event.size > most:
            raise LimitError(
                f"the transaction has more than {most:,} bytes (transaction_memory_bytes_max): "
                "make it smaller"
            )
        self._bytes += event.size
        self._events.setdefault(str(stream.name), []).append(event)
        return event.id


def is_on_kafka(log: Log) -> bool:
    """Whether commits have no order, and streams sessions of their own."""
    return log.url.startswith(KAFKA)
