"""The app: where streams, tables, derivations, agents and joins are declared.

Declaring does nothing: no Spark, no log. `plan` checks the whole, and a runner runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, ParamSpec, TypeVar, overload

from penstock.app import joining
from penstock.app.checks import (
    check_late,
    checked,
    declared,
    length,
    one_of,
    place_name,
    within,
)
from penstock.app.connecting import check_listening, check_sinking
from penstock.app.definitions import (
    CallableAgent,
    DeadLetters,
    Definition,
    Derivation,
    Feed,
    Listening,
    Place,
    Sinking,
)
from penstock.app.location import Location, caller, of_function
from penstock.app.signature import read_signature
from penstock.app.streams import AppStream, DerivedStream, How, OnError, OnGone
from penstock.app.tables import (
    AppTable,
    DerivedTable,
    KeyType,
    RelativeTo,
    timers_table,
    value_schema,
)
from penstock.app.windows import Duration, Windows
from penstock.connect.registry import Policy
from penstock.errors import AppError
from penstock.log.letters import DeadLetter, dead_name
from penstock.log.names import check_name
from penstock.log.objects import StreamSpec
from penstock.records.schema import Record

T = TypeVar("T")
V = TypeVar("V")
R = TypeVar("R", bound=Record)
P = ParamSpec("P")
D = TypeVar("D")
Function = Callable[..., object]

RETRIES_MAX = 100
BATCH_ROWS_MAX = 1_000_000


class App:
    """An application: `app = penstock.App("shop")`, and what is declared on it."""

    def __init__(self, name: str) -> None:
        check_name(name, "app")
        self.name = name
        self.streams: dict[str, AppStream[object]] = {}
        self.tables: dict[str, AppTable[object]] = {}
        self.definitions: dict[str, Definition] = {}

    # Streams and tables

    @overload
    def stream(
        self, name: str, record: type[R], *, key: str | None = ..., time: str | None = ...,
        watermark: Duration | None = ..., on_damage: OnError = ..., on_gone: OnGone = ...,
        **settings: object,
    ) -> AppStream[R]: ...  # fmt: skip

    @overload
    def stream(
        self, name: str, record: None = None, *, key: str | None = ..., time: str | None = ...,
        watermark: Duration | None = ..., on_damage: OnError = ..., on_gone: OnGone = ...,
        **settings: object,
    ) -> AppStream[object]: ...  # fmt: skip

    def stream(
        self,
        name: str,
        record: type[Record] | None = None,
        *,
        key: str | None = None,
        time: str | None = None,
        watermark: Duration | None = None,
        on_damage: OnError = "stop",
        on_gone: OnGone = "stop",
        **settings: object,
    ) -> AppStream[object]:
        """Declare a stream, made in the log when the app first runs.

        `watermark` is how much later than the newest event others may come; what comes later
        still is late. `on_damage` is what becomes of events that cannot be read, such as another
        program's that are no such record: `stop` what reads them, `skip` them, or tell of each in
        the stream NAME_dead (`dead-letter`). `on_gone` is what to do where retention has removed
        events before they were read: `stop`, or `skip` them and go on with what is there. Takes
        the settings of `StreamSpec` by name (partitions, retention_ms, …).
        """
        where = caller()
        name = place_name(where, name)
        one_of(where, f"stream {name}: on_damage", on_damage, OnError)
        one_of(where, f"stream {name}: on_gone", on_gone, OnGone)
        spec = declared(where, name, record, key=key, time=time, **settings)
        if watermark is not None and time is None:
            raise AppError(f"{where}: stream {name} has a watermark and no time: name its field")
        made: AppStream[object] = self.add_stream(
            AppStream(
                app=self, name=name, record=record, spec=spec, key=key, time=time,
                watermark_us=length(where, watermark, "the watermark"), location=where,
                on_damage=on_damage, on_gone=on_gone,
            )
        )  # fmt: skip
        if on_damage == "dead-letter":
            dead = self._dead_letters(name, where)
            self.define(
                DeadLetters(name=dead.name, inputs=(made,), outputs=(dead,), location=where)
            )
        return made

    def table(
        self,
        name: str,
        *,
        key: KeyType = str,
        value: type[V],
        default: V | None = None,
        window: Windows | None = None,
        relative_to: RelativeTo = "event",
        public: bool = False,
        partitions: int | None = None,
    ) -> AppTable[V]:
        """Declare a table for an agent to keep: of values, records, sets or lists.

        `default` is the value of a key that has no entry; sets and lists begin empty. With a
        `window`, a key has an entry for each window.
        """
        where = caller()
        name = place_name(where, name)
        one_of(where, f"table {name}: relative_to", relative_to, RelativeTo)
        if window is not None and window.kind == "session":
            raise AppError(
                f"{where}: table {name} has session windows, which only derived streams can have"
            )
        schema, settings = value_schema(name, value, where)
        spec = StreamSpec(
            name=name, record=schema, content="record", table=True, partitions=partitions,
            **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        checked(where, spec)
        return self.add_table(
            AppTable(
                app=self, name=name, key_type=key, value=value, default=default, spec=spec,
                location=where, windows=window, relative_to=relative_to, public=public,
            )
        )  # fmt: skip

    def feed(
        self, source: Iterable[object], to: AppStream[T], *, name: str | None = None
    ) -> AppStream[T]:
        """Fill a stream from an iterable, or from a `Channel` of this process.

        An iterable is read once, from its beginning; a run that was interrupted goes on where it
        stopped, if the iterable gives the same again. Where a stream takes its ids from the
        producer, an event's number is its id.
        """
        where = caller()
        called = name or f"{to.name}_feed"
        self.check_input(where, called, to)
        self.define(Feed(name=called, inputs=(), outputs=(to,), location=where, source=source))
        return to

    def listen(
        self,
        to: AppStream[T],
        address: str,
        *,
        name: str | None = None,
        names: Sequence[str] = (),
        cookie: str = "",
        policy: Policy = "oldest",
        on_damage: OnError | None = None,
        decoder: Callable[[bytes], object] | None = None,
    ) -> AppStream[T]:
        """Fill a stream from source connectors, which come to `host:port`, or `auto:NAME`.

        Those whose streams are called like this one are taken, with partitions or without; or
        those that fit a pattern in `names`. Elsewhere than on loopback a cookie is needed.

        `decoder` makes an event's data of a message; without, that is JSON, or bytes. Messages
        that are none, or that the stream cannot hold, end the connection, are left out, or become
        dead letters, as `on_damage` says, or else the stream's own.
        """
        where, called = caller(), name or f"{to.name}_listener"
        self.check_input(where, called, to)
        listening = Listening(
            name=called, inputs=(), outputs=(to,), location=where, address=address,
            names=tuple(names) or (to.name, f"{to.name}.*"), cookie=cookie, policy=policy,
            on_damage=on_damage or to.on_damage, decoder=decoder,
        )  # fmt: skip
        check_listening(listening)
        self.define(listening)
        return to

    # Derived streams and tables

    @overload
    def derive(
        self, *inputs: Place, record: type[R], key: str | None = ...,
        name: str | None = ..., time: str | None = ..., watermark: Duration | None = ...,
        window: Windows | None = ..., late: AppStream[object] | None = ...,
        partitions: int | None = ...,
    ) -> Callable[[Callable[P, D]], DerivedStream[R, P, D]]: ...  # fmt: skip

    @overload
    def derive(
        self, *inputs: Place, record: None = None, key: str | None = ...,
        name: str | None = ..., time: str | None = ..., watermark: Duration | None = ...,
        window: Windows | None = ..., late: AppStream[object] | None = ...,
        partitions: int | None = ...,
    ) -> Callable[[Callable[P, D]], DerivedStream[object, P, D]]: ...  # fmt: skip

    def derive(
        self,
        *inputs: Place,
        key: str | None = None,
        record: type[Record] | None = None,
        name: str | None = None,
        time: str | None = None,
        watermark: Duration | None = None,
        window: Windows | None = None,
        late: AppStream[object] | None = None,
        partitions: int | None = None,
    ) -> Callable[[Callable[P, D]], DerivedStream[object, P, D]]:
        """Make a stream of what a function of DataFrames gives: one DataFrame per input.

        With a `window`, the first input has a column `window` to group by; what comes too late
        for its window goes to `late`.
        """

        def decorate(function: Callable[P, D]) -> DerivedStream[object, P, D]:
            where = of_function(function.__code__)
            called = place_name(where, name or function.__name__)
            spec = None
            if record is not None:
                spec = declared(where, called, record, key=key, time=time, partitions=partitions)
            made: DerivedStream[object, P, D] = DerivedStream(
                app=self, name=called, record=record, spec=spec, key=key, time=time,
                watermark_us=length(where, watermark, "the watermark"), location=where,
                settings={} if partitions is None else {"partitions": partitions},
                function=function,
            )  # fmt: skip
            self._derive(called, function, inputs, made, window, late, where)
            self.add_stream(made)
            return made

        return decorate

    def derive_table(
        self,
        *inputs: Place,
        key: str | Sequence[str],
        name: str | None = None,
        window: Windows | None = None,
        late: AppStream[object] | None = None,
        public: bool = False,
    ) -> Callable[[Callable[P, D]], DerivedTable[object, P, D]]:
        """Make a table of what a function of DataFrames gives: the latest row of each key.

        `key` is a column or several. A row whose column `_deleted` is true removes its key.
        """

        def decorate(function: Callable[P, D]) -> DerivedTable[object, P, D]:
            where = of_function(function.__code__)
            called = place_name(where, name or function.__name__)
            keys = (key,) if isinstance(key, str) else tuple(key)
            if window is not None and window.kind == "session":
                raise AppError(
                    f"{where}: table {called} has session windows, which move while they are open: "
                    "derive a stream of them"
                )
            if not keys or not all(keys):
                raise AppError(f"{where}: table {called} has no key: name its columns")
            made: DerivedTable[object, P, D] = DerivedTable(
                app=self, name=called, key_type=str, value=None, default=None, spec=None,
                location=where, public=public, key=keys[0] if len(keys) == 1 else keys,
                function=function,
            )  # fmt: skip
            self._derive(called, function, inputs, made, window, late, where)
            self.add_table(made)
            return made

        return decorate

    def _derive(
        self,
        name: str,
        function: Function,
        inputs: tuple[Place, ...],
        output: Place,
        window: Windows | None,
        late: AppStream[object] | None,
        where: Location,
    ) -> None:
        if not inputs:
            raise AppError(f"{where}: {name} is derived from nothing: name a stream or a table")
        for given in inputs:
            self.check_input(where, name, given)
        if window is not None and (not isinstance(inputs[0], AppStream) or inputs[0].time is None):
            raise AppError(
                f"{where}: {name} has windows, and {inputs[0].name} no time: declare it with time="
            )
        if late is not None and window is None:
            raise AppError(f"{where}: {name} names a stream for late events and no window")
        if late is not None:
            check_late(where, name, late, inputs[0])
        outputs = (output, late) if late is not None else (output,)
        self.define(
            Derivation(name=name, inputs=inputs, outputs=outputs, location=where,
                       function=function, windows=window, late=late)
        )  # fmt: skip

    # Agents

    def agent(  # noqa: PLR0913  each is a word of its own, and most are left out
        self,
        stream: AppStream[object],
        *,
        state: AppTable[object] | None = None,
        reads: AppTable[object] | Sequence[AppTable[object]] = (),
        to: AppStream[object] | Sequence[AppStream[object]] = (),
        name: str | None = None,
        on_error: OnError = "stop",
        retries: int = 0,
        backoff: Duration = "100 ms",
        batch_rows: int = 1000,
        ack: Literal["auto", "manual"] = "auto",
    ) -> Callable[[Callable[P, D]], CallableAgent[P, D]]:
        """Have a function called for each event of a stream, in the order of its key.

        It may take its key's entry of the table `state`, tables to read, and a `Context`; what
        it yields goes to `to`, by its class where there are several. Annotated with a list, it
        is given up to `batch_rows` events at a time (of one key, if it has a state).
        """

        def decorate(function: Callable[P, D]) -> CallableAgent[P, D]:
            where = of_function(function.__code__)
            called = name or function.__name__
            self.check_input(where, called, stream)
            one_of(where, f"agent {called}: on_error", on_error, OnError)
            one_of(where, f"agent {called}: ack", ack, Literal["auto", "manual"])
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                raise AppError(f"{where}: agent {called} is async: write it as a plain function")
            views = (reads,) if isinstance(reads, AppTable) else tuple(reads)
            streams = (to,) if isinstance(to, AppStream) else tuple(to)
            for given in (*views, *streams, *([state] if state is not None else [])):
                self.check_input(where, called, given)
            if state is not None and stream.key is None:
                raise AppError(
                    f"{where}: agent {called} has a state, and {stream.name} no key: declare the "
                    f"stream with key=, or use {stream.name}.group_by(…)"
                )
            within(where, f"agent {called}: retries", retries, 0, RETRIES_MAX)
            within(where, f"agent {called}: batch_rows", batch_rows, 1, BATCH_ROWS_MAX)
            found = read_signature(called, function, stream, state, views, streams, where)
            if ack == "manual" and "context" not in found.arguments:
                raise AppError(
                    f"{where}: agent {called} has ack='manual' and no parameter annotated as "
                    "penstock.Context to acknowledge with"
                )
            dead = self._dead_letters(called, where) if on_error == "dead-letter" else None
            timers = timers_table(self, called, where) if stream.key is not None else None
            extra = [place for place in (state, dead) if place is not None]
            outputs: tuple[Place, ...] = (*streams, *extra)
            made: CallableAgent[P, D] = CallableAgent(
                name=called, inputs=(stream,), outputs=outputs, location=where, reads=views,
                function=function, signature=found, state=state, on_error=on_error,
                retries=retries, backoff_ms=(length(where, backoff, "the backoff") or 0) // 1000,
                batch_rows=batch_rows, manual_ack=ack == "manual", dead=dead, timers=timers,
            )  # fmt: skip
            self.define(made)
            return made

        return decorate

    def sink(
        self,
        stream: AppStream[object],
        address: str,
        *,
        name: str | None = None,
        workers: int = 2,
        cookie: str = "",
        timeout: Duration = "60 seconds",
        encoder: Callable[..., bytes] | None = None,
    ) -> None:
        """Push the events of a stream into a sink connector at `host:port`, or `auto:NAME`, each
        once.

        Rows go to one of `workers` connections by their key, as JSON, as the bytes they are, or
        as what `encoder` makes of an event's data. The number of workers is part of what the sink
        remembers: it must not change.
        """
        where, called = caller(), name or f"{stream.name}_sink"
        self.check_input(where, called, stream)
        sinking = Sinking(
            name=called, inputs=(stream,), outputs=(), location=where, address=address,
            workers=workers, cookie=cookie, encoder=encoder,
            timeout_s=(length(where, timeout, "the timeout") or 0) / 1e6,
        )  # fmt: skip
        check_sinking(sinking)
        self.define(sinking)

    def _dead_letters(self, of: str, where: Location) -> AppStream[object]:
        name = dead_name(of)
        spec = declared(where, name, DeadLetter)
        made: AppStream[object] = AppStream(
            app=self, name=name, record=DeadLetter, spec=spec, key=None, location=where
        )
        return self.add_stream(made)

    # Joins, called by streams and tables

    def _group_by(self, stream: AppStream[T], field: str, name: str | None) -> AppStream[T]:
        return joining.group_by(self, stream, field, name)

    def _through(self, stream: AppStream[T], name: str, partitions: int | None) -> AppStream[T]:
        return joining.through(self, stream, name, partitions)

    def _lookup(
        self, stream: AppStream[object], table: Place, how: Literal["left", "inner"],
        name: str | None,
    ) -> AppStream[object]:  # fmt: skip
        return joining.lookup(self, stream, table, how, name)

    def _join(
        self, left: AppStream[object], right: AppStream[object], on: str, within: Duration,
        how: How, name: str | None,
    ) -> AppStream[object]:  # fmt: skip
        return joining.join(self, left, right, on, within, how, name)

    def _join_tables(
        self, left: AppTable[object], right: AppTable[object], how: How, name: str | None
    ) -> AppTable[object]:
        return joining.join_tables(self, left, right, how, name)

    # Bookkeeping

    def check_input(self, where: Location, name: str, given: object) -> None:
        """Raise unless `given` is a stream or table of this app."""
        if not isinstance(given, AppStream | AppTable):
            raise AppError(
                f"{where}: {name} names {given!r}, which is neither a stream nor a table of an app"
            )
        known = self.streams.get(given.name) or self.tables.get(given.name)
        if given.app is not self or known is None:
            raise AppError(
                f"{where}: {name} uses {given.name}, which app {self.name} does not have: declare "
                "it on this app first"
            )

    def add_stream(self, stream: AppStream[T]) -> AppStream[T]:
        """Note a stream under its name; `AppError` if the name is taken."""
        self._check_new(stream.name, stream.location)
        self.streams[stream.name] = stream
        return stream

    def add_table(self, table: AppTable[V]) -> AppTable[V]:
        """Note a table under its name; `AppError` if the name is taken."""
        self._check_new(table.name, table.location)
        self.tables[table.name] = table
        return table

    def _check_new(self, name: str, where: Location) -> None:
        known = self.streams.get(name) or self.tables.get(name)
        if known is not None:
            raise AppError(f"{where}: there is a {name} already, declared at {known.location}")

    def define(self, definition: Definition) -> None:
        """Note a definition under its name; `AppError` if the name is taken."""
        known = self.definitions.get(definition.name)
        if known is not None:
            raise AppError(
                f"{definition.location}: there is a {definition.name} already, defined at "
                f"{known.location}: name one of them with name="
            )
        self.definitions[definition.name] = definition
