"""Events pushed into a sink connector, each once: two-phase commit from a query.

A batch goes to the sink's workers, a task for each; every worker makes its share durable and
votes. The commit that moves the query's position names the transactions: it is the decision,
fenced like any commit. Only then are the workers told. Whatever is killed when, a query that
starts again asks every worker what it has not heard the outcome of, and tells it: commit if the
saved position names the transaction, else abort.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.app.definitions import Sinking
from penstock.app.positions import Position
from penstock.app.query import Query
from penstock.app.task import (
    BatchOrder,
    Inputs,
    Outcome,
    Range,
    SinkVote,
    Split,
)
from penstock.connect.dial import DialOptions, SinkWorker
from penstock.errors import ConnectorError, SinkGoneError
from penstock.failpoints import failpoint
from penstock.log.api import Holder, Log
from penstock.log.batch import Batch
from penstock.log.documents import documents_of
from penstock.log.objects import Stream
from penstock.records.event import DELETED, partitions_of

Row = tuple[bytes | None, int, bytes]
STARTING, SENDING, TELLING = 0, 1, 2


class SinkWork:
    """Sends a worker's share of a batch to its sink, and asks for the vote."""

    def __init__(self, app: str, definition: Sinking) -> None:
        self.name = definition.name
        self._app = app
        self._definition = definition

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        del log
        definition = self._definition
        worker = worker_name(self._app, definition, split.number)
        with dialled(definition, worker, batch.holder, batch.sequence, SENDING) as sink:
            if sink.uncommitted:
                raise SinkGoneError(
                    f"worker {worker} has not heard the outcome of {sink.uncommitted[0]} yet"
                )
            rows = 0
            for item in inputs.batches:
                found = list(rows_of(item, split))
                sink.send(found)
                rows += len(found)
            transaction = f"{worker}/{batch.holder.epoch}.{batch.sequence}"
            if not sink.vote(transaction, sink.committed):
                raise SinkGoneError(f"worker {worker} votes against batch {batch.sequence}")
            vote = SinkVote(worker, transaction, sink.committed, sink.sent)
        return Outcome(rows_out=rows, votes=(vote,))


class SinkQuery(Query):
    """A query whose batches go to a sink."""

    def start(self) -> None:
        """Begin, or begin again: whatever a worker has voted for is resolved first."""
        super().start()
        for worker in self._workers():
            self._resolve_open(worker)

    @property
    def _definition(self) -> Sinking:
        found = self.definitions[0]
        assert isinstance(found, Sinking)  # noqa: S101  what it is made of
        return found

    def _workers(self) -> list[str]:
        definition = self._definition
        return [worker_name(self._app, definition, n) for n in range(definition.workers)]

    def _resolve_open(self, worker: str) -> None:
        decided = self.position.transactions.get(worker)
        with self._dialled(worker, self.position.sequence, STARTING) as sink:
            committed, is_open = sink.committed, bool(sink.uncommitted)
            for transaction in sink.uncommitted:
                sink.resolve(transaction, decided is not None and decided[0] == transaction)
        if is_open:  # ask again what it has now
            with self._dialled(worker, self.position.sequence, STARTING) as sink:
                committed = sink.committed
        if decided is not None and committed != decided[1]:
            raise ConnectorError(
                f"the sink at {self._definition.address} has {committed} bytes of worker "
                f"{worker}, and {decided[1]} were committed: it is another one, or has lost "
                f"some; `penstock reset APP {self.name}` begins anew"
            )

    def _dialled(self, worker: str, sequence: int, step: int) -> SinkWorker:
        assert self._holder is not None  # noqa: S101  start comes first
        return dialled(self._definition, worker, self._holder, sequence, step)

    def _splits(
        self,
        ranges: Sequence[Range],
        streams: Mapping[str, Stream],
        timers: Sequence[tuple[bytes, int]],
        again: Sequence[Range],
    ) -> list[Split]:
        """A split for each worker: its partition, or its share of the keys of all of them."""
        del timers, again
        workers = self._definition.workers
        (stream,) = streams.values()
        if stream.partitions == workers and len(stream.grown) == 1:
            homes = sorted({range_.partition for range_ in ranges})
            return [
                Split(number=home, ranges=tuple(r for r in ranges if r.partition == home))
                for home in homes
            ]
        return [
            Split(number=n, ranges=tuple(ranges), slot=n, slots=workers) for n in range(workers)
        ]

    def _moved(
        self,
        ranges: Sequence[Range],
        again: Sequence[Range],
        outcomes: Sequence[Outcome],
        order: BatchOrder,
        streams: Mapping[str, Stream],
    ) -> Position:
        failpoint("push.voted")
        position = super()._moved(ranges, again, outcomes, order, streams)
        votes = [vote for outcome in outcomes for vote in outcome.votes]
        decided = {vote.worker: (vote.transaction, vote.end) for vote in votes}
        position.transactions = {**self.position.transactions, **decided}
        return position

    def _settle(self, order: BatchOrder, outcomes: Sequence[Outcome]) -> None:
        failpoint("push.decided")
        for outcome in outcomes:
            for vote in outcome.votes:
                with self._dialled(vote.worker, order.sequence, TELLING) as sink:
                    sink.resolve(vote.transaction, True)
                failpoint("push.told")


def dialled(
    definition: Sinking, worker: str, holder: Holder, sequence: int, step: int
) -> SinkWorker:
    """A connection that takes over from every older one of the worker."""
    attempt = (holder.epoch, sequence, step, time.time_ns())
    options = DialOptions(cookie=definition.cookie, timeout_s=definition.timeout_s)
    return SinkWorker(definition.address, worker, attempt, options)


def worker_name(app: str, definition: Sinking, number: int) -> str:
    return f"{app}.{definition.name}-{number}"


def rows_of(batch: Batch, split: Split) -> Iterator[Row]:
    """Key, time and data of each event that is the worker's: data as JSON, or bytes as they are."""
    whole = batch.to_arrow([*batch.data().schema.names, DELETED, "_key", "_time"])
    if split.slots > 1:
        homes = partitions_of(whole.column("_key"), split.slots, 0)
        whole = whole.filter(pc.equal(homes, split.slot))
    # An entry that was deleted has no data.
    documents = documents_of(batch.stream, whole).fill_null(b"")
    times = whole.column("_time").cast(pa.int64())
    columns: Iterable[Row] = zip(
        whole.column("_key").to_pylist(),
        pc.multiply(times, 1000).to_pylist(),
        documents.to_pylist(),
        strict=True,
    )
    yield from columns
