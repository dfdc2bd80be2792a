"""What happens in PostgreSQL as a source: the rows of a table that only grows, or notifications.

    PostgresListenSource("orders", "postgresql://localhost/shop", "orders", table="orders")

A server that is away is asked again, less and less often; the connector lives on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql

from penstock.connect.numbering import OwnNumbers, overtaken
from penstock.connect.source import Item, Source
from penstock.errors import UsageError
from penstock.patience import Patience
from penstock.postgresql import parse_address, refusal_of

Connection = psycopg.Connection[tuple[Any, ...]]

BATCH_ROWS = 1000
IDLE_S = 0.02
CONNECT_TIMEOUT_S = 5
TIMEOUT_S = 20.0

WRITERS = """
    SELECT virtualtransaction FROM pg_locks
    WHERE mode = 'RowExclusiveLock' AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND (relation = %(table)s::text::regclass
           OR relation = pg_get_serial_sequence(%(table)s::text, %(column)s::text)::regclass
           OR relation IN (SELECT relid FROM pg_partition_tree(%(table)s::text::regclass)))
"""


def connected(url: str, timeout_s: float = TIMEOUT_S) -> Connection:
    """A connection in autocommit, on which no statement takes longer than `timeout_s`.

    Raises `UsageError` if PostgreSQL refuses it for good, psycopg's own error if it is away.
    """
    parse_address(url)
    try:
        connection = psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
        )
    except psycopg.OperationalError as error:
        if refusal := refusal_of(error):
            raise UsageError(refusal) from error
        raise
    try:
        with within(connection, timeout_s):
            connection.execute(
                "SELECT set_config('statement_timeout', %s, false)", (f"{int(timeout_s * 1000)}",)
            )
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def within(connection: Connection, timeout_s: float) -> Iterator[None]:
    """What is asked inside ends: past the limit the connection is cut, and `OperationalError`
    raised. The server's own limit is no help if it stands still.
    """
    timer = threading.Timer(timeout_s, _cut, (connection.fileno(),))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _cut(number: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as shared:
        shared.shutdown(socket.SHUT_RDWR)


def identifier(table: str) -> sql.Identifier:
    """`table` or `schema.table`, quoted."""
    return sql.Identifier(*table.split("."))


def database_of(url: str) -> tuple[str, str]:
    """The host of a database, and behind it its port and name."""
    given = parse_address(url)
    name = given.get("dbname") or given.get("user") or ""
    return given.get("host", ""), f"{given.get('port', '5432')}/{name}"


class PostgresListenSource(Source):
    """Listens on a channel (NOTIFY), and reads a table behind it if there is one.

    With `table`, every row once, in the order of `id_column`, as JSON: its number is its id, which
    is 0 or more and given by the column's sequence or identity. Notifications only say that there
    may be rows; the table is looked at every `poll_s` anyhow. A row waits until every transaction
    that was writing to the table when it was found has ended: one of them may yet bring a smaller
    id. Not seen are ids that a transaction draws for another one, and sequences with a CACHE; and
    changes of a row that was read.

    Without, the payloads of the notifications are the messages, at most once: what is notified
    while nobody listens is lost, which may have happened between any two of `connections`, and
    what has not reached the log is lost with the process.
    """

    def __init__(
        self,
        name: str,
        url: str,
        channel: str,
        *,
        table: str = "",
        id_column: str = "id",
        poll_s: float = 1.0,
    ) -> None:
        super().__init__(name)
        self._url = url
        self._channel = channel
        self._rows = _Rows(table, id_column) if table else None
        self._poll_s = poll_s
        self._connection: Connection | None = None
        self._ready: deque[Item] = deque()
        self._sent: deque[Item] = deque()
        self._numbers = OwnNumbers()
        self._look_at = 0.0
        self._patience = Patience("PostgreSQL", self.tell)
        self.connections = 0

    def handle_reset(self, point_of_ref: int | None) -> None:
        if self._rows is not None:
            self._ready.clear()
            self._rows.reset(-1 if point_of_ref is None else point_of_ref)
            self._look_at = 0.0
            return
        if self._numbers.resume(point_of_ref):
            self.handle_progress(self.name, -1 if point_of_ref is None else point_of_ref)
        elif self._sent:  # what is not known to have come is not sent again
            self.tell(overtaken(self.name, len(self._sent)))
            self._sent.clear()
        waiting = [item.data for item in (*self._sent, *self._ready)]
        self._ready.clear()
        self._sent.clear()
        for data in waiting:
            self._add(data)

    def handle_next(self) -> Item | None:
        if not self._ready and self._patience.is_due:
            self._ask()
        if not self._ready:
            return None
        if self._rows is None:
            self._sent.append(self._ready[0])
        return self._ready.popleft()

    def handle_progress(self, stream: str, point_of_ref: int) -> None:  # noqa: ARG002  its own
        while self._sent and self._sent[0].point_of_ref <= point_of_ref:
            self._sent.popleft()

    def handle_close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _ask(self) -> None:
        try:
            if self._connection is None:
                self._connection = self._listening()
            self._patience.answered(self._fetch(self._connection))
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            self._lose()
            self._patience.failed(error)

    def _listening(self) -> Connection:
        connection = connected(self._url)
        try:
            with within(connection, TIMEOUT_S):
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        except BaseException:
            connection.close()
            raise
        self.connections += 1
        self._look_at = 0.0
        return connection

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fetch(self, connection: Connection) -> float:
        """Add to what is ready; how long to wait until the next time."""
        heard = [notice.payload for notice in connection.notifies(timeout=0)]
        if self._rows is None:
            for payload in heard:
                self._add(payload.encode())
            return IDLE_S
        if heard:
            self._look_at = 0.0
        if time.monotonic() < self._look_at:
            return IDLE_S
        with within(connection, TIMEOUT_S):
            found = self._rows.read(connection)
        self._ready.extend(found)
        if len(found) == BATCH_ROWS:
            return 0.0
        if not found and not self._rows.is_waiting:
            self._look_at = time.monotonic() + self._poll_s
        return IDLE_S

    def _add(self, data: bytes) -> None:
        self._ready.append(Item(data, self._numbers.take()))


class _Rows:
    """The rows of a table in the order of their ids, none before all smaller ids are settled."""

    def __init__(self, table: str, column: str) -> None:
        name, key = identifier(table), sql.Identifier(column)
        self._where = {"table": name.as_string(), "column": column}
        self._newest = sql.SQL("SELECT max({})::bigint FROM {}").format(key, name)
        self._some = sql.SQL(
            "SELECT r.{key}::bigint, row_to_json(r)::text FROM {name} r"
            " WHERE r.{key} > %s AND r.{key} <= %s ORDER BY r.{key} LIMIT %s"
        ).format(key=key, name=name)
        self.reset(-1)

    def reset(self, last: int) -> None:
        self._last = last
        self._found: int | None = None
        """The newest row, when the writers were noted."""
        self._writers: set[str] = set()
        self._settled: int | None = None
        """Rows up to here can be read: no more will come between them."""

    @property
    def is_waiting(self) -> bool:
        return self._found is not None

    def read(self, connection: Connection) -> list[Item]:
        if self._settled is None:
            self._settle(connection)
        if self._settled is None:
            return []
        rows = connection.execute(self._some, (self._last, self._settled, BATCH_ROWS)).fetchall()
        if len(rows) < BATCH_ROWS:
            self._settled = None
        if rows:
            self._last = rows[-1][0]
        return [Item(document.encode(), number) for number, document in rows]

    def _settle(self, connection: Connection) -> None:
        if self._found is None:
            (newest,) = connection.execute(self._newest).fetchone() or (None,)
            if newest is None or newest <= self._last:
                return
            self._found, self._writers = newest, self._writing(connection)
        else:
            self._writers &= self._writing(connection)
        if not self._writers:
            self._settled, self._found = self._found, None

    def _writing(self, connection: Connection) -> set[str]:
        return {who for (who,) in connection.execute(WRITERS, self._where)}
