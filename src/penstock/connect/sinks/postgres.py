"""A PostgreSQL table as a sink: each message a row, inserted or updated by its key.

A stretch is put into `penstock_sink_pending` as it comes, waits there while it is voted for, and
reaches the table in one transaction with the record that it has, in `penstock_sink`. A worker has
two at most, one that waits and one that comes, numbered 0 and 1 by turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import psycopg
from psycopg import sql

from penstock.connect.sources.postgres import Connection, connected, identifier, within
from penstock.connect.wire import Message
from penstock.errors import ConnectorError, UsageError

TIMEOUT_S = 50.0
LOCK = 0x70656E73
HELD_BYTES_MAX = 4 << 20
ROW_BYTES = 100
"""What a row takes beside its data, roughly."""
FOR_GOOD = ("0A", "21", "22", "23", "42", "44", "54")
"""Classes of SQLSTATE for what will be refused again: data, constraints, columns, rights."""
REASON_CHARS_MAX = 1000
PAGE_ROWS = 500
PAGE_BYTES = 4 << 20
Row = tuple[bytes | None, bytes]

# Two workers that begin at once would both create the tables.
TABLES = f"""
    SELECT pg_advisory_xact_lock({LOCK});
    CREATE TABLE IF NOT EXISTS penstock_sink (
        worker text PRIMARY KEY,
        committed bigint NOT NULL DEFAULT 0,
        waiting smallint,
        waiting_end bigint,
        opened bigint NOT NULL DEFAULT 0
    );
    CREATE TABLE IF NOT EXISTS penstock_sink_pending (
        worker text NOT NULL,
        stretch smallint NOT NULL,
        position bigint NOT NULL,
        key bytea,
        payload bytea NOT NULL,
        PRIMARY KEY (worker, stretch, position)
    );
"""
OPEN = """
    INSERT INTO penstock_sink (worker, opened) VALUES (%s, 1)
    ON CONFLICT (worker) DO UPDATE SET opened = penstock_sink.opened + 1
    RETURNING opened, committed, waiting, waiting_end
"""
OWN = """
    SELECT committed, waiting, waiting_end FROM penstock_sink
    WHERE worker = %s AND opened = %s FOR UPDATE
"""
RECORD = """
    UPDATE penstock_sink SET committed = %s, waiting = NULL, waiting_end = NULL WHERE worker = %s
"""
WAIT = "UPDATE penstock_sink SET waiting = %s, waiting_end = %s WHERE worker = %s"
# Some rows, and of large ones only the first.
PAGE = """
    WITH page AS (
        SELECT position, key, payload, sum(length(payload)) OVER (ORDER BY position) AS total
        FROM (
            SELECT position, key, payload FROM penstock_sink_pending
            WHERE worker = %s AND stretch = %s AND position > %s ORDER BY position LIMIT %s
        ) AS next
    )
    SELECT position, key, payload FROM page WHERE total - length(payload) < %s ORDER BY position
"""
FORGET = "DELETE FROM penstock_sink_pending WHERE worker = %s"
FORGET_OTHER = f"{FORGET} AND stretch <> %s"
COPY = "COPY penstock_sink_pending (worker, stretch, position, key, payload) FROM STDIN"


class Standing(NamedTuple):
    """What the database has of a worker: where it is committed, and which stretch waits."""

    committed: int
    waiting: int | None = None
    waiting_end: int | None = None


class PostgresSink:
    """Rows of `table`, which has a unique index on `key_columns`.

    A message is a JSON object; its members are the columns, the keys among them, converted as
    PostgreSQL converts JSON. Columns it does not name keep what they have. An empty message
    deletes the row of its key, if there is one key column.

    A vote is kept: with `rehearse`, a stretch is written to the table and rolled back before it
    is voted for, so what the table would refuse is voted against. Without, half the work is
    saved, and a row that is refused stops the worker at its commit.
    """

    def __init__(
        self,
        url: str,
        worker: str,
        table: str,
        key_columns: Sequence[str],
        *,
        rehearse: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if not key_columns:
            raise UsageError("a table's rows are found by one key column or more")
        self._url = url
        self._worker = worker
        self._own_name = f"{table}/{worker}"
        self._table = identifier(table)
        self._keys = tuple(key_columns)
        self._rehearse = rehearse
        self._timeout_s = timeout_s
        self._connection: Connection | None = None
        self._opened = 0
        self._stretch = 0
        self._stored = 0
        """How many rows of the stretch the database has; the others are still here."""
        self._rows: list[Row] = []
        self._held_bytes = 0
        self._at = 0

    def check(self) -> None:
        """Raises `UsageError` if the table cannot be used as it is, psycopg's own error if the
        database is away.
        """
        with connected(self._url, self._timeout_s) as connection:
            with within(connection, self._timeout_s):
                self._check_table(connection)

    def _check_table(self, connection: Connection) -> None:
        """Have the database plan a write, which says whether it could be done."""
        keys = sql.SQL(", ").join(map(sql.Identifier, self._keys))
        plan = sql.SQL(
            "EXPLAIN INSERT INTO {table} ({keys}) SELECT {keys} FROM {table} WHERE false"
            " ON CONFLICT ({keys}) DO NOTHING"
        )
        try:
            connection.execute(plan.format(table=self._table, keys=keys))
        except psycopg.ProgrammingError as error:
            names = ", ".join(self._keys)
            raise UsageError(
                f"PostgreSQL takes no rows for {self._table.as_string()}: {reason(error)}; the "
                f"table must exist, with a unique index on {names}, and the user must be allowed "
                "to read and write it"
            ) from error

    def open(self, committed: int, kept: int | None) -> None:
        """Raises `ConnectorError` if the database has committed neither the one nor the other."""
        self.close()
        self._connection = connected(self._url, self._timeout_s)
        self._at = committed if kept is None else kept
        try:
            with within(self._connection, self._timeout_s), self._connection.transaction():
                self._check_table(self._connection)
                self._begin(self._connection, committed, kept)
        except psycopg.errors.InsufficientPrivilege as error:
            self.close()
            raise UsageError(f"the sink's user cannot make its tables: {reason(error)}") from error
        except BaseException:
            self.close()
            raise

    def _begin(self, connection: Connection, committed: int, kept: int | None) -> None:
        connection.execute(TABLES)
        found = connection.execute(OPEN, (self._own_name,)).fetchone()
        self._opened, *rest = found or (0, 0)
        standing = Standing(*rest)
        if standing.committed not in (committed, kept):
            raise ConnectorError(
                f"the database has {standing.committed} bytes of worker {self._worker}, and "
                f"{committed} were committed: it is another one, or it has lost some"
            )
        if kept is None or standing.waiting_end != kept:
            self._forget(connection, standing.committed)
        else:
            self._turn(1 - (standing.waiting or 0))
            connection.execute(FORGET_OTHER, (self._own_name, standing.waiting))

    def append(self, messages: Sequence[Message]) -> None:
        rows = [self._row(message) for message in messages]
        self._rows += rows
        self._held_bytes += sum(len(key or b"") + len(data) + ROW_BYTES for key, data in rows)
        self._at += sum(len(data) for _, data in rows)
        if self._held_bytes > HELD_BYTES_MAX:
            with self._own() as (connection, _):
                self._put(connection)

    def _put(self, connection: Connection) -> None:
        """Have the database keep what is here."""
        with connection.cursor().copy(COPY) as copy:
            for position, (key, payload) in enumerate(self._rows, self._stored):
                copy.write_row((self._own_name, self._stretch, position, key, payload))
        self._stored += len(self._rows)
        self._rows, self._held_bytes = [], 0

    def flush(self) -> None:
        with self._own() as (connection, _):
            connection.execute(FORGET_OTHER, (self._own_name, self._stretch))
            self._put(connection)
            if self._rehearse:
                self._try(connection)
            connection.execute(WAIT, (self._stretch, self._at, self._own_name))
        self._turn(1 - self._stretch)

    def commit(self, start: int, end: int) -> None:  # noqa: ARG002  the end says it all
        """Applied once: what waits goes in the same transaction, and without it nothing is done.

        A stretch of messages without data is no longer than none: that it was recorded before
        does not say that it was applied.
        """
        with self._own() as (connection, standing):
            if standing.waiting is not None and standing.waiting_end == end:
                self._apply(connection, standing.waiting)
                connection.execute(FORGET_OTHER, (self._own_name, 1 - standing.waiting))
                connection.execute(RECORD, (end, self._own_name))
            elif standing.committed < end:
                raise ConnectorError(
                    f"the bytes of worker {self._worker} up to {end} are not in the database, and "
                    f"{standing.committed} are committed: it has lost some"
                )

    def abort(self, start: int) -> None:
        with self._own() as (connection, standing):
            self._forget(connection, standing.committed)
        self._at = start

    def _forget(self, connection: Connection, committed: int) -> None:
        connection.execute(FORGET, (self._own_name,))
        connection.execute(RECORD, (committed, self._own_name))
        self._turn(0)

    def _turn(self, stretch: int) -> None:
        """Begin a stretch."""
        self._stretch, self._stored = stretch, 0
        self._rows, self._held_bytes = [], 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _own(self) -> Iterator[tuple[Connection, Standing]]:
        """A transaction in which nobody else has the worker, and where that stands.

        Raises `ConnectorError` for what the table will never take, psycopg's own error for what it
        may take a little later.
        """
        assert self._connection is not None  # noqa: S101  open comes first
        connection = self._connection
        try:
            with within(connection, self._timeout_s), connection.transaction():
                found = connection.execute(OWN, (self._own_name, self._opened)).fetchone()
                if found is None:
                    raise ConnectorError(f"worker {self._worker} was opened again by somebody else")
                yield connection, Standing(*found)
        except psycopg.Error as error:
            if (error.sqlstate or "")[:2] not in FOR_GOOD:
                raise
            raise ConnectorError(f"the table refuses a row: {reason(error)}") from error

    # Rows

    def _row(self, message: Message) -> Row:
        """Raises for what can never be a row: `UsageError`, or `UnicodeDecodeError`."""
        if not message.payload:
            if message.key is None or len(self._keys) > 1:
                raise UsageError("an empty message deletes by its key, which is one column's")
            message.key.decode()
            return message.key, b""
        message.payload.decode()
        columns = columns_of((None, message.payload))
        missing = [name for name in self._keys if name not in (columns or ())]
        if missing:
            raise UsageError(f"a message without {', '.join(missing)}: they find its row")
        return message.key, message.payload

    def _try(self, connection: Connection) -> None:
        with connection.transaction():
            self._apply(connection, self._stretch)
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            raise psycopg.Rollback

    def _apply(self, connection: Connection, stretch: int) -> None:
        """In order, a page at a time, without waiting for the answer to each."""
        last = -1
        while page := connection.execute(
            PAGE, (self._own_name, stretch, last, PAGE_ROWS, PAGE_BYTES)
        ).fetchall():
            last = page[-1][0]
            with connection.pipeline(), connection.cursor() as cursor:
                for columns, some in itertools.groupby((row[1:] for row in page), columns_of):
                    if columns is None:
                        keys = [((key or b"").decode(),) for key, _ in some]
                        cursor.executemany(self._delete(), keys)
                    else:
                        documents = [(payload.decode(),) for _, payload in some]
                        cursor.executemany(self._upsert(columns), documents)

    def _delete(self) -> sql.Composed:
        query = sql.SQL("DELETE FROM {} WHERE {} = %s")
        return query.format(self._table, sql.Identifier(self._keys[0]))

    def _upsert(self, columns: Sequence[str]) -> sql.Composed:
        others = [sql.Identifier(name) for name in columns if name not in self._keys]
        change = sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in others)
        return sql.SQL(
            "INSERT INTO {table} ({columns}) SELECT {columns}"
            " FROM json_populate_record(NULL::{table}, %s::json) ON CONFLICT ({keys}) DO {change}"
        ).format(
            table=self._table,
            columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
            keys=sql.SQL(", ").join(map(sql.Identifier, self._keys)),
            change=sql.SQL("UPDATE SET ") + change if others else sql.SQL("NOTHING"),
        )


def reason(error: psycopg.Error) -> str:
    """What the database says, in one line, with the values that it is about."""
    said = (error.diag.message_primary, error.diag.message_detail, error.diag.context)
    return " ".join(" ".join(text.split()) for text in said if text)[:REASON_CHARS_MAX]


def columns_of(row: Row) -> tuple[str, ...] | None:
    """The columns that a row names, in an order of their own; `None` for one to be deleted."""
    if not row[1]:
        return None
    try:
        return tuple(sorted(msgspec.json.decode(row[1], type=dict[str, msgspec.Raw])))
    except msgspec.DecodeError as error:
        raise UsageError(f"a message that is no JSON object: {error}") from error
