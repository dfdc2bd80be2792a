"""A PostgreSQL table as a sink: each message a row, inserted or updated by its key.

A stretch waits in `penstock_sink_pending` while it is voted for, and reaches the table in one
transaction with the record that it has, in `penstock_sink`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import psycopg
from psycopg import sql

from penstock.connect.sources.postgres import Connection, connected, identifier, within
from penstock.connect.wire import Message
from penstock.errors import ConnectorError, UsageError

TIMEOUT_S = 50.0
LOCK = 0x70656E73
Row = tuple[bytes | None, bytes]

# Two workers that begin at once would both create the tables.
TABLES = f"""
    SELECT pg_advisory_xact_lock({LOCK});
    CREATE TABLE IF NOT EXISTS penstock_sink (
        worker text PRIMARY KEY,
        committed bigint NOT NULL DEFAULT 0,
        opened bigint NOT NULL DEFAULT 0
    );
    CREATE TABLE IF NOT EXISTS penstock_sink_pending (
        worker text NOT NULL,
        end_offset bigint NOT NULL,
        position bigint NOT NULL,
        key bytea,
        payload bytea NOT NULL,
        PRIMARY KEY (worker, end_offset, position)
    );
"""
OPEN = """
    INSERT INTO penstock_sink (worker, opened) VALUES (%s, 1)
    ON CONFLICT (worker) DO UPDATE SET opened = penstock_sink.opened + 1
    RETURNING committed, opened
"""
OWN = "SELECT committed FROM penstock_sink WHERE worker = %s AND opened = %s FOR UPDATE"
RECORD = "UPDATE penstock_sink SET committed = %s WHERE worker = %s"
PENDING = """
    SELECT key, payload FROM penstock_sink_pending
    WHERE worker = %s AND end_offset = %s ORDER BY position
"""
FORGET = "DELETE FROM penstock_sink_pending WHERE worker = %s AND end_offset >= %s"
COPY = "COPY penstock_sink_pending (worker, end_offset, position, key, payload) FROM STDIN"


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
        self._rows: list[Row] = []
        self._at = 0

    def open(self, committed: int, kept: int | None) -> None:
        """Raises `ConnectorError` if the database has committed neither the one nor the other."""
        self.close()
        self._connection = connected(self._url, self._timeout_s)
        self._rows, self._at = [], committed if kept is None else kept
        try:
            with within(self._connection, self._timeout_s), self._connection.transaction():
                self._begin(self._connection, committed, kept)
        except BaseException:
            self.close()
            raise

    def _begin(self, connection: Connection, committed: int, kept: int | None) -> None:
        connection.execute(TABLES)
        found = connection.execute(OPEN, (self._own_name,)).fetchone()
        done, self._opened = found or (0, 0)
        if done not in (committed, kept):
            raise ConnectorError(
                f"the database has {done} bytes of worker {self._worker}, and {committed} were "
                "committed: it is another one, or it has lost some"
            )
        connection.execute(FORGET, (self._own_name, 0 if kept is None else kept + 1))

    def append(self, messages: Sequence[Message]) -> None:
        self._rows += [self._row(message) for message in messages]
        self._at += sum(len(message.payload) for message in messages)

    def flush(self) -> None:
        with self._own() as (connection, _):
            connection.execute(FORGET, (self._own_name, 0))
            if self._rehearse:
                self._try(connection)
            with connection.cursor().copy(COPY) as copy:
                for position, (key, payload) in enumerate(self._rows):
                    copy.write_row((self._own_name, self._at, position, key, payload))
        self._rows = []

    def commit(self, start: int, end: int) -> None:  # noqa: ARG002  the end says it all
        """Applied once: what waits goes in the same transaction, and without it nothing is done.

        A stretch of messages without data is no longer than none: that it was recorded before
        does not say that it was applied.
        """
        with self._own() as (connection, done):
            rows = connection.execute(PENDING, (self._own_name, end)).fetchall()
            if not rows and done < end:
                raise ConnectorError(
                    f"the bytes of worker {self._worker} up to {end} are not in the database, and "
                    f"{done} are committed: it has lost some"
                )
            if rows:
                self._apply(connection, rows)
                connection.execute(FORGET, (self._own_name, 0))
                connection.execute(RECORD, (end, self._own_name))

    def abort(self, start: int) -> None:
        with self._own() as (connection, _):
            connection.execute(FORGET, (self._own_name, start))
        self._rows, self._at = [], start

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _own(self) -> Iterator[tuple[Connection, int]]:
        """A transaction in which nobody else has the worker, and what it has committed."""
        assert self._connection is not None  # noqa: S101  open comes first
        connection = self._connection
        with within(connection, self._timeout_s), connection.transaction():
            found = connection.execute(OWN, (self._own_name, self._opened)).fetchone()
            if found is None:
                raise ConnectorError(f"worker {self._worker} was opened again by somebody else")
            yield connection, found[0]

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
            self._apply(connection, self._rows)
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            raise psycopg.Rollback

    def _apply(self, connection: Connection, rows: Sequence[Row]) -> None:
        """In order, without waiting for the answer to each."""
        with connection.pipeline(), connection.cursor() as cursor:
            for columns, some in itertools.groupby(rows, columns_of):
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


def columns_of(row: Row) -> tuple[str, ...] | None:
    """The columns that a row names, in an order of their own; `None` for one to be deleted."""
    if not row[1]:
        return None
    try:
        return tuple(sorted(msgspec.json.decode(row[1], type=dict[str, msgspec.Raw])))
    except msgspec.DecodeError as error:
        raise UsageError(f"a message that is no JSON object: {error}") from error
