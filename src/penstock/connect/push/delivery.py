"""Delivers a stream to a sink without an app, each event once.

The stream has a partition for each worker. The state of the delivery is one record of progress:
the next offset of each partition, and the transactions that were decided with it. Saving it is the
decision, and is done by a producer of its own: only the latest holder of that producer can decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import msgspec

from penstock.connect.push.books import (
    UNAPPLIED_MAX,
    Decision,
    EarlierDecision,
    Share,
    SinkBooks,
    SinkVote,
    from_earlier,
)
from penstock.connect.push.remote import (
    SENDING,
    STARTING,
    TELLING,
    DialStep,
    RemoteSink,
    rows_of,
)
from penstock.connect.push.worker import EncodedRow
from penstock.errors import ConnectorError, LogError, OffsetGoneError, SinkGoneError, UsageError
from penstock.failpoints import failpoint
from penstock.log.api import Commit, Committed, Log
from penstock.log.reading.read import count_from
from penstock.log.writing.commit import commit_surely, next_sequence

T = TypeVar("T")
DeliveryKind = Literal["stream", "batch"]
AT_ONCE_MAX = 8
ROUND_ROWS = 262_144
"""The most events of a partition in one transaction, if they are delivered by stream."""
VISIBLE_S = 60.0
APPLIED_S = 0.02
DECIDED = (
    "the rows are committed, and become visible once the sink and its target are available again: "
    "do not write them again"
)
RETRY_S = 0.1
PREFIX = "sink/"


class Delivered(msgspec.Struct):
    """The state of a delivery. A sink is fed either by a stream or by batches, never by both.

    `transactions` is what earlier versions saved instead of `sink`.
    """

    kind: DeliveryKind
    stream: str
    stream_id: int
    next: dict[int, int]
    transactions: dict[str, EarlierDecision] = {}
    sink: SinkBooks | None = None

    def __post_init__(self) -> None:
        if self.sink is None and self.transactions:
            self.sink = from_earlier(self.transactions, len(self.next))
        self.transactions = {}


class Delivery:
    """Takes a delivery over: its previous holder can no longer decide.

    Raises `SinkGoneError` if a worker is unavailable; what was decided is safe, and the next
    holder delivers the rest.
    """

    def __init__(self, log: Log, target: RemoteSink, stream: str, kind: DeliveryKind) -> None:
        self._log = log
        self._target = target
        self._key = f"{PREFIX}{target.query}"
        self._holder = log.hold(self._key)
        self._sequence = next_sequence(log, self._key)
        saved, made = log.progress(self._key), log.stream(stream)
        self._stream = str(made.name)
        self._at = self._begin(kind, made.id) if saved is None else _decoder.decode(saved)
        if self._at.kind != kind:
            raise UsageError(
                f"producer {target.query} has written to its sink by {self._at.kind} before: use "
                "another producer name"
            )
        if self._at.stream_id != made.id:
            raise UsageError(
                f"stream {stream} has been recreated since producer {target.query} delivered from "
                "it: use another producer name"
            )
        self._at = msgspec.structs.replace(self._at, stream=self._stream)
        self._books = self._at.sink or SinkBooks(target.workers)
        for worker in target.names():
            self._resume(worker)
        if self._books.begins_after(self._at.sink):
            self._save(msgspec.structs.replace(self._at, sink=self._books))

    def _resume(self, worker: str) -> None:
        step = self._step(STARTING)
        book = self._target.resume(worker, self._books.book(worker), step, self._reread)
        self._books = self._books.replace(worker, book)

    def _begin(self, kind: DeliveryKind, stream_id: int) -> Delivered:
        """Raises `UsageError` if another producer delivers the stream: each would get all rows."""
        for key, packed in self._log.progress_items(PREFIX).items():
            if _decoder.decode(packed).stream_id == stream_id:
                other = key.removeprefix(PREFIX)
                raise UsageError(
                    f"producer {other} already delivers stream {self._stream}: use its name, or "
                    "another stream"
                )
        firsts = {p: offsets.first for p, offsets in self._log.offsets(self._stream).items()}
        return Delivered(kind, self._stream, stream_id, firsts)

    def skip(self) -> None:
        """Skip everything in the stream that is not delivered yet: it never will be."""
        self._save(msgspec.structs.replace(self._at, next=self._ends(), sink=self._books))

    def deliver(self, after: Committed | None = None) -> int:
        """Push everything in the stream, including that commit, and wait until the target has it;
        return the number of events.

        A batch is one transaction. Raises `SinkGoneError` if a worker is unavailable, or the target
        does not apply what was decided in time.
        """
        rows = 0
        ends = self._ends_with(after)
        while True:
            goal = ends if self._at.kind == "batch" else self._bound(ends)
            if goal == self._at.next:
                self._wait_applied(0)
                return rows
            self._wait_applied(UNAPPLIED_MAX - 1)
            rows += self._deliver(goal)

    def _deliver(self, ends: dict[int, int]) -> int:
        target, step, telling = self._target, self._step(SENDING), self._step(TELLING)
        waiting = [p for p in sorted(ends) if self._at.next[p] < ends[p]]
        shares = {
            target.name(p): Share(((self._stream, p, self._at.next[p], ends[p]),)) for p in waiting
        }
        with ThreadPoolExecutor(min(len(waiting), AT_ONCE_MAX)) as threads:
            pushed = threads.map(lambda n: self._push(n, ends[n], step), waiting)
            votes = list(pushed)
        failpoint("push.voted")
        self._books = self._books.decide(votes, shares, target.place)
        self._save(msgspec.structs.replace(self._at, next=ends, sink=self._books))
        failpoint("push.decided")
        for vote in votes:
            self._tell(vote, telling)
            failpoint("push.told")
        return sum(vote.rows for vote in votes)

    def _push(self, number: int, end: int, step: DialStep) -> SinkVote:
        worker = self._target.name(number)
        start = self._books.book(worker).start
        return self._target.push(worker, self._rows(number, end), step, start)

    def _tell(self, vote: SinkVote, step: DialStep) -> None:
        """Send the decision; an error must not suggest to the writer that nothing happened."""
        patience_s = self._target.options.timeout_s if self._at.kind == "batch" else 0.0
        try:
            progress = patiently(patience_s, lambda: self._target.tell(vote, step))
        except SinkGoneError as error:
            raise SinkGoneError(f"{DECIDED} ({error})") from error
        book = self._books.book(vote.worker).without_applied(progress)
        self._books = self._books.replace(vote.worker, book)

    def _wait_applied(self, open_max: int) -> None:
        """Wait until the target lacks at most `open_max` transactions of each worker."""
        deadline = time.monotonic() + self._target.options.timeout_s
        for worker in self._target.names():
            while len(self._books.book(worker).open) > open_max:
                if time.monotonic() > deadline:
                    raise SinkGoneError(f"{DECIDED} (its target does not have them yet)")
                progress = self._target.ask(worker, self._step(STARTING))
                book = self._books.book(worker).without_applied(progress)
                self._books = self._books.replace(worker, book)
                if len(book.open) > open_max:
                    time.sleep(APPLIED_S)

    def _reread(self, decision: Decision) -> Iterator[list[EncodedRow]]:
        """Read a decision's messages again, as they were sent."""
        for _, partition, start, end in decision.share.ranges:
            try:
                for batch in self._log.read(self._stream, partition, start, end):
                    yield list(rows_of(batch))
            except OffsetGoneError as error:
                raise ConnectorError(
                    f"the sink is missing the messages of {decision.transaction}, and retention "
                    f"has removed them from stream {self._stream}: restore the sink's folder, or "
                    f"{self._target.way_out}"
                ) from error

    def _bound(self, ends: dict[int, int]) -> dict[int, int]:
        at = self._at.next
        return {
            p: min(end, self._log.advance(self._stream, p, at[p], ROUND_ROWS))
            for p, end in ends.items()
        }

    def _rows(self, partition: int, end: int) -> Iterator[list[EncodedRow]]:
        for batch in self._log.read(self._stream, partition, self._at.next[partition], end):
            yield list(rows_of(batch))

    def _ends(self) -> dict[int, int]:
        return {p: offsets.next for p, offsets in self._log.offsets(self._stream).items()}

    def _ends_with(self, after: Committed | None) -> dict[int, int]:
        """The ends of partitions, once the whole commit can be read."""
        placements = [] if after is None else after.placements
        least = [r for p in placements if p.stream == self._stream for r in p.ranges]
        deadline = time.monotonic() + VISIBLE_S
        while True:
            ends = self._ends()
            if all(ends[partition] >= first + rows for partition, first, rows in least):
                return ends
            if time.monotonic() > deadline:
                raise LogError(
                    f"a commit to {self._stream} cannot be read even after {VISIBLE_S} s"
                )
            time.sleep(RETRY_S)

    def _save(self, at: Delivered) -> None:
        progress: dict[str, bytes | None] = {self._key: msgspec.json.encode(at)}
        commit_surely(self._log, self._holder, self._sequence, Commit(progress=progress))
        self._at = at
        self._sequence += 1

    def _step(self, number: int) -> DialStep:
        return DialStep(self._holder.epoch, self._sequence, number)


def patiently(timeout_s: float, do: Callable[[], T]) -> T:
    """Call `do`, retrying for `timeout_s` seconds while the sink is unavailable."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return do()
        except SinkGoneError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def deliveries(log: Log) -> Iterator[tuple[Delivered, int]]:
    """Every delivery in the log, with the number of events still to be delivered."""
    known = {stream.id: str(stream.name) for stream in log.streams()}
    for packed in log.progress_items(PREFIX).values():
        found = _decoder.decode(packed)
        stream = known.get(found.stream_id)
        yield found, count_from(log, stream, found.next).events if stream else 0


_decoder = msgspec.json.Decoder(Delivered)
