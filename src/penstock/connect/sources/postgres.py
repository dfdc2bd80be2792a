"""PostgreSQL as a source: the rows of an append-only table, or notifications.

    PostgresListenSource("orders", "postgresql://localhost/shop", "orders", table="orders")

An unavailable server is retried, less and less often; the connector keeps running meanwhile.
"""

from __future__ import annotations

import time
from collections import deque

import psycopg
from psycopg import sql

from penstock.connect.clients.source import Item, Source
from penstock.connect.protocol.numbering import OwnNumbers, explain_overtaking
from penstock.connect.systems.postgres import (
    TIMEOUT_S,
    PostgresConnection,
    connect,
    limit_time,
    quote_table,
)
from penstock.patience import Patience

BATCH_ROWS = 1000
IDLE_S = 0.02

WRITERS = """
    SELECT virtualtransaction FROM pg_locks
    WHERE mode = 'RowExclusiveLock' AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND (relation = %(table)s::text::regclass
           OR relation = pg_get_serial_sequence(%(table)s::text, %(column)s::text)::regclass
           OR relation IN (SELECT relid FROM pg_partition_tree(%(table)s::text::regclass)))
"""


class PostgresListenSource(Source):
    """Listens on a channel (NOTIFY), and reads a table if one is given.

    With `table`, every row is read once, in the order of `id_column`, as JSON. A message's number
    is the row's id, which must be 0 or more and come from the column's sequence or identity.
    Notifications only say that there may be rows; the table is polled every `poll_s` in any case.
    A row waits until every transaction that was writing to the table when it was found has ended:
    one of them may still add a smaller id. Rows may be missed if a transaction draws ids for
    another one, or if the sequence has a CACHE; changes to a row that was read are not seen.

    Without `table`, the payloads of the notifications are the messages, each at most once:
    notifications sent while nobody listens are lost, which may have happened between any two of
    `connections`, and those that have not reached the log are lost with the process.
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
        self._connection: PostgresConnection | None = None
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
        elif self._sent:  # messages that may not have arrived are not sent again
            self.tell(explain_overtaking(self.name, len(self._sent)))
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
                self._connection = self._listen()
            self._patience.note_answer(self._fetch(self._connection))
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            self._lose()
            self._patience.note_failure(error)

    def _listen(self) -> PostgresConnection:
        connection = connect(self._url)
        try:
            with limit_time(connection, TIMEOUT_S):
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

    def _fetch(self, connection: PostgresConnection) -> float:
        """Add to what is ready; return how long to wait until the next fetch."""
        heard = [notice.payload for notice in connection.notifies(timeout=0)]
        if self._rows is None:
            for payload in heard:
                self._add(payload.encode())
            return IDLE_S
        if heard:
            self._look_at = 0.0
        if time.monotonic() < self._look_at:
            return IDLE_S
        with limit_time(connection, TIMEOUT_S):
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
    """The rows of a table in id order, each only after all smaller ids are known."""

    def __init__(self, table: str, column: str) -> None:
        name, key = quote_table(table), sql.Identifier(column)
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
        """The newest row at the time the writers were noted."""
        self._writers: set[str] = set()
        self._complete: int | None = None
        """Rows up to here can be read: no more will appear between them."""

    @property
    def is_waiting(self) -> bool:
        return self._found is not None

    def read(self, connection: PostgresConnection) -> list[Item]:
        if self._complete is None:
            self._find_complete(connection)
        if self._complete is None:
            return []
        rows = connection.execute(self._some, (self._last, self._complete, BATCH_ROWS)).fetchall()
        if len(rows) < BATCH_ROWS:
            self._complete = None
        if rows:
            self._last = rows[-1][0]
        return [Item(document.encode(), number) for number, document in rows]

    def _find_complete(self, connection: PostgresConnection) -> None:
        if self._found is None:
            (newest,) = connection.execute(self._newest).fetchone() or (None,)
            if newest is None or newest <= self._last:
                return
            self._found, self._writers = newest, self._find_writers(connection)
        else:
            self._writers &= self._find_writers(connection)
        if not self._writers:
            self._complete, self._found = self._found, None

    def _find_writers(self, connection: PostgresConnection) -> set[str]:
        return {who for (who,) in connection.execute(WRITERS, self._where)}
