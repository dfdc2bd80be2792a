"""Runs an agent over the events of a split: the pure core, and staging around it."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.app.declaring.context import DEFAULT_TIMER, Context, TableView
from penstock.app.declaring.definitions import Agent
from penstock.app.declaring.entry import Entry, WindowedEntry
from penstock.app.declaring.tables import AppTable, Values, window_key
from penstock.app.declaring.windows import Window
from penstock.app.tasks.emissions import Emissions
from penstock.app.tasks.state import State
from penstock.app.tasks.task import (
    BatchOrder,
    FailedError,
    Failure,
    Inputs,
    Outcome,
    Split,
    stage,
    user_traceback,
)
from penstock.app.tasks.timers import TimerKey, unpack_timer
from penstock.errors import PenstockError, UsageError
from penstock.log.api import Log, Part, Pin
from penstock.log.batch import Batch
from penstock.log.letters import DEAD_CHARS_MAX, DeadLetter
from penstock.log.writing.compose import Composer
from penstock.records.arrow import UTC_MICROSECONDS
from penstock.records.event import (
    Event,
    Key,
    StoredEvent,
    from_microseconds,
    key_bytes,
    microseconds,
    partitions_of,
)

T = TypeVar("T")
BACKOFF_MS_MAX = 10_000


class _EventRow(NamedTuple):
    """An event as the loop sees it; the whole event is made only when it is needed."""

    batch: Batch
    row: int
    data: object
    key: bytes | None
    id: str
    event: StoredEvent[object] | None

    @property
    def stream(self) -> str:
        return str(self.batch.stream.name)


class AgentWork:
    """What an agent does with a split. One object may run many splits, one after the other."""

    def __init__(self, app: str, agent: Agent) -> None:
        self.name = agent.name
        self._source = f"{app}.{agent.name}"
        self._agent = agent

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        run = _AgentRun(log, self._agent, self._source, batch, split)
        parts = run.parts(inputs.batches)
        return Outcome(
            pieces=stage(log, batch, parts),
            rows_out=run.out.rows,
            rows_skipped=run.skipped,
            unacknowledged=tuple(run.unacknowledged),
            timers=tuple(run.timers.items()),
            times=tuple(run.times(inputs.batches)) if self._agent.expires_by_events else (),
        )


class _AgentRun:
    """One split of one agent."""

    def __init__(
        self, log: Log, agent: Agent, source: str, batch: BatchOrder, split: Split
    ) -> None:
        self._agent = agent
        self._log = log
        self._split = split
        self._now = batch.now
        self._source = source
        self._composer = Composer(source, log.limits)
        self._state = None if agent.state is None else State(log, agent.state)
        self.out = Emissions(log, agent, source)
        self._views = [_view(log, table, batch.pin) for table in agent.reads]
        self._careful = agent.on_error != "stop" or agent.retries > 0
        roles = agent.signature.arguments
        windowed = agent.state is not None and agent.state.windows is not None
        self._needs_events = windowed or not {"event", "events", "context"}.isdisjoint(roles)
        self._first_input = agent.inputs[0].name
        self.skipped = 0
        self.unacknowledged: list[tuple[str, int, int]] = []
        self.timers: dict[bytes, int | None] = {}

    def parts(self, inputs: Sequence[Batch]) -> list[Part]:
        """Call the agent for everything in the split; returns the parts to be staged."""
        for key, due_us in self._split.timers:
            self._fire(key, due_us)
        rows = self._rows(inputs)
        if self._agent.signature.is_batch:
            self._call_batches(rows)
        else:
            for row in rows:
                self._attempt((row,))
        found = [self._state_part(), *self._output_parts(), self._timer_part()]
        return [part for part in found if part is not None]

    def _output_parts(self) -> list[Part]:
        try:
            return list(self.out.parts(self._composer))
        except UsageError as error:
            place = "its output"
            raise self._error_at(place, error) from error

    def _state_part(self) -> Part | None:
        if self._state is None:
            return None
        try:
            return self._state.part(self._composer)
        except UsageError as error:
            table = cast(AppTable[object], self._agent.state)
            what = f"a value it set does not fit table {table.name}: {error}"
            raise FailedError(
                Failure(definition=self._agent.name, place=table.name, error=what, traceback="")
            ) from error

    def _rows(self, inputs: Sequence[Batch]) -> Iterator[_EventRow]:
        """The split's events in order, with the entries of their keys looked up ahead."""
        for batch in inputs:
            record = self._agent.signature.records[str(batch.stream.name)]
            keys = batch.keys()
            kept: Collection[int] = range(len(batch))
            if self._split.slots > 1:
                homes = partitions_of(keys, self._split.slots, 0).to_pylist()
                kept = {i for i, home in enumerate(homes) if home == self._split.slot}
            key_list = keys.to_pylist()
            if self._state is not None and self._agent.state and not self._agent.state.windows:
                self._state.load(_distinct(keys))
            if self._needs_events:
                for index, event in enumerate(batch.events(record)):
                    if index in kept:
                        yield _EventRow(batch, index, event.data, key_list[index], event.id, event)
                continue
            values, ids = batch.values(record), batch.ids().to_pylist()
            for index in sorted(kept):
                yield _EventRow(batch, index, values[index], key_list[index], ids[index], None)

    def times(self, inputs: Sequence[Batch]) -> Iterator[tuple[str, int, int]]:
        """The latest time of an event in each batch; times in the future are ignored."""
        now = pa.scalar(self._now, UTC_MICROSECONDS)
        for batch in inputs:
            times = batch.to_arrow(["_time"]).column(0)
            latest = pc.max(times.filter(pc.less_equal(times, now)).cast(pa.int64())).as_py()
            if latest is not None:
                yield str(batch.stream.name), batch.partition, latest

    # Calling the function

    def _call_batches(self, rows: Iterator[_EventRow]) -> None:
        """Call the function with lists of events, each of one key if the agent has a state."""
        waiting: dict[bytes | None, list[_EventRow]] = {}
        for row in rows:
            key = row.key if self._state is not None else None
            mine = waiting.setdefault(key, [])
            mine.append(row)
            if len(mine) >= self._agent.batch_rows:
                self._attempt(waiting.pop(key))
        for mine in waiting.values():
            self._attempt(mine)

    def _arguments(self, rows: Sequence[_EventRow]) -> tuple[list[object], Context | None]:
        """The arguments of the call for these events; more than one event if it takes lists."""
        context = None
        arguments: list[object] = []
        views = iter(self._views)
        for role in self._agent.signature.arguments:
            match role:
                case "data":
                    arguments.append(rows[0].data)
                case "event":
                    arguments.append(rows[0].event)
                case "datas":
                    arguments.append([row.data for row in rows])
                case "events":
                    arguments.append([row.event for row in rows])
                case "entry":
                    arguments.append(self._entry(rows[0]))
                case "view":
                    arguments.append(next(views))
                case "context":
                    last, given = rows[-1], [self._whole(row) for row in rows]
                    context = Context(
                        given[-1],
                        self._now,
                        self._show_key(last.key),
                        agent=self._source,
                        given=given,
                        origin=self._origin(last),
                    )
                    arguments.append(context)
        return arguments, context

    def _origin(self, row: _EventRow) -> str:
        """What the ids of events derived from this one are based on.

        Events of two streams may have the same id, if producers assign ids.
        """
        return row.id if row.stream == self._first_input else f"{row.stream}\0{row.id}"

    def _show_key(self, key: bytes | None) -> Key | None:
        if key is None or self._agent.state is None:
            return key
        return self._agent.state.key_of(key)

    def _entry(self, row: _EventRow) -> Entry[Any] | WindowedEntry[Any]:
        state = self._own_state()
        if row.key is None:
            raise ValueError(f"the event has no key, but table {state.table.name} requires one")
        by_events = state.table.relative_to == "event"
        return self._entry_at(row.key, lambda: self._whole(row).time if by_events else self._now)

    def _entry_at(
        self, key: bytes, time_of: Callable[[], dt.datetime]
    ) -> Entry[Any] | WindowedEntry[Any]:
        """The entry of a key; if the table has windows, the entries of the key at a time."""
        state = self._own_state()
        windows = state.table.windows
        if windows is None:
            return state.entry(key)

        def find(window: Window) -> Entry[Any]:
            own = window_key(key, window)
            if windows.expires_us is not None:
                expiry = TimerKey(own, None).pack()
                self.timers[expiry] = microseconds(window.end) + windows.expires_us
            return state.entry(own, key)

        return WindowedEntry(windows, find, time_of(), self._now, state.table.key_of(key))

    def _own_state(self) -> State:
        if self._state is None:
            raise UsageError(f"agent {self._agent.name} has no state: name a table with state=")
        return self._state

    def _whole(self, row: _EventRow) -> StoredEvent[object]:
        return _make_event(row, self._agent) if row.event is None else row.event

    def _attempt(self, rows: Sequence[_EventRow]) -> None:
        """Call the function for these events, and record those it did not acknowledge."""
        context, error, tries = self._try(self._call, rows)
        if error is not None:
            self._give_up(rows, error, tries)
        elif self._agent.manual_ack:
            self._note_unacknowledged(rows, context)

    def _call(self, rows: Sequence[_EventRow], tries: int) -> Context | None:
        if tries > 1:
            rows = [_again(row, self._agent) for row in rows]
        arguments, context = self._arguments(rows)
        self._take(self._agent.function(*arguments), self._origin(rows[-1]), context, rows[0].key)
        return context

    def _try(
        self, call: Callable[[T, int], Context | None], given: T
    ) -> tuple[Context | None, Exception | None, int]:
        """Call until it succeeds or has failed too often; the effects of a failed call are undone.

        Only errors caused by the event are retried: an error of the log fails the batch.
        """
        state = self._state if self._careful else None
        tries = 0
        while True:
            tries += 1
            if state is not None:
                state.begin()
            try:
                return call(given, tries), None, tries
            except Exception as error:
                if isinstance(error, PenstockError) and not isinstance(error, UsageError):
                    raise
                if state is not None:
                    state.undo()
                if tries > self._agent.retries:
                    return None, error, tries
                backoff_ms = self._agent.backoff_ms * 2 ** (tries - 1)
                time.sleep(min(BACKOFF_MS_MAX, backoff_ms) / 1000)

    def _take(
        self, result: object, origin: str, context: Context | None, key: bytes | None
    ) -> None:
        """Take the results of a call: all of them, or none if any is invalid."""
        made = [] if result is None else self.out.collect(result, check=self._careful)
        timers = {} if context is None or key is None else self._timers_of(context, key)
        if self._careful and self._state is not None:
            self._state.check()
        if made:
            self.out.put(made, origin)
        self.timers |= timers

    def _timers_of(self, context: Context, key: bytes) -> dict[bytes, int | None]:
        for name in context.timers:
            if name not in self._agent.on_timer:
                shown = "timer" if name == DEFAULT_TIMER else f'timer("{name}")'
                raise UsageError(
                    f"agent {self._agent.name} sets a timer but has no function for it: decorate "
                    f"one with @{self._agent.name}.{shown}"
                )
        return {
            TimerKey(key, name).pack(): None if at is None else microseconds(at)
            for name, at in context.timers.items()
        }

    def _note_unacknowledged(self, rows: Sequence[_EventRow], context: Context | None) -> None:
        done = set() if context is None else context.acknowledged
        for number, row in enumerate(rows):
            if number not in done:
                offset = row.batch.offset_of(row.row)
                self.unacknowledged.append((row.stream, row.batch.partition, offset))

    # Errors

    def _give_up(self, rows: Sequence[_EventRow], error: Exception, tries: int) -> None:
        if self._agent.on_error == "stop":
            raise self._error_of_rows(rows, error) from error
        self.skipped += len(rows)
        if self._agent.dead is not None:
            for row in rows:
                letter = self._dead_letter(row, error, tries)
                self.out.add(self._agent.dead.name, letter, self._origin(row))

    def _error_of_rows(self, rows: Sequence[_EventRow], error: Exception) -> FailedError:
        row = rows[0]
        offset = row.batch.offset_of(row.row)
        place = f"{row.stream}, partition {row.batch.partition}, offset {offset}"
        return self._error_at(place, error)

    def _error_at(self, place: str, error: Exception) -> FailedError:
        return FailedError(
            Failure(
                definition=self._agent.name,
                place=place,
                error=f"{type(error).__name__}: {error}",
                traceback=user_traceback(error),
            )
        )

    def _dead_letter(self, row: _EventRow, error: Exception, tries: int) -> DeadLetter:
        data = msgspec.json.encode(row.data, order="deterministic").decode()[:DEAD_CHARS_MAX]
        place = (row.stream, row.batch.partition, row.batch.offset_of(row.row))
        return self._letter(place, row.id, row.key, data, error, tries)

    def _dead_timer(
        self, name: str, event: Event[object], error: Exception, tries: int
    ) -> DeadLetter:
        data = msgspec.json.encode({name: event.time}).decode()
        return self._letter(("", 0, 0), event.id, event.key, data, error, tries)

    def _letter(
        self,
        place: tuple[str, int, int],
        id_: str,
        key: bytes | None,
        data: str,
        error: Exception,
        tries: int,
    ) -> DeadLetter:
        stream, partition, offset = place
        return DeadLetter(
            agent=self._agent.name,
            stream=stream,
            partition=partition,
            offset=offset,
            id=id_,
            key=None if key is None else key.decode(errors="backslashreplace"),
            data=data,
            error=f"{type(error).__name__}: {error}",
            traceback=user_traceback(error),
            tries=tries,
        )

    # Timers

    def _fire(self, packed: bytes, due_us: int) -> None:
        """Handle a due timer: call the agent's function for it, or delete an expired window."""
        self.timers[packed] = None
        key, name = timer = unpack_timer(packed)
        if name is None:
            self._own_state().entry(key, timer.own_key).delete()
            return
        own = f"{key!r}@{due_us}" if name == DEFAULT_TIMER else f"{name} {key!r}@{due_us}"
        event: Event[object] = Event(
            data=None,
            id=own,
            type="timer",
            source=self._source,
            time=from_microseconds(due_us),
            key=key,
        )
        _, error, tries = self._try(lambda fired, _: self._call_timer(name, fired), event)
        if error is not None and self._agent.on_error == "stop":
            raise self._error_at(f"{_show_timer(name)} of key {key!r}", error) from error
        self.skipped += error is not None
        if error is not None and self._agent.dead is not None:
            letter = self._dead_timer(name, event, error, tries)
            self.out.add(self._agent.dead.name, letter, event.id)

    def _call_timer(self, name: str, event: Event[object]) -> Context:
        key = cast(bytes, event.key)
        context = Context(event, self._now, self._show_key(key), agent=self._source)
        arguments: list[object] = []
        if self._state is not None:
            arguments.append(self._entry_at(key, lambda: event.time))
        self._take(self._agent.on_timer[name](*arguments, context), event.id, context, key)
        return context

    def _timer_part(self) -> Part | None:
        if not self.timers or self._agent.timers is None:
            return None
        table = State(self._log, self._agent.timers)
        table.load(self.timers)
        for name, due_us in self.timers.items():
            entry = table.entry(name)
            if due_us is None:
                entry.delete()
            else:
                entry.value = due_us
        return table.part(self._composer)


def _show_timer(name: str) -> str:
    return "the timer" if name == DEFAULT_TIMER else f"the timer {name}"


def _distinct(keys: pa.Array) -> list[bytes]:
    return [key for key in keys.unique().to_pylist() if key is not None]


def _again(row: _EventRow, agent: Agent) -> _EventRow:
    """The same event, made again: what a failed call did to its data is undone."""
    event = _make_event(row, agent)
    return row._replace(data=event.data, event=None if row.event is None else event)


def _make_event(row: _EventRow, agent: Agent) -> StoredEvent[object]:
    offset = row.batch.offset_of(row.row)
    record = agent.signature.records[row.stream]
    return next(iter(row.batch.slice_offsets(offset, offset + 1).events(record)))


def _view(log: Log, table: AppTable[object], pin: Pin | None) -> TableView[Any]:
    values = Values(table, log.stream(table.name))

    def get(key: Key) -> object:
        found = log.get(table.name, [cast(bytes, key_bytes(key))], pin)[0]
        return None if found is None else values.unpack(found.value)

    return TableView(get)
