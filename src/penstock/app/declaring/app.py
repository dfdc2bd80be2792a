"""The app: where streams, tables, derivations, agents and joins are declared.

Declaring has no effects: it needs neither Spark nor a log. `plan` checks the app as a whole, and a
runner runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, ParamSpec, TypeVar, overload

from penstock.app.declaring import joins
from penstock.app.declaring.agents import AgentOptions, declare_agent
from penstock.app.declaring.checks import (
    check_declaration,
    check_word,
    declare_stream,
    length,
    place_name,
)
from penstock.app.declaring.connectors import check_listening, check_sinking
from penstock.app.declaring.definitions import (
    CallableAgent,
    DeadLetters,
    Definition,
    Feed,
    Listening,
    Sinking,
    StreamOrTable,
)
from penstock.app.declaring.derivations import (
    DerivedFrom,
    StreamShape,
    declare_derived_stream,
    declare_derived_table,
)
from penstock.app.declaring.location import Location, caller
from penstock.app.declaring.streams import AppStream, DerivedStream, How, OnError, OnGone
from penstock.app.declaring.tables import (
    AppTable,
    DerivedTable,
    KeyType,
    RelativeTo,
    value_schema,
)
from penstock.app.declaring.windows import Duration, Windows
from penstock.connect.hosts.registry import Policy
from penstock.connect.push.books import UNAPPLIED_MAX
from penstock.errors import AppError
from penstock.log.declaring.names import check_name
from penstock.log.declaring.objects import StreamSpec
from penstock.log.letters import DeadLetter, dead_name
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
    """An application, `app = penstock.App("shop")`, and everything declared on it."""

    def __init__(self, name: str) -> None:
        check_name(name, "app")
        self.name = name
        self.streams: dict[str, AppStream[object]] = {}
        self.tables: dict[str, AppTable[object]] = {}
        self.definitions: dict[str, Definition] = {}

    # Streams and tables

    @overload
    def stream(
        self,
        name: str,
        record: type[R],
        *,
        key: str | None = ...,
        time: str | None = ...,
        watermark: Duration | None = ...,
        on_damage: OnError = ...,
        on_gone: OnGone = ...,
        **settings: object,
    ) -> AppStream[R]: ...

    @overload
    def stream(
        self,
        name: str,
        record: None = None,
        *,
        key: str | None = ...,
        time: str | None = ...,
        watermark: Duration | None = ...,
        on_damage: OnError = ...,
        on_gone: OnGone = ...,
        **settings: object,
    ) -> AppStream[object]: ...

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
        """Declare a stream, which is created in the log when the app first runs.

        `watermark` is how far behind the newest event other events may arrive; an event further
        behind is late. `on_damage` says what happens to events that cannot be read, such as
        another program's events that do not match the record: `stop` whatever reads them, `skip`
        them, or write a dead letter for each to the stream NAME_dead (`dead-letter`). `on_gone`
        says what happens if retention has removed events before they were read: `stop`, or `skip`
        them and continue with the events that remain. The settings of `StreamSpec` (partitions,
        retention_ms, …) may be given as further keyword arguments.
        """
        where = caller()
        name = place_name(where, name)
        check_word(where, f"stream {name}: on_damage", on_damage, OnError)
        check_word(where, f"stream {name}: on_gone", on_gone, OnGone)
        spec = declare_stream(where, name, record, key=key, time=time, **settings)
        if watermark is not None and time is None:
            raise AppError(
                f"{where}: stream {name} has a watermark but no time field: name one with time="
            )
        made: AppStream[object] = self.add_stream(
            AppStream(
                app=self,
                name=name,
                record=record,
                spec=spec,
                key=key,
                time=time,
                watermark_us=length(where, watermark, "the watermark"),
                location=where,
                on_damage=on_damage,
                on_gone=on_gone,
            )
        )
        if on_damage == "dead-letter":
            dead = self.dead_letters(name, where)
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
        """Declare a table that an agent maintains, of values, records, sets or lists.

        `default` is the value of a key that has no entry; sets and lists start empty. With a
        `window`, a key has one entry for each window.
        """
        where = caller()
        name = place_name(where, name)
        check_word(where, f"table {name}: relative_to", relative_to, RelativeTo)
        if window is not None and window.kind == "session":
            raise AppError(
                f"{where}: table {name} has session windows, which only derived streams can have: "
                "use tumbling or hopping windows"
            )
        schema, settings = value_schema(name, value, where)
        spec = StreamSpec(
            name=name,
            record=schema,
            content="record",
            table=True,
            partitions=partitions,
            **settings,  # type: ignore[arg-type]
        )
        check_declaration(where, spec)
        return self.add_table(
            AppTable(
                app=self,
                name=name,
                key_type=key,
                value=value,
                default=default,
                spec=spec,
                location=where,
                windows=window,
                relative_to=relative_to,
                public=public,
            )
        )

    def feed(
        self, source: Iterable[object], to: AppStream[T], *, name: str | None = None
    ) -> AppStream[T]:
        """Fill a stream from an iterable, or from a `Channel` of this process.

        An iterable is read once, from its beginning. A run that was interrupted continues where it
        stopped, provided that the iterable yields the same items again. If the stream takes its
        ids from the producer, the id of an event is its number.
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
        """Fill a stream from source connectors, which connect to `host:port` or `auto:NAME`.

        A connector is accepted if its stream has the name of this one, with or without a
        partition, or matches a pattern in `names`. An address that is not on loopback requires a
        cookie.

        `decoder` turns a message into the data of an event; without it, messages are JSON, or
        bytes. A message that cannot be decoded, or that the stream cannot hold, ends the
        connection, is skipped, or becomes a dead letter, as `on_damage` says, which defaults to
        that of the stream.
        """
        where, called = caller(), name or f"{to.name}_listener"
        self.check_input(where, called, to)
        listening = Listening(
            name=called,
            inputs=(),
            outputs=(to,),
            location=where,
            address=address,
            names=tuple(names) or (to.name, f"{to.name}.*"),
            cookie=cookie,
            policy=policy,
            on_damage=on_damage or to.on_damage,
            decoder=decoder,
        )
        check_listening(listening)
        self.define(listening)
        return to

    # Derived streams and tables

    @overload
    def derive(
        self,
        *inputs: StreamOrTable,
        record: type[R],
        key: str | None = ...,
        name: str | None = ...,
        time: str | None = ...,
        watermark: Duration | None = ...,
        window: Windows | None = ...,
        late: AppStream[object] | None = ...,
        partitions: int | None = ...,
    ) -> Callable[[Callable[P, D]], DerivedStream[R, P, D]]: ...

    @overload
    def derive(
        self,
        *inputs: StreamOrTable,
        record: None = None,
        key: str | None = ...,
        name: str | None = ...,
        time: str | None = ...,
        watermark: Duration | None = ...,
        window: Windows | None = ...,
        late: AppStream[object] | None = ...,
        partitions: int | None = ...,
    ) -> Callable[[Callable[P, D]], DerivedStream[object, P, D]]: ...

    def derive(
        self,
        *inputs: StreamOrTable,
        key: str | None = None,
        record: type[Record] | None = None,
        name: str | None = None,
        time: str | None = None,
        watermark: Duration | None = None,
        window: Windows | None = None,
        late: AppStream[object] | None = None,
        partitions: int | None = None,
    ) -> Callable[[Callable[P, D]], DerivedStream[object, P, D]]:
        """Make a stream of the DataFrame that a function returns; it takes one for each input.

        With a `window`, the first input has a column `window` to group by, and events that arrive
        too late for their window go to `late`.
        """

        source = DerivedFrom(inputs, window, late)
        shape = StreamShape(record, key, time, watermark, partitions)
        return lambda function: declare_derived_stream(self, function, name, source, shape)

    def derive_table(
        self,
        *inputs: StreamOrTable,
        key: str | Sequence[str],
        name: str | None = None,
        window: Windows | None = None,
        late: AppStream[object] | None = None,
        public: bool = False,
    ) -> Callable[[Callable[P, D]], DerivedTable[object, P, D]]:
        """Make a table of the DataFrame that a function returns: the latest row of each key.

        The function takes one DataFrame for each input. `key` is a column or several. A row whose
        column `_deleted` is true removes its key.
        """

        keys = (key,) if isinstance(key, str) else tuple(key)
        source = DerivedFrom(inputs, window, late)
        return lambda function: declare_derived_table(
            self, function, name, source, keys, public=public
        )

    # Agents

    def agent(  # noqa: PLR0913  each is independent, and most are usually omitted
        self,
        *streams: AppStream[object],
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
        """Call a function for each event of one or more streams, in order within each key.

        Besides the event, the function may take its key's entry in the table `state`, tables to
        read, and a `Context`. The events it yields go to `to`; if that names several streams, each
        goes to the one that holds its class. If its parameter is annotated as a list, the function
        is given up to `batch_rows` events at a time (all of one key, if it has a state).
        """

        asked = AgentOptions(
            streams=streams,
            state=state,
            reads=(reads,) if isinstance(reads, AppTable) else tuple(reads),
            to=(to,) if isinstance(to, AppStream) else tuple(to),
            name=name,
            on_error=on_error,
            retries=retries,
            backoff=backoff,
            batch_rows=batch_rows,
            ack=ack,
        )
        return lambda function: declare_agent(self, function, asked)

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
        unapplied_max: int = UNAPPLIED_MAX,
    ) -> None:
        """Push the events of a stream exactly once into a sink connector at `host:port` or
        `auto:NAME`.

        Each row goes to one of `workers` connections, chosen by its key: as JSON, as bytes
        unchanged, or as what `encoder` returns for the event's data. The sink remembers the number
        of workers, so it must not change. While `unapplied_max` transactions of a worker are
        decided but not yet in the sink's target, no more are pushed.
        """
        where, called = caller(), name or f"{stream.name}_sink"
        self.check_input(where, called, stream)
        sinking = Sinking(
            name=called,
            inputs=(stream,),
            outputs=(),
            location=where,
            address=address,
            workers=workers,
            cookie=cookie,
            encoder=encoder,
            timeout_s=(length(where, timeout, "the timeout") or 0) / 1e6,
            unapplied_max=unapplied_max,
        )
        check_sinking(sinking)
        self.define(sinking)

    def dead_letters(self, of: str, where: Location) -> AppStream[object]:
        """Declare the stream that holds the dead letters of a stream or an agent."""
        name = dead_name(of)
        spec = declare_stream(where, name, DeadLetter)
        made: AppStream[object] = AppStream(
            app=self, name=name, record=DeadLetter, spec=spec, key=None, location=where
        )
        return self.add_stream(made)

    # Joins, called by streams and tables

    def _group_by(self, stream: AppStream[T], field: str, name: str | None) -> AppStream[T]:
        return joins.group_by(self, stream, field, name)

    def _through(self, stream: AppStream[T], name: str, partitions: int | None) -> AppStream[T]:
        return joins.through(self, stream, name, partitions)

    def _lookup(
        self,
        stream: AppStream[object],
        table: StreamOrTable,
        how: Literal["left", "inner"],
        name: str | None,
    ) -> AppStream[object]:
        return joins.lookup(self, stream, table, how, name)

    def _join(
        self,
        left: AppStream[object],
        right: AppStream[object],
        on: str,
        within: Duration,
        how: How,
        name: str | None,
    ) -> AppStream[object]:
        return joins.join(self, left, right, on, within, how, name)

    def _join_tables(
        self, left: AppTable[object], right: AppTable[object], how: How, name: str | None
    ) -> AppTable[object]:
        return joins.join_tables(self, left, right, how, name)

    # Bookkeeping

    def check_input(self, where: Location, name: str, given: object) -> None:
        """Raise unless `given` is a stream or table of this app."""
        if not isinstance(given, AppStream | AppTable):
            raise AppError(
                f"{where}: {name} is given {given!r}, which is neither a stream nor a table of an "
                "app"
            )
        known = self.streams.get(given.name) or self.tables.get(given.name)
        if given.app is not self or known is None:
            raise AppError(
                f"{where}: {name} uses {given.name}, which is not declared on app {self.name}: "
                "declare it there first"
            )

    def add_stream(self, stream: AppStream[T]) -> AppStream[T]:
        """Register a stream under its name; `AppError` if the name is taken."""
        self._check_new(stream.name, stream.location)
        self.streams[stream.name] = stream
        return stream

    def add_table(self, table: AppTable[V]) -> AppTable[V]:
        """Register a table under its name; `AppError` if the name is taken."""
        self._check_new(table.name, table.location)
        self.tables[table.name] = table
        return table

    def _check_new(self, name: str, where: Location) -> None:
        known = self.streams.get(name) or self.tables.get(name)
        if known is not None:
            raise AppError(f"{where}: {name} is already declared at {known.location}")

    def define(self, definition: Definition) -> None:
        """Register a definition under its name; `AppError` if the name is taken."""
        known = self.definitions.get(definition.name)
        if known is not None:
            raise AppError(
                f"{definition.location}: {definition.name} is already defined at "
                f"{known.location}: give one of them another name with name="
            )
        self.definitions[definition.name] = definition
