"""A query: takes the next events of its inputs, has them handled, and commits what comes of it.

The position in the inputs is saved in the very commit that makes the output visible, so a
batch happens once or not at all, and a query that starts again goes on where that commit
says. Nothing else has to be remembered.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from penstock.app.definitions import (
    Agent,
    Definition,
    TableJoin,
    expires_by_events,
    keeps_timers,
    mixes_keys,
)
from penstock.app.pace import Pace
from penstock.app.positions import (
    Position,
    Run,
    kept_position,
    producer_name,
    query_name,
)
from penstock.app.splits import free_splits, keyed_splits, merged, ordered_splits
from penstock.app.step import Step, commit_batch, failed, told
from penstock.app.streams import AppStream
from penstock.app.tables import AppTable
from penstock.app.task import (
    TOO_LARGE,
    BatchOrder,
    Outcome,
    Range,
    Split,
)
from penstock.app.timers import EXPIRY, TIMER, Timers, event_clock
from penstock.errors import (
    LimitError,
    OffsetGoneError,
    PlanChangedError,
    UnknownObjectError,
)
from penstock.log.api import Count, Holder, Log, Offsets
from penstock.log.commit import next_sequence
from penstock.log.objects import Stream
from penstock.log.read import count_from

PIN_S = 3600.0
IDLE_WAIT_S = 0.5
Clock = Callable[[], int]


class QueryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a query takes on at once.

    `batch_rows_max` and `batch_bytes_max` bound a batch over all its inputs, and
    `batch_ms_target` is about how long one should take: a slow function gets fewer events at a
    time. `unacknowledged_max` is how many events of a partition an agent with manual
    acknowledgement may leave open; `tasks` into how many tasks work is cut that could be one.
    """

    batch_rows_max: int = 524_288
    batch_bytes_max: int = 256 << 20
    batch_ms_target: int = 10_000
    unacknowledged_max: int = 10_000
    tasks: int = 2


class Executor(Protocol):
    """Runs the splits of a batch, wherever; reports one outcome for each."""

    def run(self, batch: BatchOrder) -> list[Outcome]: ...

    def close(self) -> None: ...


class Query:
    """Definitions with the same inputs and position, run batch by batch by one holder.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        log: Log,
        run: Run,
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
        self._is_keyed = any(isinstance(d, Agent | TableJoin) for d in definitions)
        self._holder: Holder | None = None
        self.position = Position(producer=self.producer, sequence=0, next={})
        self._timers = Timers()
        self._expiries = Timers()
        """Of windows that are over when the events say so."""
        self._event_us: int | None = None
        self._pace = Pace(
            limits.batch_rows_max, limits.batch_bytes_max, limits.batch_ms_target / 1000
        )
        self._retry_at = 0.0
        self._is_busy = False
        self._is_started = False

    @property
    def producer(self) -> str:
        return producer_name(self._app, self.name)

    # Starting

    def start(self) -> None:
        """Begin, or begin again: fence an older self, then learn where it is.

        Raises `ClaimLostError` if another runner has taken one of the definitions over since. That
        is looked at before, so as not to disturb it, and after, when it can no longer happen.
        """
        self._kept_position()
        self._holder = self._log.hold(self.producer)
        self.position = self._kept_position()
        self.position.sequence = next_sequence(self._log, self.producer)
        self._load_timers()
        self._is_started = True

    def _kept_position(self) -> Position:
        found = [
            kept_position(self._log, self._run, d.name, self.producer) for d in self.definitions
        ]
        return found[0]

    def _load_timers(self) -> None:
        self._timers, self._expiries = Timers(), Timers()
        for definition in self.definitions:
            if isinstance(definition, Agent) and definition.timers is not None:
                self._load_timers_of(definition, definition.timers.name)
        self._look_at_time()

    def _load_timers_of(self, agent: Agent, table: str) -> None:
        with contextlib.suppress(UnknownObjectError):  # it has never had a timer
            for entries in self._log.snapshot(table):
                for entry in entries:
                    if entry.key[:1] == TIMER and not agent.on_timer:
                        raise PlanChangedError(
                            f"{agent.location}: agent {agent.name} has timers that are set, and no "
                            f"function for them any more: bring it back (@{agent.name}.timer); one "
                            "that does nothing lets them pass"
                        )
                    if keeps_timers(agent):
                        due_us = msgspec.msgpack.decode(entry.value)["value"]
                        self._set_timer(entry.key, due_us)

    def _set_timer(self, name: bytes, due_us: int | None) -> None:
        by_events = name[:1] == EXPIRY and any(map(expires_by_events, self.definitions))
        (self._expiries if by_events else self._timers).set(name, due_us)

    def _look_at_time(self) -> None:
        """See how far the events have come, where windows are over when they say so."""
        if any(map(expires_by_events, self.definitions)):
            ends = {name: self._log.offsets(name) for name in self._inputs}
            self._event_us = event_clock(self.position.times, ends, self.position.next)

    # Going on

    def run(self, stop: threading.Event, tell: Callable[[Step], None]) -> None:
        """Go on until `stop` is set, telling of each batch. Raises what ends it early."""
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
        """Whether everything there is has been handled."""
        return not self._is_busy and self._is_started and not self.lag() and not self._has_due()

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to do, or the timeout is over."""
        if self._has_due():
            return True
        due_us = self._timers.next_us()
        if due_us is not None:
            timeout_s = max(0.0, min(timeout_s, (due_us - self._clock()) / 1e6))
        if len(self._inputs) == 1:
            name = self._inputs[0]
            found = self._log.wait(name, self._full_position(name), timeout_s)
            return found or self._has_due()
        deadline = time.monotonic() + timeout_s
        while not (news := bool(self.lag())) and time.monotonic() < deadline:
            self._log.wait(self._inputs[0], self._full_position(self._inputs[0]), 0.02)
        return news or self._has_due()

    def _has_due(self) -> bool:
        due_us = self._timers.next_us()
        if due_us is not None and due_us <= self._clock():
            return True
        over_us = self._expiries.next_us()
        if over_us is not None and self._event_us is not None and over_us <= self._event_us:
            return True
        return bool(self.position.again) and time.monotonic() >= self._retry_at

    def _full_position(self, name: str) -> dict[int, int]:
        held = self._held(self._log.stream(name))
        return {p: max(held.get(p, 0), o.first) for p, o in self._log.offsets(name).items()}

    def _held(self, stream: Stream) -> dict[int, int]:
        """Where it is in a stream; nowhere, if the stream was dropped and made anew since."""
        name = str(stream.name)
        if self.position.ids.get(name, stream.id) != stream.id:
            return {}
        return self.position.next.get(name, {})

    def lag(self) -> Count:
        """How many events wait to be handled."""
        waiting = Count()
        for name in self._inputs:
            held = self._held(self._log.stream(name))
            waiting += count_from(self._log, name, held)
            for partition, ranges in self.position.again.get(name, {}).items():
                for range_ in ranges:
                    waiting += self._log.count(name, partition, *range_)
        return waiting

    def step(self) -> Step | None:
        """Handle the next batch, if there is anything to handle.

        1. Decide what the batch is: offsets, due timers, events to deliver again.
        2. Have it handled; tasks stage what they make.
        3. Commit the staged pieces and the new position, as one.
        """
        assert self._holder is not None  # noqa: S101  start comes first
        began = time.monotonic()
        ranges, streams = self._next_ranges()
        timers = self._due_timers()
        again = self._due_again()
        if not ranges and not timers and not again:
            return None
        order = self._order(ranges, streams, timers, again)
        try:
            outcomes = self._executor.run(order)
            if self._is_too_large(outcomes):
                self.start()  # nothing of it is left, and the next one is smaller
                return None
            self._check(outcomes)
            position = self._moved(ranges, again, outcomes, order, streams)
            committed = commit_batch(
                self._log, self._app, self.definitions, outcomes, position, order
            )
        finally:
            if order.pin is not None:
                self._log.unpin(order.pin)
        self.position = msgspec.structs.replace(position, sequence=position.sequence + 1)
        self._keep_timers(outcomes)
        self._look_at_time()
        self._settle(order, outcomes)
        done = told(self._log, order, outcomes, committed, time.monotonic() - began)
        self._pace.finished(done.rows_in, sum(o.bytes_in for o in outcomes), done.took_s)
        return done

    def _is_too_large(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether a task could not hold its part of the batch; sees to it that the next can."""
        for outcome in outcomes:
            if outcome.failure is not None and outcome.failure.code == TOO_LARGE:
                self._pace.was_too_large(outcome.rows_in, outcome.bytes_in)
                return True
        return False

    def _next_ranges(self) -> tuple[list[Range], dict[str, Stream]]:
        # Offsets first: a stream that grows in between then counts as grown.
        ends = {name: self._log.offsets(name) for name in self._inputs}
        streams = {name: self._log.stream(name) for name in self._inputs}
        ranges: list[Range] = []
        for name, offsets in ends.items():
            held = self._held(streams[name])
            share = max(1, self._pace.rows // (len(offsets) * len(self._inputs)))
            for partition, found in offsets.items():
                start = self._start(name, partition, found, held.get(partition))
                end = min(found.next, self._log.advance(name, partition, start, share))
                if end > start:
                    ranges.append(Range(name, partition, start, end))
        return ranges, streams

    def _start(self, name: str, partition: int, offsets: Offsets, at: int | None) -> int:
        """Where reading goes on; elsewhere than at `at` only if what is there is gone."""
        if at is None:
            return offsets.first
        if at >= offsets.first or name in self._on_gone_skip:
            return max(at, offsets.first)
        raise OffsetGoneError(
            f"query {self.name} is at offset {at} of {name}, partition {partition}, and retention "
            f"has removed everything before {offsets.first}: to go on there, with tables as they "
            f"are, declare the stream with on_gone='skip'; to make everything anew from what is "
            f"left, `penstock reset APP {self.name} --output clear`",
            offsets.first,
        )

    def _due_timers(self) -> list[tuple[bytes, int]]:
        due = self._timers.due(self._clock(), self._pace.rows)
        if self._event_us is not None:
            due += self._expiries.due(self._event_us, self._pace.rows)
        return due

    def _due_again(self) -> list[Range]:
        if not self.position.again or time.monotonic() < self._retry_at:
            return []
        found: list[Range] = []
        for name, partitions in self.position.again.items():
            if not self._held(self._log.stream(name)):
                continue  # they were of a stream that was dropped
            ends = self._log.offsets(name)
            for partition, ranges in partitions.items():
                for start, end in ranges:
                    start = self._start(name, partition, ends[partition], start)  # noqa: PLW2901
                    found += [Range(name, partition, start, end)] if start < end else []
        if not found:
            self.position.again = {}  # all of it is gone: nothing is left to wait for
        return found

    def _order(
        self,
        ranges: Sequence[Range],
        streams: Mapping[str, Stream],
        timers: Sequence[tuple[bytes, int]],
        again: Sequence[Range],
    ) -> BatchOrder:
        assert self._holder is not None  # noqa: S101  start comes first
        return BatchOrder(
            query=self.name,
            holder=self._holder,
            sequence=self.position.sequence,
            now_us=self._clock(),
            splits=tuple(self._splits(ranges, streams, timers, again)),
            pin=self._log.pin(PIN_S) if self._needs_pin else None,
            past=self.definitions[0].past,
            # A batch that cannot be any smaller is taken as it is.
            bytes_max=self._limits.batch_bytes_max if self._pace.rows > 1 else 0,
        )

    def _splits(
        self,
        ranges: Sequence[Range],
        streams: Mapping[str, Stream],
        timers: Sequence[tuple[bytes, int]],
        again: Sequence[Range],
    ) -> list[Split]:
        """How the batch is cut into tasks."""
        if self._is_keyed:
            return keyed_splits(ranges, streams, self._limits.tasks, timers, again)
        if mixes_keys(self.definitions[0]) and ranges:
            return ordered_splits(self._log, ranges, self._limits.tasks)
        return free_splits(self._log, ranges)

    def _settle(self, order: BatchOrder, outcomes: Sequence[Outcome]) -> None:
        """What else is to be done once the batch is committed."""

    def _check(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.failure is not None:
                raise failed(outcome.failure)

    def _moved(
        self,
        ranges: Sequence[Range],
        again: Sequence[Range],
        outcomes: Sequence[Outcome],
        order: BatchOrder,
        streams: Mapping[str, Stream],
    ) -> Position:
        """The position after this batch."""
        after = {name: dict(self._held(stream)) for name, stream in streams.items()}
        for range_ in ranges:
            after.setdefault(range_.stream, {})[range_.partition] = range_.end
        open_again = {} if again else self.position.again
        left = [place for outcome in outcomes for place in outcome.unacknowledged]
        workers = {name: dict(found) for name, found in self.position.workers.items()}
        for outcome in outcomes:
            for name, partition in outcome.partitions:
                workers.setdefault(name, {})[partition] = outcome.worker
        return Position(
            producer=self.producer,
            run=self._run.token,
            sequence=order.sequence,
            next=after,
            ids={name: stream.id for name, stream in streams.items()},
            again=self._with_open(open_again, left),
            workers=workers,
            time_us=order.now_us,
            times=self._times(outcomes, streams),
        )

    def _times(
        self, outcomes: Sequence[Outcome], streams: Mapping[str, Stream]
    ) -> dict[str, dict[int, int]]:
        found = {
            name: dict(self.position.times.get(name, {}))
            for name, stream in streams.items()
            if self._held(stream)
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
            self._retry_at = time.monotonic() + 1.0
        made: dict[str, dict[int, list[tuple[int, int]]]] = {
            name: {p: list(ranges) for p, ranges in partitions.items()}
            for name, partitions in again.items()
        }
        for name, partition, offset in left:
            made.setdefault(name, {}).setdefault(partition, []).append((offset, offset + 1))
        for name, partitions in made.items():
            for partition, found in partitions.items():
                partitions[partition] = joined = merged(found)
                if sum(end - start for start, end in joined) > self._limits.unacknowledged_max:
                    raise LimitError(
                        f"query {self.name} left more than {self._limits.unacknowledged_max} "
                        f"events of {name}, partition {partition}, unacknowledged "
                        "(unacknowledged_max): acknowledge them, or let the agent fail"
                    )
        return made

    def _keep_timers(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            for name, due_us in outcome.timers:
                self._set_timer(name, due_us)

    def late_rows(self) -> int:
        return 0

    def close(self) -> None:
        self._executor.close()
