"""Runs an agent over the events of a split: the pure core, and staging around it."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.app.context import UNSET, Context, TableView
from penstock.app.definitions import Agent, expires_by_events
from penstock.app.emissions import Emissions
from penstock.app.entry import Entry, WindowedEntry
from penstock.app.state import State
from penstock.app.tables import AppTable, Values, window_key, without_window
from penstock.app.task import (
    BatchOrder,
    FailedError,
    Failure,
    Inputs,
    Outcome,
    Split,
    stage,
    user_traceback,
)
from penstock.app.timers import EXPIRY, TIMER
from penstock.app.windows import Window
from penstock.errors import PenstockError, UsageError
from penstock.log.api import Log, Part, Pin
from penstock.log.batch import Batch
from penstock.log.compose import Composer
from penstock.log.letters import DEAD_CHARS_MAX, DeadLetter
from penstock.records.arrow import UTC_MICROSECONDS
from penstock.records.event import (
    Event,
    Key,
    from_microseconds,
    key_bytes,
    microseconds,
    partitions_of,
)

T = TypeVar("T")
BACKOFF_MS_MAX = 10_000


class _Row(NamedTuple):
    """An event as the loop sees it; the rest of it is made when somebody asks."""

    batch: Batch
    row: int
    data: object
    key: bytes | None
    id: str
    event: Event[object] | None


class AgentWork:
    """What an agent does with a split. One object may run many splits, one after the other."""

    def __init__(self, app: str, agent: Agent) -> None:
        self.name = agent.name
        self._source = f"{app}.{agent.name}"
        self._agent = agent

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        run = _Run(log, self._agent, self._source, batch, split)
        parts = run.parts(inputs.batches)
        return Outcome(
            pieces=stage(log, batch, parts),
            rows_out=run.out.rows,
            rows_skipped=run.skipped,
            unacknowledged=tuple(run.unacknowledged),
            timers=tuple(run.timers.items()),
            times=tuple(run.times(inputs.batches)) if expires_by_events(self._agent) else (),
        )


class _Run:
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
        self.skipped = 0
        self.unacknowledged: list[tuple[str, int, int]] = []
        self.timers: dict[bytes, int | None] = {}

    def parts(self, inputs: Sequence[Batch]) -> list[Part]:
        """Call the agent for everything in the split; what is to be staged."""
        for key, due_us in self._split.timers:
            self._fire(key, due_us)
        rows = self._rows(inputs)
        if self._agent.signature.is_batch:
            self._call_batches(rows)
        else:
            for row in rows:
                self._attempt((row,))
        found = [self._saved(), *self._sent(), self._timer_part()]
        return [part for part in found if part is not None]

    def _sent(self) -> list[Part]:
        try:
            return list(self.out.parts(self._composer))
        except UsageError as error:
            place = "what it sends"
            raise self._failed_at(place, error) from error

    def _saved(self) -> Part | None:
        if self._state is None:
            return None
        try:
            return self._state.part(self._composer)
        except UsageError as error:
            table = cast(AppTable[object], self._agent.state)
            what = f"what it left in table {table.name} is not what the table holds: {error}"
            raise FailedError(
                Failure(definition=self._agent.name, place=table.name, error=what, traceback="")
            ) from error

    def _rows(self, inputs: Sequence[Batch]) -> Iterator[_Row]:
        """The split's events in order, with the entries of their keys looked up ahead."""
        record = self._agent.signature.record
        for batch in inputs:
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
                        yield _Row(batch, index, event.data, key_list[index], event.id, event)
                continue
            values, ids = batch.values(record), batch.ids().to_pylist()
            for index in sorted(kept):
                yield _Row(batch, index, values[index], key_list[index], ids[index], None)

    def times(self, inputs: Sequence[Batch]) -> Iterator[tuple[str, int, int]]:
        """The latest time of an event in each batch; one from the future tells nothing."""
        now = pa.scalar(self._now, UTC_MICROSECONDS)
        for batch in inputs:
            times = batch.to_arrow(["_time"]).column(0)
            latest = pc.max(times.filter(pc.less_equal(times, now)).cast(pa.int64())).as_py()
            if latest is not None:
                yield str(batch.stream.name), batch.partition, latest

    # Calling the function

    def _call_batches(self, rows: Iterator[_Row]) -> None:
        """Lists of events: of one key where the agent has a state, else as they come."""
        waiting: dict[bytes | None, list[_Row]] = {}
        for row in rows:
            key = row.key if self._state is not None else None
            mine = waiting.setdefault(key, [])
            mine.append(row)
            if len(mine) >= self._agent.batch_rows:
                self._attempt(waiting.pop(key))
        for mine in waiting.values():
            self._attempt(mine)

    def _arguments(self, rows: Sequence[_Row]) -> tuple[list[object], Context | None]:
        """What the function is called with for these events: several, if it takes lists."""
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
                    last = rows[-1]
                    assert last.event is not None  # noqa: S101  made for agents with a context
                    context = Context(
                        last.event, self._now, self._shown(last.key), agent=self._source,
                        given=[cast(Event[object], row.event) for row in rows],
                    )  # fmt: skip
                    arguments.append(context)
        return arguments, context

    def _shown(self, key: bytes | None) -> Key | None:
        if key is None or self._agent.state is None:
            return key
        return self._agent.state.key_of(key)

    def _entry(self, row: _Row) -> Entry[Any] | WindowedEntry[Any]:
        state, table = self._state, self._agent.state
        assert state is not None  # noqa: S101  only agents with a state take an entry
        assert table is not None  # noqa: S101
        if row.key is None:
            raise ValueError(f"the event has no key, and table {table.name} needs one")
        if table.windows is None:
            return state.entry(row.key)
        assert row.event is not None  # noqa: S101  made for agents with windows
        return self._windowed(
            row.key, row.event.time if table.relative_to == "event" else self._now
        )

    def _windowed(self, key: bytes, time_: dt.datetime) -> WindowedEntry[Any]:
        state, table = cast(State, self._state), cast(AppTable[object], self._agent.state)
        windows = table.windows
        assert windows is not None  # noqa: S101  asked by the caller

        def find(window: Window) -> Entry[Any]:
            own = window_key(key, window)
            if windows.expires_us is not None:
                self.timers[EXPIRY + own] = microseconds(window.end) + windows.expires_us
            return state.entry(own, key)

        return WindowedEntry(windows, find, time_, self._now, table.key_of(key))

    def _attempt(self, rows: Sequence[_Row]) -> None:
        """Call the function for these events, and note which of them it did not acknowledge."""
        context, error, tries = self._try(self._call, rows)
        if error is not None:
            self._give_up(rows, error, tries)
        elif self._agent.manual_ack:
            self._note_unacknowledged(rows, context)

    def _call(self, rows: Sequence[_Row], tries: int) -> Context | None:
        if tries > 1:
            rows = [_again(row, self._agent) for row in rows]
        arguments, context = self._arguments(rows)
        self._take(self._agent.function(*arguments), rows[-1].id, context, rows[0].key)
        return context

    def _try(
        self, call: Callable[[T, int], Context | None], given: T
    ) -> tuple[Context | None, Exception | None, int]:
        """Call until it succeeds or has failed too often; what a failed call did is undone.

        Only the event's own failure counts as one: what goes wrong with the log fails the batch.
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

    def _take(self, result: object, id_: str, context: Context | None, key: bytes | None) -> None:
        """What a call gave: all of it, or, if any of it is wrong, nothing."""
        made = [] if result is None else self.out.collect(result, check=self._careful)
        timer = UNSET
        if context is not None and context.timer_us is not UNSET and key is not None:
            at = cast(dt.datetime | None, context.timer_us)
            timer = None if at is None else microseconds(at)
            if not self._agent.on_timer:
                raise UsageError(
                    f"agent {self._agent.name} sets a timer and has no function for it"
                )
        if self._careful and self._state is not None:
            self._state.check()
        if made:
            self.out.put(made, id_)
        if timer is not UNSET and key is not None:
            self.timers[TIMER + key] = cast(int | None, timer)

    def _note_unacknowledged(self, rows: Sequence[_Row], context: Context | None) -> None:
        done = set() if context is None else context.acknowledged
        for row in rows:
            place = (row.batch.partition, row.batch.offset_of(row.row))
            if place not in done:
                self.unacknowledged.append((str(row.batch.stream.name), *place))

    # Errors

    def _give_up(self, rows: Sequence[_Row], error: Exception, tries: int) -> None:
        if self._agent.on_error == "stop":
            raise self._failed(rows, error) from error
        self.skipped += len(rows)
        if self._agent.dead is not None:
            for row in rows:
                self.out.add(self._agent.dead.name, self._dead_letter(row, error, tries), row.id)

    def _failed(self, rows: Sequence[_Row], error: Exception) -> FailedError:
        row = rows[0]
        offset = row.batch.offset_of(row.row)
        place = f"{row.batch.stream.name}, partition {row.batch.partition}, offset {offset}"
        return self._failed_at(place, error)

    def _failed_at(self, place: str, error: Exception) -> FailedError:
        return FailedError(
            Failure(
                definition=self._agent.name,
                place=place,
                error=f"{type(error).__name__}: {error}",
                traceback=user_traceback(error),
            )
        )

    def _dead_letter(self, row: _Row, error: Exception, tries: int) -> DeadLetter:
        data = msgspec.json.encode(row.data, order="deterministic").decode()[:DEAD_CHARS_MAX]
        place = (str(row.batch.stream.name), row.batch.partition, row.batch.offset_of(row.row))
        return self._letter(place, row.id, row.key, data, error, tries)

    def _dead_timer(self, event: Event[object], error: Exception, tries: int) -> DeadLetter:
        data = msgspec.json.encode({"timer": event.time}).decode()
        return self._letter(("", 0, 0), event.id, event.key, data, error, tries)

    def _letter(
        self, place: tuple[str, int, int], id_: str, key: bytes | None, data: str,
        error: Exception, tries: int,
    ) -> DeadLetter:  # fmt: skip
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

    def _fire(self, name: bytes, due_us: int) -> None:
        """A timer is due: call the agent's function for it, or forget an expired window."""
        self.timers[name] = None
        key = name[1:]
        if name[:1] == EXPIRY:
            cast(State, self._state).entry(key, without_window(key)[0]).delete()
            return
        event: Event[object] = Event(
            data=None, id=f"{key!r}@{due_us}", type="timer", source=self._source,
            time=from_microseconds(due_us), key=key,
        )  # fmt: skip
        _, error, tries = self._try(self._call_timer, event)
        if error is not None and self._agent.on_error == "stop":
            raise self._failed_at(f"the timer of key {key!r}", error) from error
        self.skipped += error is not None
        if error is not None and self._agent.dead is not None:
            self.out.add(self._agent.dead.name, self._dead_timer(event, error, tries), event.id)

    def _call_timer(self, event: Event[object], tries: int) -> Context:
        del tries
        key = cast(bytes, event.key)
        context = Context(event, self._now, self._shown(key), agent=self._source)
        arguments: list[object] = []
        if self._state is not None and self._agent.state is not None:
            windowed = self._agent.state.windows is not None
            entry = self._windowed(key, event.time) if windowed else self._state.entry(key)
            arguments.append(entry)
        self._take(self._agent.on_timer[0](*arguments, context), event.id, context, key)
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


def _distinct(keys: pa.Array) -> list[bytes]:
    return [key for key in keys.unique().to_pylist() if key is not None]


def _again(row: _Row, agent: Agent) -> _Row:
    """The same event made anew: what the failed call did to its data is undone."""
    offset = row.batch.offset_of(row.row)
    event = next(iter(row.batch.sliced(offset, offset + 1).events(agent.signature.record)))
    return row._replace(data=event.data, event=None if row.event is None else event)


def _view(log: Log, table: AppTable[object], pin: Pin | None) -> TableView[Any]:
    values = Values(table, log.stream(table.name))

    def get(key: Key) -> object:
        found = log.get(table.name, [cast(bytes, key_bytes(key))], pin)[0]
        return None if found is None else values.unpack(found.value)

    return TableView(get)
