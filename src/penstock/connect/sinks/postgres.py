"""A PostgreSQL table as a sink: each message is a row, inserted or updated by its key.

A transaction of messages is one database transaction, which also moves the mark in
`penstock_sink`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import psycopg
from psycopg import sql

from penstock.connect.hosts.targets import SinkMessage, SinkTarget
from penstock.connect.protocol.marks import Mark
from penstock.connect.systems.postgres import (
    PostgresConnection,
    connect,
    limit_time,
    quote_table,
)
from penstock.errors import ConnectorError, MarkMovedError, UsageError
from penstock.resources import statements

SQL = statements("penstock.connect.sinks", "postgres.sql")
TIMEOUT_S = 50.0
TRIAL_S = 5.0
"""How long a vote waits for a busy database; after that it is given without a rehearsal."""
FOR_GOOD = ("0A", "21", "22", "23", "42", "44", "54")
"""SQLSTATE classes of permanent errors: data, constraints, columns, privileges."""
REASON_CHARS_MAX = 1000
PAGE_ROWS = 500


class PostgresSink(SinkTarget):
    """Writes to `table`, which must have a unique index on `key_columns`.

    A message is a JSON object; its members are the columns, including the key columns, converted
    as PostgreSQL converts JSON. Columns that it does not name keep their values. An empty message
    deletes the row with its key, if there is a single key column.

    With `rehearse`, rows are written to the table and rolled back before the vote, if the database
    is available: the sink votes against rows that the table would refuse. Without it, half the
    work is saved, and a row that is refused is set aside once its transaction is committed.
    """

    page_bytes = None

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
            raise UsageError("no key column given: name at least one, to identify rows")
        self._url = url
        self._name = f"{table}/{worker}"
        self._table = quote_table(table)
        self._keys = tuple(key_columns)
        self._rehearses = rehearse
        self._timeout_s = timeout_s
        self._connection: PostgresConnection | None = None
        self._using = threading.Lock()
        """A rehearsal and `apply` would wait for each other's row locks."""
        self._trial: PostgresConnection | None = None

    def check_server(self) -> None:
        """Raise `UsageError` if the table cannot be used as it is, psycopg's own error if the
        database is unavailable.
        """
        with connect(self._url, self._timeout_s) as connection:
            with limit_time(connection, self._timeout_s):
                self._check_table(connection)

    def _check_table(self, connection: PostgresConnection) -> None:
        """Let the database plan a write, which tells whether it is possible."""
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
                f"PostgreSQL accepts no rows for {self._table.as_string()}: {explain(error)}; the "
                f"table must exist and have a unique index on {names}, and the user must be "
                "allowed to read and write it"
            ) from error

    def applied(self) -> Mark:
        with self._using:
            if self._connection is not None:
                self._connection.close()
            connection = self._connection = connect(self._url, self._timeout_s)
            try:
                with limit_time(connection, self._timeout_s), connection.transaction():
                    self._check_table(connection)
                    return self._read_mark(connection)
            except psycopg.errors.InsufficientPrivilege as error:
                raise UsageError(
                    f"the user cannot create the sink's own table: {explain(error)}"
                ) from error

    def _read_mark(self, connection: PostgresConnection) -> Mark:
        if connection.execute(SQL["is there"]).fetchone() is None:
            connection.execute(SQL["create"])
        connection.execute(SQL["begin"], (self._name,))
        found = connection.execute(SQL["mark"], (self._name,)).fetchone()
        return Mark(*(found or ()))

    def apply(self, messages: Iterable[SinkMessage], after: Mark, mark: Mark) -> None:
        """One transaction. Raises `ConnectorError` for rows that the table will never accept,
        psycopg's own error if they may be accepted later.
        """
        if self._connection is None:
            self.applied()
        connection = self._connection
        assert connection is not None  # noqa: S101  just opened
        with self._using, limit_time(connection, self._timeout_s):
            try:
                with refuse_for_good(), connection.transaction():
                    self._move(connection, after, mark)
                    self._write(connection, messages)
            except ConnectorError:
                self._check_table(connection)  # the table may be at fault, not the row
                raise

    def _move(self, connection: PostgresConnection, after: Mark, mark: Mark) -> None:
        moved = connection.execute(SQL["move"], (*mark, self._name, *after))
        if not moved.rowcount:
            raise MarkMovedError(f"the mark of {self._name} was moved by another process")

    def close(self) -> None:
        with self._using:
            for connection in (self._connection, self._trial):
                if connection is not None:
                    connection.close()
            self._connection = self._trial = None

    # Rows

    def check(self, messages: Sequence[SinkMessage]) -> None:
        for message in messages:
            self._check_row(message)
        if self._rehearses and self._using.acquire(timeout=TRIAL_S):
            try:
                self._rehearse(messages)
            finally:
                self._using.release()

    def _check_row(self, message: SinkMessage) -> None:
        """Raise `ValueError` for a message that can never be a row; invalid UTF-8 is one cause."""
        if not message.data:
            if message.key is None or len(self._keys) > 1:
                raise ValueError(
                    "an empty message deletes by key, which requires a single key column"
                )
            message.key.decode()
            return
        message.data.decode()
        missing = [name for name in self._keys if name not in (parse_columns(message) or ())]
        if missing:
            raise ValueError(f"the message has no value for key column {', '.join(missing)}")

    def _rehearse(self, messages: Sequence[SinkMessage]) -> None:
        """Write the rows, and roll back. An unavailable database is not waited for, and the rows
        are not at fault if the table cannot be used.
        """
        try:
            if self._trial is None or self._trial.closed:
                self._trial = connect(self._url, TRIAL_S)
            with limit_time(self._trial, TRIAL_S):
                self._try(self._trial, messages)
        except (psycopg.Error, UsageError):
            if self._trial is not None:
                self._trial.close()
                self._trial = None

    def _try(self, connection: PostgresConnection, messages: Sequence[SinkMessage]) -> None:
        try:
            with refuse_for_good(), connection.transaction(force_rollback=True):
                self._write(connection, messages)
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        except ConnectorError:
            self._check_table(connection)
            raise

    def _write(self, connection: PostgresConnection, messages: Iterable[SinkMessage]) -> None:
        """Write in order, a page at a time, without waiting for the answer to each row."""
        left = iter(messages)
        while page := list(itertools.islice(left, PAGE_ROWS)):
            with connection.pipeline(), connection.cursor() as cursor:
                for columns, some in itertools.groupby(page, parse_columns):
                    if columns is None:
                        keys = [((message.key or b"").decode(),) for message in some]
                        cursor.executemany(self._delete(), keys)
                    else:
                        documents = [(message.data.decode(),) for message in some]
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


@contextlib.contextmanager
def refuse_for_good() -> Iterator[None]:
    """Turn permanent errors of the database into `ConnectorError`."""
    try:
        yield
    except psycopg.Error as error:
        if (error.sqlstate or "")[:2] not in FOR_GOOD:
            raise
        raise ConnectorError(f"the table refuses a row: {explain(error)}") from error


def explain(error: psycopg.Error) -> str:
    """The database's error message in one line, with the values that it concerns."""
    parts = (error.diag.message_primary, error.diag.message_detail, error.diag.context)
    return " ".join(" ".join(text.split()) for text in parts if text)[:REASON_CHARS_MAX]


def parse_columns(message: SinkMessage) -> tuple[str, ...] | None:
    """The columns that a row names, in a canonical order; `None` if it is to be deleted."""
    if not message.data:
        return None
    try:
        return tuple(sorted(msgspec.json.decode(message.data, type=dict[str, msgspec.Raw])))
    except msgspec.DecodeError as error:
        raise ValueError(f"the message is not a JSON object: {error}") from error
