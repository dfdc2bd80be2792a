"""Events pushed into a sink connector, each once: two-phase commit from a query.

A batch goes to the sink's workers, a task for each. The commit that moves the query's position
names the transactions that they voted for: it is the decision, fenced like any commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.app.definitions import Sinking
from penstock.app.positions import Position
from penstock.app.query import Query
from penstock.app.task import (
    BatchOrder,
    FailedError,
    Failure,
    Inputs,
    Outcome,
    Range,
    Split,
    user_traceback,
)
from penstock.connect.dial import DialOptions
from penstock.connect.push import SENDING, STARTING, TELLING, Row, Step, Target, rows_of
from penstock.errors import ConnectorError, PlanChangedError
from penstock.failpoints import failpoint
from penstock.log.api import Log
from penstock.log.batch import Batch
from penstock.log.objects import Stream


class SinkWork:
    """Sends a worker's share of a batch to its sink, and asks for the vote."""

    def __init__(self, app: str, definition: Sinking) -> None:
        self.name = definition.name
        self._target = target_of(app, definition)
        self._encoder = definition.encoder

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        del log
        batches = (self._rows(item, split) for item in inputs.batches)
        step = Step(batch.holder.epoch, batch.sequence, SENDING)
        try:
            vote = self._target.push(self._target.name(split.number), batches, step)
        except ConnectorError as error:
            if error.retriable:
                raise
            raise FailedError(self._failure(error)) from error
        return Outcome(rows_out=vote.rows, votes=(vote,))

    def _rows(self, batch: Batch, split: Split) -> list[Row]:
        if self._encoder is None:
            return list(rows_of(batch, split.slot, split.slots))
        try:
            return list(rows_of(batch, split.slot, split.slots, self._encoder))
        except Exception as error:
            place = f"{batch.stream.name}[{batch.partition}] from offset {batch.first_offset} on"
            raise FailedError(
                Failure(
                    definition=self.name, place=place, error=f"{type(error).__name__}: {error}",
                    traceback=user_traceback(error),
                )
            ) from error  # fmt: skip

    def _failure(self, error: ConnectorError) -> Failure:
        place = f"the sink at {self._target.address}"
        return Failure(
            definition=self.name, place=place, error=str(error), traceback="", code=error.code
        )


class SinkQuery(Query):
    """A query whose batches go to a sink."""

    _is_settled = False

    def start(self) -> None:
        """Begin, or begin again: whatever a worker has voted for is resolved first."""
        self._is_settled = False
        super().start()
        target, step = self._target, self._step(self.position.sequence, STARTING)
        if self.position.sink_workers not in (0, target.workers):
            raise PlanChangedError(
                f"{self.name} had {self.position.sink_workers} workers, and has {target.workers} "
                f"now: the sink remembers each of them; go back, or {target.way_out}"
            )
        for worker in target.names():
            target.resolve_open(worker, self.position.transactions, step)
        self._is_settled = True

    def is_idle(self) -> bool:
        """Only once every worker has heard every outcome."""
        return self._is_settled and super().is_idle()

    @property
    def _target(self) -> Target:
        found = self.definitions[0]
        assert isinstance(found, Sinking)  # noqa: S101  what it is made of
        return target_of(self._app, found)

    def _step(self, sequence: int, number: int) -> Step:
        assert self._holder is not None  # noqa: S101  start comes first
        return Step(self._holder.epoch, sequence, number)

    def _splits(
        self,
        ranges: Sequence[Range],
        streams: Mapping[str, Stream],
        timers: Sequence[tuple[bytes, int]],
        again: Sequence[Range],
    ) -> list[Split]:
        """A split for each worker: its partition, or its share of the keys of all of them."""
        del timers, again
        workers = self._target.workers
        (stream,) = streams.values()
        if stream.partitions == workers and stream.keeps_keys_together:
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
        position.transactions = self._target.decided_with(self.position.transactions, votes)
        position.sink_workers = self._target.workers
        self._is_settled = False
        return position

    def _settle(self, order: BatchOrder, outcomes: Sequence[Outcome]) -> None:
        failpoint("push.decided")
        for outcome in outcomes:
            for vote in outcome.votes:
                self._target.tell(vote, self._step(order.sequence, TELLING))
                failpoint("push.told")
        self._is_settled = True


def target_of(app: str, definition: Sinking) -> Target:
    """The definition's sink, and its workers there."""
    options = DialOptions(cookie=definition.cookie, timeout_s=definition.timeout_s)
    query = f"{app}.{definition.name}"
    way_out = f"`penstock reset APP {definition.name}` begins anew"
    return Target(query, definition.address, definition.workers, options, way_out)
