"""Runs an agent over the events of a split: the pure core, and staging around it."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import pyarrow as pa

from penstock.app.context import UNSET, Context, TableView
from penstock.app.definitions import Agent, DeadLetter
from penstock.app.emissions import Emissions
from penstock.app.entry import Entry, WindowedEntry
from penstock.app.state import State
from penstock.app.tables import AppTable, Values, window_key
from penstock.app.task import (
    BatchOrder,
    FailedError,
    Failure,
    Outcome,
    Split,
    stage,
    user_traceback,
)
from penstock.app.windows import Window
from penstock.errors import PenstockError
from penstock.log.api import Log, Part, Pin
from penstock.log.batch import Batch
from penstock.log.compose import Composer
from penstock.records.event import (
    Event,
    Key,
    from_microseconds,
    key_bytes,
    microseconds,
    partitions_of,
)

EXPIRY = b"x"
TIMER = b"t"


class _Row(NamedTuple):
    """An event as the loop sees it; the rest of it is made when somebody asks."""

    batch: Batch
    row: int
    data: object
    key: bytes | None
    id: str


class AgentWork:
    """What an agent does with a split. One object may run many splits, one after the other."""

    def __init__(self, app: str, agent: Agent) -> None:
        self.name = agent.name
        self._source = f"{app}.{agent.name}"
        self._agent = agent

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Sequence[Batch]) -> Outcome:
        run = _Run(log, self._agent, self._source, batch, split)
        parts = run.parts(inputs)
        return Outcome(
            pieces=stage(log, batch, parts),
            rows_out=run.out.rows,
            rows_skipped=run.skipped,
            unacknowledged=tuple(run.unacknowledged),
            timers=tuple(run.timers.items()),
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
                self._call_one(row)
        found = [self._saved(), *self.out.parts(self._composer), self._timer_part()]
        return [part for part in found if part is not None]

    def _saved(self) -> Part | None:
        if self._state is None:
            return None
        try:
            return self._state.part(self._composer)
        except PenstockError as error:
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
            kept = range(len(batch))
            if self._split.slots > 1:
                homes = partitions_of(keys, self._split.slots, 0).to_pylist()
                kept = [i for i, home in enumerate(homes) if home == self._split.slot]  # type: ignore[assignment]
            key_list = keys.to_pylist()
            if self._state is not None and self._agent.state and not self._agent.state.windows:
                self._state.load(_distinct(keys) if len(kept) == len(batch) else key_list)
            values, ids = batch.values(record), batch.ids().to_pylist()
            for index in kept:
                yield _Row(batch, index, values[index], key_list[index], ids[index])

    # Calling the function

    def _call_one(self, row: _Row) -> None:
        agent = self._agent
        context = None
        arguments: list[object] = []
        for role in agent.signature.arguments:
            match role:
                case "data":
                    arguments.append(row.data)
                case "event":
                    arguments.append(_event(row, agent))
                case "entry":
                    arguments.append(self._entry(row))
                case "context":
                    context = Context(_event(row, agent), self._now, self._shown(row.key))
                    arguments.append(context)
        self._add_views(arguments)
        self._attempt([row], arguments, context)

    def _call_batches(self, rows: Iterator[_Row]) -> None:
        """Lists of events: of one key where the agent has a state, else as they come."""
        waiting: dict[bytes | None, list[_Row]] = {}
        for row in rows:
            key = row.key if self._state is not None else None
            mine = waiting.setdefault(key, [])
            mine.append(row)
            if len(mine) >= self._agent.batch_rows:
                self._call_batch(waiting.pop(key))
        for mine in waiting.values():
            self._call_batch(mine)

    def _call_batch(self, rows: list[_Row]) -> None:
        agent = self._agent
        context = None
        arguments: list[object] = []
        for role in agent.signature.arguments:
            match role:
                case "datas":
                    arguments.append([row.data for row in rows])
                case "events":
                    arguments.append([_event(row, agent) for row in rows])
                case "entry":
                    arguments.append(self._entry(rows[0]))
                case "context":
                    last = rows[-1]
                    context = Context(_event(last, agent), self._now, self._shown(last.key))
                    arguments.append(context)
        self._add_views(arguments)
        self._attempt(rows, arguments, context)

    def _add_views(self, arguments: list[object]) -> None:
        if self._views:
            views = iter(self._views)
            for at, role in enumerate(self._agent.signature.arguments):
                if role == "view":
                    arguments.insert(at, next(views))

    def _shown(self, key: bytes | None) -> Key | None:
        if key is None or self._agent.state is None:
            return key
        return self._agent.state.key_of(key)

    def _entry(self, row: _Row) -> Entry[Any] | WindowedEntry[Any]:
        state, table = self._state, self._agent.state
        assert state is not None  # noqa: S101  only agents with a state take an entry
        assert table is not None  # noqa: S101
        if row.key is None:
            raise self._failed(
                [row], ValueError(f"the event has no key, and {table.name} needs one")
            )
        if table.windows is None:
            return state.entry(row.key)
        event_time = _event(row, self._agent).time
        time_ = event_time if table.relative_to == "event" else self._now
        return self._windowed(row.key, time_)

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

    def _attempt(
        self, rows: Sequence[_Row], arguments: Sequence[object], context: Context | None
    ) -> None:
        """Call the function; on an error, undo what it did and try again, or do as `on_error`."""
        function, key = self._agent.function, rows[0].key
        undo = None
        if self._careful and self._state is not None and key is not None:
            undo = self._undoing(key)
        tries = 0
        while True:
            tries += 1
            try:
                result = function(*arguments)
                if result is not None:
                    self.out.take(result, rows[-1].id, check=self._careful)
                break
            except Exception as error:
                if undo is not None:
                    undo()
                if tries > self._agent.retries:
                    self._give_up(rows, error, tries)
                    return
                time.sleep(self._agent.backoff_ms / 1000 * 2 ** (tries - 1))
        if context is not None:
            self._note(context, key)
        if self._agent.manual_ack:
            self._note_unacknowledged(rows, context)

    def _undoing(self, key: bytes) -> Callable[[], None] | None:
        state, table = cast(State, self._state), cast(AppTable[object], self._agent.state)
        if table.windows is not None:
            return state.checkpoint()
        kept = state.keep(key)
        return lambda: state.undo(kept)

    def _note(self, context: Context, key: bytes | None) -> None:
        if context.timer_us is UNSET or key is None:
            return
        at = cast(dt.datetime | None, context.timer_us)
        self.timers[TIMER + key] = None if at is None else microseconds(at)

    def _note_unacknowledged(self, rows: Sequence[_Row], context: Context | None) -> None:
        done = set() if context is None else context.acknowledged
        for row in rows:
            place = (row.batch.partition, row.batch.first_offset + row.row)
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
        offset = row.batch.first_offset + row.row
        place = f"{row.batch.stream.name}, partition {row.batch.partition}, offset {offset}"
        return FailedError(
            Failure(
                definition=self._agent.name,
                place=place,
                error=f"{type(error).__name__}: {error}",
                traceback=user_traceback(error),
            )
        )

    def _dead_letter(self, row: _Row, error: Exception, tries: int) -> DeadLetter:
        key = row.key
        return DeadLetter(
            agent=self._agent.name,
            stream=str(row.batch.stream.name),
            partition=row.batch.partition,
            offset=row.batch.first_offset + row.row,
            id=row.id,
            key=None if key is None else key.decode(errors="backslashreplace"),
            data=msgspec.json.encode(row.data, order="deterministic").decode(),
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
            cast(State, self._state).entry(key).delete()
            return
        event: Event[object] = Event(
            data=None, id=f"{key!r}@{due_us}", type="timer", source=self._source,
            time=from_microseconds(due_us), key=key,
        )  # fmt: skip
        context = Context(event, self._now, self._shown(key), due=True)
        arguments: list[object] = []
        if self._state is not None and self._agent.state is not None:
            windowed = self._agent.state.windows is not None
            entry = self._windowed(key, event.time) if windowed else self._state.entry(key)
            arguments.append(entry)
        try:
            result = self._agent.on_timer[0](*arguments, context)
            if result is not None:
                self.out.take(result, event.id, check=self._careful)
        except Exception as error:
            place = f"the timer of key {key!r}"
            raise FailedError(
                Failure(
                    definition=self._agent.name, place=place,
                    error=f"{type(error).__name__}: {error}", traceback=user_traceback(error),
                )
            ) from error  # fmt: skip
        self._note(context, key)

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


def _event(row: _Row, agent: Agent) -> Event[object]:
    offset = row.batch.first_offset + row.row
    return next(iter(row.batch.sliced(offset, offset + 1).events(agent.signature.record)))


def _view(log: Log, table: AppTable[object], pin: Pin | None) -> TableView[Any]:
    values = Values(table, log.stream(table.name))

    def get(key: Key) -> object:
        found = log.get(table.name, [cast(bytes, key_bytes(key))], pin)[0]
        return None if found is None else values.unpack(found.value)

    return TableView(get)
