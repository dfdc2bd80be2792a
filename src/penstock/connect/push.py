"""Pushing batches into a sink, as whoever decides about them does it: what `app.sink` and
`format("penstock.sink")` have in common.

A batch is sent, each worker makes its share durable and votes. The decision is saved in the log
before anyone hears it; then the workers are told. Whoever starts again asks every worker what it
has not heard the outcome of: commit if the decision names the transaction, else abort.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.connect.dial import DialOptions, SinkWorker
from penstock.errors import ConnectorError, SinkGoneError
from penstock.log.batch import Batch
from penstock.log.documents import documents_of
from penstock.records.event import DELETED, partitions_of

Row = tuple[bytes | None, int, bytes]
Encoder = Callable[..., bytes]
ENCODED = "_encoded"


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The last transaction of a worker that was decided to be committed, and where it ends.

    `messages` and `transactions` are how many there were so far.
    """

    transaction: str
    end: int
    messages: int = 0
    transactions: int = 0


Decided = Mapping[str, Decision]


class Step(NamedTuple):
    """When a worker is dialled: a later step takes over from an earlier one that still talks."""

    epoch: int
    batch: int
    number: int


STARTING, SENDING, TELLING = 0, 1, 2


class SinkVote(NamedTuple):
    """A sink's worker has made these bytes durable, and waits for the outcome."""

    worker: str
    transaction: str
    start: int
    end: int
    rows: int


class Target(msgspec.Struct, frozen=True):
    """A sink, and the workers that a query has there. Their number is fixed.

    `way_out` says what to do when the sink is not the one that it was.
    """

    query: str
    address: str
    workers: int
    options: DialOptions
    way_out: str

    def names(self) -> list[str]:
        return [self.name(number) for number in range(self.workers)]

    def name(self, worker: int) -> str:
        return f"{self.query}-{worker}"

    def dialled(self, worker: str, step: Step) -> SinkWorker:
        """A connection that takes over from every older one of the worker."""
        return SinkWorker(self.address, worker, (*step, time.time_ns()), self.options)

    def push(self, worker: str, batches: Iterable[list[Row]], step: Step) -> SinkVote:
        """Send a worker its share and ask for the vote.

        Unless it is yes, raises `SinkGoneError`; or `ConnectorError`, with the reason, where the
        sink says that it would refuse the same again.
        """
        with self.dialled(worker, step) as sink:
            if sink.uncommitted:
                raise SinkGoneError(
                    f"worker {worker} has not heard the outcome of {sink.uncommitted[0]} yet"
                )
            count = 0
            for rows in batches:
                sink.send(rows)
                count += len(rows)
            transaction = f"{worker}/{step.epoch}.{step.batch}"
            if not sink.vote(transaction, sink.committed):
                raise self._against(sink, step.batch)
            return SinkVote(worker, transaction, sink.committed, sink.sent, count)

    def _against(self, sink: SinkWorker, batch: int) -> ConnectorError:
        """Why a batch was voted against. Not every sink says so; what it prints may."""
        why = sink.refusal or SinkGoneError("it does not say why; what it prints may")
        return type(why)(
            f"worker {sink.worker} of the sink at {self.address} votes against batch {batch}: {why}"
        )

    def tell(self, vote: SinkVote, step: Step) -> None:
        """The decision is saved: make it visible."""
        with self.dialled(vote.worker, step) as sink:
            sink.resolve(vote.transaction, True)
            self._check(vote.worker, sink.committed, vote.end)

    def resolve_open(self, worker: str, decided: Decided, step: Step) -> None:
        """Tell a worker every outcome that it waits for.

        Raises `ConnectorError` if it then has not what was decided.
        """
        decision = decided.get(worker)
        with self.dialled(worker, step) as sink:
            for transaction in sink.uncommitted:
                is_decided = decision is not None and transaction == decision.transaction
                sink.resolve(transaction, is_decided)
            if decision is not None:
                self._check(worker, sink.committed, decision.end)

    def decided_with(self, decided: Decided, votes: Iterable[SinkVote]) -> dict[str, Decision]:
        """What is decided once these votes are committed too.

        Raises `ConnectorError` if a vote does not begin where the last decision ends.
        """
        found = dict(decided)
        for vote in votes:
            before = decided.get(vote.worker)
            if before is not None:
                self._check(vote.worker, vote.start, before.end)
            last = before or Decision("", 0)
            found[vote.worker] = Decision(
                vote.transaction, vote.end, last.messages + vote.rows, last.transactions + 1
            )
        return found

    def _check(self, worker: str, has: int, decided: int) -> None:
        if has != decided:
            raise ConnectorError(
                f"the sink at {self.address} has {has} bytes of worker {worker}, and {decided} "
                f"were committed: it is another one, or has lost some; {self.way_out}"
            )


def rows_of(
    batch: Batch, slot: int = 0, slots: int = 1, encoder: Encoder | None = None
) -> Iterator[Row]:
    """Key, time and data of each event that is the slot's: JSON, or bytes as they are, or what the
    encoder makes of its data.
    """
    whole = batch.to_arrow([*batch.data().schema.names, DELETED, "_key", "_time"])
    if encoder is not None:
        whole = whole.append_column(ENCODED, _encoded(batch, encoder))
    if slots > 1:
        homes = partitions_of(whole.column("_key"), slots, 0)
        whole = whole.filter(pc.equal(homes, slot))
    documents = documents_of(batch.stream, whole) if encoder is None else whole.column(ENCODED)
    documents = documents.fill_null(b"")  # an entry that was deleted has no data
    times = whole.column("_time").cast(pa.int64())
    columns: Iterable[Row] = zip(
        whole.column("_key").to_pylist(),
        pc.multiply(times, 1000).to_pylist(),
        documents.to_pylist(),
        strict=True,
    )
    yield from columns


def _encoded(batch: Batch, encoder: Encoder) -> pa.Array:
    made = [None if value is None else encoder(value) for value in batch.values()]
    return pa.array(made, pa.binary())
