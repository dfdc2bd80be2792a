"""Events written in a database transaction and published from there, each exactly once.

    with psycopg.connect(database) as connection:     # or one of SQLAlchemy, or sqlite3
        connection.execute("UPDATE accounts …")
        outbox.add(connection, "payments", Payment(user="ada", amount=5))

The row commits or rolls back with the rest of the transaction. A relay reads rows, appends them
to the log under their number, and deletes them. If it is killed in between, it repeats this: a
stream with ids="producer" holds each number only once.

Numbers are assigned when a row is added, so rows may commit in another order; the relay reads
all rows that exist, never only those after some number. In strict mode a transaction waits for
the one before it, so that numbers, and therefore the stream, are in commit order.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import re
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.errors import (
    DatabaseGoneError,
    FencedError,
    LogError,
    OutboxError,
    PenstockError,
    RecordError,
    UsageError,
)
from penstock.failpoints import failpoint
from penstock.log.api import Commit, Log
from penstock.log.declaring.objects import Stream
from penstock.log.writing.commit import commit_surely, next_sequence
from penstock.log.writing.compose import Composer, EventOptions, Outgoing
from penstock.patience import Patience
from penstock.postgresql import parse_address, refusal_of
from penstock.records.event import Key, from_microseconds, key_bytes, microseconds, now_us
from penstock.resources import statements

BATCH_ROWS_MAX = 1000
POLL_S = 0.1
CLAIM_TRIES_MAX = 20
DatabaseConnection = Any
"""An sqlite3 or psycopg connection, or an SQLAlchemy Connection or Session."""
Dialect = Literal["sqlite", "postgresql"]


class OutboxRow(NamedTuple):
    """An event waiting in the outbox."""

    id: int
    stream: str
    data: bytes
    kind: str
    key: bytes | None
    time_us: int
    headers: str | None


# The user's side


def create(connection: DatabaseConnection) -> None:
    """Create the outbox in the user's database unless it exists; the caller commits."""
    _run(connection, f"create_{dialect_of(connection)}")
    _run(connection, "create_origin")
    if not _rows(connection, "origin"):
        _run(connection, "save_origin", {"origin": secrets.token_hex(16)})


def add(
    connection: DatabaseConnection,
    stream: str,
    data: object,
    *,
    key: Key | None = None,
    time: dt.datetime | None = None,
    headers: Mapping[str, str] | None = None,
    strict: bool = False,
) -> int:
    """Add an event to the transaction that is open on this connection; returns its number.

    With `strict`, transactions that add events wait for each other, so that numbers are in
    commit order. Whether the stream accepts the data is checked only by the relay.
    """
    dialect = dialect_of(connection)
    kind, packed = _pack(data)
    if strict and dialect == "postgresql":  # SQLite has one writer at a time
        _rows(connection, "wait_for_others")
    given = {
        "stream": stream,
        "data": packed,
        "kind": kind,
        "key": key_bytes(key),
        "time_us": now_us() if time is None else microseconds(time),
        "headers": None if not headers else msgspec.json.encode(dict(headers)).decode(),
    }
    return int(_rows(connection, "add", given)[0][0])


def _pack(data: object) -> tuple[str, bytes]:
    if isinstance(data, bytes):
        return "bytes", data
    try:
        return "json", msgspec.json.encode(data)
    except (TypeError, ValueError, RecursionError, msgspec.EncodeError) as error:
        raise RecordError(
            f"{type(data).__name__} cannot be written to the outbox: {error}"
        ) from error


# Databases


@contextlib.contextmanager
def connect(address: str, *, create: bool = True) -> Iterator[DatabaseConnection]:
    """Open a connection to `sqlite:///path` or `postgresql://…` for the duration of a block.

    An SQLite file that does not exist is created, unless `create` is false. Raises
    `DatabaseGoneError` if the database cannot be reached, `OutboxError` if it refuses permanently.
    """
    if address.startswith("sqlite:///"):
        path = address.removeprefix("sqlite:///")
        if not create and not Path(path).exists():
            raise UsageError(f"there is no database {path}")
        try:
            opened = sqlite3.connect(path)
        except sqlite3.OperationalError as error:
            raise DatabaseGoneError(f"{path} cannot be opened: {error}") from error
        with contextlib.closing(opened):
            yield opened
    elif address.startswith("postgresql://"):
        try:
            psycopg = importlib.import_module("psycopg")
        except ModuleNotFoundError:
            raise UsageError("PostgreSQL needs psycopg: pip install 'penstock[postgres]'") from None
        parse_address(address)
        try:
            found = psycopg.connect(address, connect_timeout=10)
        except psycopg.OperationalError as error:
            if refusal := refusal_of(error):
                raise OutboxError(refusal) from error
            raise DatabaseGoneError(f"the database cannot be reached: {error}") from error
        with contextlib.closing(found):
            yield found
    else:
        # Not shown: it may contain a password.
        raise UsageError("not a valid database address: use sqlite:///path or postgresql://…")


def dialect_of(connection: DatabaseConnection) -> Dialect:
    """Which kind of database a connection belongs to."""
    if isinstance(connection, sqlite3.Connection):
        return "sqlite"
    kind = type(connection)
    if kind.__module__.startswith("psycopg"):
        return "postgresql"
    if _is_sqlalchemy(connection):
        name = str(
            connection.get_bind().dialect.name
            if hasattr(connection, "get_bind")
            else connection.dialect.name
        )
        if name in ("sqlite", "postgresql"):
            return name  # type: ignore[return-value]
        raise UsageError(f"the outbox supports SQLite and PostgreSQL, not {name}")
    raise UsageError(
        f"{kind.__module__}.{kind.__qualname__} is not a connection that the outbox supports: pass "
        "an sqlite3 or psycopg connection, or an SQLAlchemy Connection or Session"
    )


def _is_sqlalchemy(connection: DatabaseConnection) -> bool:
    return any(kind.__module__.startswith("sqlalchemy.") for kind in type(connection).__mro__)


def _rows(
    connection: DatabaseConnection, name: str, values: Mapping[str, object] | None = None
) -> list[Any]:
    return list(_run(connection, name, values).fetchall())


def _run(
    connection: DatabaseConnection, name: str, values: Mapping[str, object] | None = None
) -> Any:
    """Run a statement of outbox.sql, using the connection's own parameter style."""
    statement, given = _sql(name), dict(values or {})
    if isinstance(connection, sqlite3.Connection):
        cursor = connection.cursor()
        cursor.row_factory = None  # the user's own factory may return anything
        return cursor.execute(statement, given)
    if _is_sqlalchemy(connection):
        text = importlib.import_module("sqlalchemy").text
        return connection.execute(text(statement), given)
    plain = importlib.import_module("psycopg.rows").tuple_row
    own = connection.cursor(row_factory=plain)
    return own.execute(re.sub(r":(\w+)", r"%(\1)s", statement), given)


def _sql(name: str) -> str:
    lines = statements(__package__, "outbox.sql")[name].splitlines()
    return "\n".join(line for line in lines if not line.startswith("--")).rstrip(";")


# The relay


class Relay:
    """Publishes the rows of an outbox. Only one relay works at a time: a second fences the first.

    `connect` opens a connection to the database, and is called as often as one is needed. `tell`
    is called when the database becomes unavailable, and when it is available again.
    """

    def __init__(
        self,
        log: Log,
        connect: Callable[[], contextlib.AbstractContextManager[DatabaseConnection]],
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._log = log
        self._tell = tell
        self._connect = connect
        self._composer = Composer("outbox", log.limits)
        self._claimed: set[int] = set()
        """Ids of the streams claimed by this outbox; a stream that is recreated has a new id."""
        self.published = 0

    def run(self, stop: threading.Event, backoff_s_max: float = 10.0) -> None:
        """Publish until `stop` is set; wait for the database while it cannot be reached.

        Raises `OutboxError` for a row that its stream does not accept, `FencedError` if another
        relay has been started.
        """
        patience = Patience("the database", self._tell, POLL_S, backoff_s_max)
        while not stop.is_set():
            why: Exception
            try:
                with self._connect() as connection:
                    self._hold(connection)
                    patience.note_answer()
                    while not stop.is_set():
                        if not self.step(connection):
                            stop.wait(POLL_S)
                return
            except PenstockError as error:
                if not error.retriable:
                    raise
                why = error
            except Exception as error:
                if not _is_away(error):
                    raise
                why = error
            stop.wait(patience.note_failure(why))

    def drain(self) -> int:
        """Publish everything that is in the outbox now; return the number of events."""
        done = 0
        with self._connect() as connection:
            self._hold(connection)
            while count := self.step(connection):
                done += count
        return done

    def _hold(self, connection: DatabaseConnection) -> None:
        try:
            origin = _rows(connection, "origin")
            connection.commit()
        except Exception as error:
            if "penstock_outbox_origin" not in str(error):
                raise
            origin = []
        if not origin:
            raise OutboxError(
                "this database has no outbox: create it with `penstock outbox create`"
            )
        self._origin = str(origin[0][0])
        self._claimed.clear()
        self._producer = f"outbox/{self._origin}"
        self._holder = self._log.hold(self._producer)
        self._sequence = next_sequence(self._log, self._producer)

    def step(self, connection: DatabaseConnection) -> int:
        """Publish the next rows and delete them; return how many there were.

        1. Read rows; some may have been published already, but not deleted.
        2. Append them: a stream drops the numbers that it already holds.
        3. Delete exactly these rows, and commit.
        """
        rows = self._waiting(connection)
        connection.commit()
        if not rows:
            return 0
        failpoint("outbox.read")
        streams = {name: self._log.stream(name) for name in {row.stream for row in rows}}
        for stream in {stream.id: stream for stream in streams.values()}.values():
            mine = [row for row in rows if streams[row.stream].id == stream.id]
            self._publish(stream, mine)
        failpoint("outbox.published")
        ids = msgspec.json.encode([row.id for row in rows]).decode()
        _run(connection, f"delete_{dialect_of(connection)}", {"ids": ids})
        failpoint("outbox.deleted")
        connection.commit()
        failpoint("outbox.committed")
        self.published += len(rows)
        return len(rows)

    def _waiting(self, connection: DatabaseConnection) -> list[OutboxRow]:
        found = _rows(connection, "waiting", {"rows": BATCH_ROWS_MAX})
        return [
            OutboxRow(
                r[0], r[1], bytes(r[2]), r[3], None if r[4] is None else bytes(r[4]), r[5], r[6]
            )
            for r in found
        ]

    def _publish(self, stream: Stream, rows: Sequence[OutboxRow]) -> None:
        if stream.spec.ids != "producer":
            raise OutboxError(
                f"stream {stream.name} does not accept ids from the producer, so events that the "
                "relay repeats would be stored twice: create the stream with --ids producer"
            )
        if stream.id not in self._claimed:
            self._claim(stream)
        events = [self._event(stream, row) for row in rows]
        commit = Commit(parts=[self._composer.part(stream, events)])
        commit_surely(self._log, self._holder, self._sequence, commit)
        self._sequence += 1

    def _claim(self, stream: Stream) -> None:
        """Claim the stream for this outbox permanently: another's numbers would count as repeats.

        If two outboxes claim it at the same time, the one that holds its claim last decides; the
        other is fenced and looks again. Raises `OutboxError` if another outbox has the stream.
        """
        key = f"outbox/claim/{stream.id}"
        for _ in range(CLAIM_TRIES_MAX):
            if self._has_claimed(stream, key):
                return
            holder = self._log.hold(key)
            if self._has_claimed(stream, key):
                return
            progress: dict[str, bytes | None] = {key: self._origin.encode()}
            progress |= dict.fromkeys(_earlier_keys(stream))
            with contextlib.suppress(FencedError):
                sequence = next_sequence(self._log, key)
                commit_surely(self._log, holder, sequence, Commit(progress=progress))
        raise FencedError(
            f"stream {stream.name} is being claimed by other outboxes at the same time: try again"
        )

    def _has_claimed(self, stream: Stream, key: str) -> bool:
        """Whether this outbox has the stream. Raises `OutboxError` if another one has it."""
        found = self._log.progress(key)
        own = self._origin.encode()
        if found is None:
            noted = {self._log.progress(earlier) for earlier in _earlier_keys(stream)} - {None}
            if not noted or own in noted:
                return False
        elif found == own:
            self._claimed.add(stream.id)
            return True
        raise OutboxError(
            f"stream {stream.name} is fed by another outbox, so events of this one would be "
            "mistaken for repeats: give this outbox a stream of its own"
        )

    def _event(self, stream: Stream, row: OutboxRow) -> Outgoing:
        try:
            return self._composer.admit(stream, _data(row), _options(stream, row))
        except (LogError, MemoryError):
            raise
        except Exception as error:  # whatever the error, it must name the row
            why = str(error) if isinstance(error, PenstockError) else _describe(error)
            raise OutboxError(
                f"row {row.id} of the outbox is not valid for stream {stream.name}: {why}; correct "
                "or delete the row, and restart the relay"
            ) from error


def _data(row: OutboxRow) -> object:
    return row.data if row.kind == "bytes" else msgspec.json.decode(row.data)


def _options(stream: Stream, row: OutboxRow) -> EventOptions:
    """The event's options, without those that the stream takes from a field of the data."""
    return EventOptions(
        key=row.key if stream.spec.key is None else None,
        id=row.id,
        time=from_microseconds(row.time_us) if stream.spec.time is None else None,
        headers=None if row.headers is None else msgspec.json.decode(row.headers),
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _earlier_keys(stream: Stream) -> tuple[str, str]:
    """Keys under which earlier versions stored a stream's outbox: by its name as in the rows."""
    return f"outbox/stream/{stream.name}", f"outbox/stream/{'.'.join(stream.name)}"


def _is_away(error: Exception) -> bool:
    """Whether an error raised by a database driver means that the database is unreachable now."""
    return any(
        kind.__name__ in ("OperationalError", "InterfaceError") for kind in type(error).__mro__
    )
