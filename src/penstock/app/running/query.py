"""A query: takes the next events of its inputs, has them handled, and commits the results.

The position in the inputs is saved in the same commit that makes the output visible. A batch
therefore happens once or not at all, and a query that is restarted continues from that position.
Nothing else has to be remembered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from penstock.app.declaring.definitions import Definition
from penstock.app.declaring.streams import AppStream
from penstock.app.declaring.tables import AppTable
from penstock.app.running.batches import BatchReport, commit_batch, describe_batch, error_of
from penstock.app.running.due import DueTimers
from penstock.app.running.pace import Pace
from penstock.app.running.positions import (
    AppRun,
    BatchPosition,
    Mover,
    producer_name,
    query_name,
    read_own_position,
)
from penstock.app.running.splits import (
    BatchInput,
    free_splits,
    keyed_splits,
    merge_ranges,
    ordered_splits,
)
from penstock.app.tasks.task import (
    TOO_LARGE,
    BatchOrder,
    Outcome,
    Range,
    Split,
)
from penstock.errors import ClaimLostError, LimitError, OffsetGoneError
from penstock.log.api import Count, Holder, Log, Offsets
from penstock.log.declaring.objects import Stream
from penstock.log.reading.read import count_from
from penstock.log.writing.commit import next_sequence

PIN_S = 3600.0
IDLE_WAIT_S = 0.5
RETRY_S = 1.0
"""How long until an event that was not acknowledged is delivered again."""
Clock = Callable[[], int]
T = TypeVar("T")


class QueryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a query takes on at once.

    `batch_rows_max` and `batch_bytes_max` limit a batch over all its inputs, and
    `batch_ms_target` is about how long one should take: a slow function gets fewer events at a
    time. `unacknowledged_max` is how many events of a partition an agent with manual
    acknowledgement may leave unacknowledged. `tasks` is the number of tasks that work is divided
    into where it could be done by one.
    """

    batch_rows_max: int = 524_288
    batch_bytes_max: int = 256 << 20
    batch_ms_target: int = 10_000
    unacknowledged_max: int = 10_000
    tasks: int = 2


class Executor(Protocol):
    """Runs the splits of a batch, in whatever process; reports one outcome for each."""

    def run(self, batch: BatchOrder) -> list[Outcome]: ...

    def close(self) -> None: ...


class Query:
    """Definitions with the same inputs and position, run batch by batch by one holder.

    Not for use by several threads at once.
    """

    position_kind: type[BatchPosition] = BatchPosition

    def __init__(
        self,
        log: Log,
        run: AppRun,
        definitions: Sequence[Definition],
        executor: Executor,
        *,
        limits: QueryLimits = QueryLimits(),
        clock: Clock | None = None,
    ) -> None:
        self.name = query_name(definitions)
        self.definitions = tuple(definitions)
        self._log = log
        self._run = run
        self._app = run.app
        self._executor = executor
        self._limits = limits
        self._clock: Clock = clock or (lambda: time.time_ns() // 1000)
        self._inputs = list(definitions[0].triggers)
        self._needs_pin = any(
            d.reads or any(isinstance(place, AppTable) for place in d.inputs) for d in definitions
        )
        self._on_gone_skip = {
            place.name
            for place in definitions[0].inputs
            if isinstance(place, AppStream) and place.on_gone == "skip"
        }
        self._is_keyed = any(d.is_keyed for d in definitions)
        self._held: Holder | None = None
        self._sequence = 0
        self.position = self.position_kind()
        self._timers = DueTimers(definitions)
        self._pace = Pace(
            limits.batch_rows_max, limits.batch_bytes_max, limits.batch_ms_target / 1000
        )
        self._retry_at = 0.0
        self._is_busy = False
        self._is_started = False

    @property
    def producer(self) -> str:
        return producer_name(self._app, self.name)

    @property
    def _holder(self) -> Holder:
        if self._held is None:
            raise ClaimLostError(f"query {self.name} has not been started")
        return self._held

    # Starting

    def start(self) -> None:
        """Start, or start again: fence an earlier start of this query, then read its position.

        Raises `ClaimLostError` if another run has taken one of the definitions over. This is
        checked before fencing, so as not to disturb that run, and after it, when no other run can
        commit any more.
        """
        self._read_position()
        self._held = self._log.hold(self.producer)
        self.position = self._read_position()
        self._sequence = next_sequence(self._log, self.producer)
        self._timers.load(self._log)
        self._timers.look_at_events(self._log, self._inputs, self.position)
        self._is_started = True

    def _read_position(self) -> BatchPosition:
        found = [
            read_own_position(self._log, self._run, d.name, self.producer, self.position_kind)
            for d in self.definitions
        ]
        return found[0]

    # Going on

    def run(self, stop: threading.Event, tell: Callable[[BatchReport], None]) -> None:
        """Run until `stop` is set, reporting each batch to `tell`. Raises the error that ends it
        early."""
        self.start()
        while not stop.is_set():
            if self.wait(IDLE_WAIT_S) and not stop.is_set():
                self._is_busy = True
                try:
                    done = self.step()
                    if done is not None:
                        tell(done)
                finally:
                    self._is_busy = False

    def is_idle(self) -> bool:
        """Whether everything has been handled."""
        return not self._is_busy and self._is_started and not self.lag() and not self._has_due()

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to do, or until the timeout."""
        if self._has_due():
            return True
        due_us = self._timers.next_us()
        if due_us is not None:
            timeout_s = max(0.0, min(timeout_s, (due_us - self._clock()) / 1e6))
        places = {name: self._full_place(name) for name in self._inputs}
        return self._log.wait(places, timeout_s) or self._has_due()

    def _has_due(self) -> bool:
        return self._timers.has_due(self._clock()) or (
            bool(self.position.again) and time.monotonic() >= self._retry_at
        )

    def _full_place(self, name: str) -> dict[int, int]:
        place = self._place_in(self._log.stream(name))
        return {p: max(place.get(p, 0), o.first) for p, o in self._log.offsets(name).items()}

    def _place_in(self, stream: Stream) -> dict[int, int]:
        """Its offsets in a stream; none, if the stream has been dropped and created again since."""
        name = str(stream.name)
        if self.position.ids.get(name, stream.id) != stream.id:
            return {}
        return self.position.next.get(name, {})

    def lag(self) -> Count:
        """How many events are waiting to be handled."""
        waiting = Count()
        for name in self._inputs:
            waiting += count_from(self._log, name, self._place_in(self._log.stream(name)))
            for partition, ranges in self.position.again.get(name, {}).items():
                for range_ in ranges:
                    waiting += self._log.count(name, partition, *range_)
        return waiting

    def step(self) -> BatchReport | None:
        """Handle the next batch, if there is anything to handle.

        1. Decide what the batch is: offsets, due timers, events to deliver again.
        2. Have it handled; tasks stage their output.
        3. Commit the staged pieces and the new position, as one.
        """
        began = time.monotonic()
        batch = self._choose()
        if not batch:
            return None
        order = self._order(batch)
        try:
            outcomes = self._executor.run(order)
            if self._is_too_large(outcomes):
                self.start()  # discards what it staged; the next batch is smaller
                return None
            self._check(outcomes)
            position = self._position_after(batch, outcomes, order)
            committed = commit_batch(
                self._log, self._app, self.definitions, outcomes, position, order
            )
        finally:
            if order.pin is not None:
                self._log.unpin(order.pin)
        self.position = position
        self._sequence += 1
        self._timers.follow(outcomes)
        self._timers.look_at_events(self._log, self._inputs, self.position)
        self._after_commit(order, outcomes)
        done = describe_batch(self._log, order, outcomes, committed, time.monotonic() - began)
        self._pace.adapt_to(done.rows_in, sum(o.bytes_in for o in outcomes), done.took_s)
        return done

    # What a batch takes on

    def _choose(self) -> BatchInput:
        # Offsets first: if the stream grows in between, it is then seen as grown.
        ends = {name: self._log.offsets(name) for name in self._inputs}
        streams = {name: self._log.stream(name) for name in self._inputs}
        ranges: list[Range] = []
        for name, offsets in ends.items():
            place = self._place_in(streams[name])
            share = max(1, self._pace.rows // (len(offsets) * len(self._inputs)))
            for partition, found in offsets.items():
                start = self._start(name, partition, found, place.get(partition))
                end = min(found.next, self._log.advance(name, partition, start, share))
                if end > start:
                    ranges.append(Range(name, partition, start, end))
        timers = self._timers.due(self._clock(), self._pace.rows)
        return BatchInput(streams, tuple(ranges), tuple(timers), tuple(self._due_again()))

    def _start(self, name: str, partition: int, offsets: Offsets, at: int | None) -> int:
        """The offset to read from: `at`, unless the events there are gone."""
        if at is None:
            return offsets.first
        if at >= offsets.first or name in self._on_gone_skip:
            return max(at, offsets.first)
        raise OffsetGoneError(
            f"query {self.name} is at offset {at} of {name}, partition {partition}, but retention "
            f"has removed everything before offset {offsets.first}: to continue from there and "
            "keep tables as they are, declare the stream with on_gone='skip'; to rebuild its "
            "output from the remaining events, run "
            f"`penstock reset APP {self.name} --output clear`",
            offsets.first,
        )

    def _due_again(self) -> list[Range]:
        if not self.position.again or time.monotonic() < self._retry_at:
            return []
        found: list[Range] = []
        for name, partitions in self.position.again.items():
            if name not in self._inputs or not self._place_in(self._log.stream(name)):
                continue  # the stream was dropped, or this version does not read it
            ends = self._log.offsets(name)
            for partition, ranges in partitions.items():
                for start, end in ranges:
                    first = self._start(name, partition, ends[partition], start)
                    found += [Range(name, partition, first, end)] if first < end else []
        if not found:
            # All of these events are gone: nothing is left to deliver again.
            self.position.again = self._left_out(self.position.again)
        return found

    def _left_out(self, by_stream: Mapping[str, T]) -> dict[str, T]:
        """The part about inputs that this version of the app does not have, kept for one that
        does."""
        return {name: kept for name, kept in by_stream.items() if name not in self._inputs}

    def _order(self, batch: BatchInput) -> BatchOrder:
        return BatchOrder(
            query=self.name,
            holder=self._holder,
            sequence=self._sequence,
            now_us=self._clock(),
            splits=tuple(self._cut(batch)),
            pin=self._log.pin(PIN_S) if self._needs_pin else None,
            past=self.definitions[0].past,
            # A batch of one event cannot be made smaller, so it has no limit.
            bytes_max=self._limits.batch_bytes_max if self._pace.rows > 1 else 0,
        )

    def _cut(self, batch: BatchInput) -> list[Split]:
        """Divide the batch into tasks."""
        if self._is_keyed:
            return keyed_splits(batch, self._limits.tasks)
        if self.definitions[0].mixes_keys and batch.ranges:
            return ordered_splits(self._log, batch.ranges, self._limits.tasks)
        return free_splits(self._log, batch.ranges)

    # What became of it

    def _is_too_large(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether a task could not hold its part of the batch; if so, make the next one smaller."""
        for outcome in outcomes:
            if outcome.failure is not None and outcome.failure.code == TOO_LARGE:
                self._pace.shrink_after(outcome.rows_in, outcome.bytes_in)
                return True
        return False

    def _check(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.failure is not None:
                raise error_of(outcome.failure)

    def _after_commit(self, order: BatchOrder, outcomes: Sequence[Outcome]) -> None:
        """Called once the batch is committed."""

    def _position_after(
        self, batch: BatchInput, outcomes: Sequence[Outcome], order: BatchOrder
    ) -> BatchPosition:
        del order
        before = self.position
        after = self._left_out(before.next)
        after |= {name: dict(self._place_in(stream)) for name, stream in batch.streams.items()}
        for range_ in batch.ranges:
            after[range_.stream][range_.partition] = range_.end
        again = self._left_out(before.again) if batch.again else before.again
        left = [place for outcome in outcomes for place in outcome.unacknowledged]
        workers = {name: dict(found) for name, found in before.workers.items()}
        for outcome in outcomes:
            for name, partition in outcome.partitions:
                workers.setdefault(name, {})[partition] = outcome.worker
        return self.position_kind(
            mover=Mover(self.producer, self._run.token),
            next=after,
            ids={**before.ids, **{name: stream.id for name, stream in batch.streams.items()}},
            again=self._with_open(again, left),
            workers=workers,
            times=self._times(outcomes, batch.streams),
        )

    def _times(
        self, outcomes: Sequence[Outcome], streams: Mapping[str, Stream]
    ) -> dict[str, dict[int, int]]:
        found = self._left_out(self.position.times)
        found |= {
            name: dict(self.position.times.get(name, {}))
            for name, stream in streams.items()
            if self._place_in(stream)
        }
        for name, partition, time_us in (t for outcome in outcomes for t in outcome.times):
            mine = found.setdefault(name, {})
            mine[partition] = max(time_us, mine.get(partition, time_us))
        return {name: times for name, times in found.items() if times}

    def _with_open(
        self,
        again: Mapping[str, Mapping[int, list[tuple[int, int]]]],
        left: Sequence[tuple[str, int, int]],
    ) -> dict[str, dict[int, list[tuple[int, int]]]]:
        if left:
            self._retry_at = time.monotonic() + RETRY_S
        made: dict[str, dict[int, list[tuple[int, int]]]] = {
            name: {p: list(ranges) for p, ranges in partitions.items()}
            for name, partitions in again.items()
        }
        for name, partition, offset in left:
            made.setdefault(name, {}).setdefault(partition, []).append((offset, offset + 1))
        for name, partitions in made.items():
            for partition, found in partitions.items():
                partitions[partition] = merge_ranges(found)
                self._check_open(name, partition, partitions[partition])
        return made

    def _check_open(self, name: str, partition: int, ranges: Sequence[tuple[int, int]]) -> None:
        # Every offset is that of an event that was handled, so lengths are counts here.
        if sum(end - start for start, end in ranges) > self._limits.unacknowledged_max:
            raise LimitError(
                f"query {self.name} left more than {self._limits.unacknowledged_max} "
                f"events of {name}, partition {partition}, unacknowledged "
                "(unacknowledged_max): acknowledge them, or raise an error in the agent"
            )

    def late_rows(self) -> int:
        return 0

    def close(self) -> None:
        self._executor.close()
