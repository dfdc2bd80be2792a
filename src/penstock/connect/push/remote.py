"""Pushing batches into a sink, from the coordinator's side: what `app.sink` and
`format("penstock.sink")` have in common.

A batch is sent; each worker makes its share durable and votes. The decision is saved in the log
before it is sent to anyone; then the workers are told. After a restart, the coordinator asks every
worker for transactions whose outcome it does not know: they are committed if the decision names
them, and aborted otherwise. A worker that then has less than was decided is sent the rest again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.connect.push.books import (
    Decision,
    Missing,
    SinkPlace,
    SinkProgress,
    SinkVote,
    WorkerBook,
    accept,
    find_missing,
    may_have,
)
from penstock.connect.push.worker import DialOptions, EncodedRow, SinkWorker
from penstock.errors import ConnectorError, RowsRefusedError, SinkGoneError
from penstock.failpoints import failpoint
from penstock.log.batch import Batch, documents_of
from penstock.records.event import DELETED, partitions_of

RowEncoder = Callable[..., bytes]
Reread = Callable[[Decision], Iterable[list[EncodedRow]]]
"""Reads a decision's messages from the log again, as they were sent."""
ENCODED = "_encoded"


class DialStep(NamedTuple):
    """The step at which a worker is dialled: a later one takes over from an earlier connection."""

    epoch: int
    batch: int
    number: int


STARTING, SENDING, TELLING = 0, 1, 2


class RemoteSink(msgspec.Struct, frozen=True):
    """A sink, and the workers that a query has there. Their number is fixed.

    `way_out` says what to do if it is no longer the same sink; error messages end with it.
    """

    query: str
    address: str
    workers: int
    options: DialOptions
    way_out: str

    @property
    def place(self) -> SinkPlace:
        return SinkPlace(self.address, self.way_out)

    def names(self) -> list[str]:
        return [self.name(number) for number in range(self.workers)]

    def name(self, worker: int) -> str:
        return f"{self.query}-{worker}"

    def dial(self, worker: str, step: DialStep) -> SinkWorker:
        """A connection that takes over from every older one of the worker."""
        return SinkWorker(self.address, worker, (*step, time.time_ns()), self.options)

    def push(
        self,
        worker: str,
        batches: Iterable[list[EncodedRow]],
        step: DialStep,
        start: int | None = None,
    ) -> SinkVote:
        """Send a worker its share and request its vote. `start` is that of its book.

        Unless the vote is yes, raises `SinkGoneError`; or, if the sink says that it would refuse
        the same again, `ConnectorError` with the reason, or `RowsRefusedError` if it names the
        rows.
        """
        with self.dial(worker, step) as sink:
            if sink.uncommitted:
                raise SinkGoneError(
                    f"worker {worker} does not know the outcome of {sink.uncommitted[0]} yet"
                )
            if sink.progress is None and start is not None:
                sink.sent = sink.committed = start
            count = 0
            for rows in batches:
                sink.send(rows)
                count += len(rows)
            transaction = f"{worker}/{step.epoch}.{step.batch}"
            digest = sink.digest
            if not sink.vote(transaction, sink.committed):
                raise self._explain(sink, f"batch {step.batch}")
            start, end = sink.committed, sink.sent
            return SinkVote(worker, transaction, start, end, count, digest, sink.progress)

    def _explain(self, sink: SinkWorker, what: str) -> ConnectorError:
        """Why a batch was voted against. Not every sink gives a reason; its output may."""
        why = sink.refusal or ConnectorError("it gives no reason; see its output")
        reason = f"worker {sink.worker} of the sink at {self.address} votes against {what}: {why}"
        if isinstance(why, RowsRefusedError):
            return RowsRefusedError(reason, why.refusals)
        return type(why)(reason)

    def tell(self, vote: SinkVote, step: DialStep) -> SinkProgress | None:
        """Send the decision, which has been saved; return how far the sink is afterwards."""
        with self.dial(vote.worker, step) as sink:
            sink.resolve(vote.transaction, True)
            is_told = sink.committed == vote.end
            if not is_told and (sink.progress or not may_have(vote.end, sink.committed)):
                raise ConnectorError(
                    f"the sink at {self.address} has {sink.committed} bytes of worker "
                    f"{vote.worker}, but {vote.end} bytes were committed: it is a different sink, "
                    f"or has lost data; {self.way_out}"
                )
            return sink.progress

    def ask(self, worker: str, step: DialStep) -> SinkProgress | None:
        """How far the sink is with a worker's messages."""
        with self.dial(worker, step) as sink:
            return sink.progress

    def resume(self, worker: str, book: WorkerBook, step: DialStep, reread: Reread) -> WorkerBook:
        """Send a worker every outcome that it awaits, and the committed messages that it is
        missing; return the new book.

        Raises `ConnectorError` if it has other data, or the missing messages cannot be read again.
        """
        with self.dial(worker, step) as sink:
            for transaction in sink.uncommitted:
                sink.resolve(transaction, book.has_decided(transaction))
            book = accept(book, worker, sink.committed, sink.progress, self.place)
            for missing in find_missing(book, worker, sink.progress, self.place):
                self._send_again(sink, missing, reread)
                failpoint("push.again")
            return book.without_applied(sink.progress)

    def _send_again(self, sink: SinkWorker, missing: Missing, reread: Reread) -> None:
        decision, skip = missing
        sink.sent = decision.start
        count = 0
        for rows in reread(decision):
            sink.send_from(rows, max(0, skip - count))
            count += len(rows)
        found = (sink.sent, count, sink.digest)
        if found != (decision.end, decision.messages, decision.digest):
            raise ConnectorError(
                f"the sink at {self.address} lacks the messages of {decision.transaction}, but "
                "reading them from the log again does not give what was sent: it gives "
                f"{count} messages up to byte {sink.sent}, and {decision.messages} up to "
                f"{decision.end} were sent; the encoder or the stream's record has changed, or "
                "events were removed: restore the sink's folder or the earlier version of the "
                f"app, or {self.way_out}"
            )
        if not sink.vote(decision.transaction, sink.committed):
            raise self._explain(sink, decision.transaction)
        sink.resolve(decision.transaction, True)


def rows_of(
    batch: Batch, slot: int = 0, slots: int = 1, encoder: RowEncoder | None = None
) -> Iterator[EncodedRow]:
    """Key, time and data of each event in the slot. Data is JSON, or unchanged bytes, or the result
    of the encoder.
    """
    names = [*batch.data().schema.names, DELETED, "_key", "_time"]
    extra = {} if encoder is None else {ENCODED: _encode_all(batch, encoder)}
    whole = slot_rows(batch, slot, slots, names, extra)
    documents = documents_of(batch.stream, whole) if encoder is None else whole.column(ENCODED)
    documents = documents.fill_null(b"")  # a deleted entry has no data
    times = whole.column("_time").cast(pa.int64())
    columns: Iterable[EncodedRow] = zip(
        whole.column("_key").to_pylist(),
        pc.multiply(times, 1000).to_pylist(),
        documents.to_pylist(),
        strict=True,
    )
    yield from columns


def slot_rows(
    batch: Batch,
    slot: int,
    slots: int,
    names: Sequence[str],
    extra: Mapping[str, pa.Array] | None = None,
) -> pa.RecordBatch:
    """Columns of the events whose key is in the slot; the key must be among the columns."""
    whole = batch.to_arrow(names)
    for name, column in (extra or {}).items():
        whole = whole.append_column(name, column)
    if slots == 1:
        return whole
    return whole.filter(pc.equal(partitions_of(whole.column("_key"), slots, 0), slot))


def leave_out(
    batches: Iterable[list[EncodedRow]], numbers: Container[int]
) -> Iterator[list[EncodedRow]]:
    """The rows except those with these numbers, counted over all batches."""
    first = 0
    for rows in batches:
        yield [row for number, row in enumerate(rows, first) if number not in numbers]
        first += len(rows)


def _encode_all(batch: Batch, encoder: RowEncoder) -> pa.Array:
    made = [None if value is None else encoder(value) for value in batch.values()]
    return pa.array(made, pa.binary())
