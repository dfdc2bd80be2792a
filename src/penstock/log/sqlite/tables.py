"""Tables of the embedded log: current entries, entries as of a pin, pages and snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import apsw

from penstock.errors import LimitError, PinExpiredError
from penstock.log.api import Pin, TableEntry
from penstock.log.declaring.objects import Stream
from penstock.log.reading.table import check_table
from penstock.log.sqlite.committer import Write
from penstock.log.sqlite.connection import ReaderPool, many, one
from penstock.records.event import from_microseconds, now_us

SNAPSHOT_ROWS = 4096


class SqliteTables:
    """Reads entries. Every call is one read transaction, so it sees one moment."""

    def __init__(self, pool: ReaderPool) -> None:
        self._pool = pool

    def get(self, stream: Stream, keys: Sequence[bytes], at: Pin | None) -> list[TableEntry | None]:
        check_table(stream)
        with self._pool.lend() as connection:
            connection.execute("BEGIN")
            commit = None if at is None else pinned_commit(connection, at)
            found = _entries(connection, stream.id, keys, commit)
            connection.execute("COMMIT")
        return [found.get(key) for key in keys]

    def page(
        self, stream: Stream, after: bytes | None, limit: int, at: Pin | None, limit_max: int
    ) -> list[TableEntry]:
        check_table(stream)
        if not 1 <= limit <= limit_max:
            raise LimitError(
                f"a page can have 1 to {limit_max} entries (page_rows_max), not {limit}"
            )
        with self._pool.lend() as connection:
            connection.execute("BEGIN")
            commit = None if at is None else pinned_commit(connection, at)
            rows = _page(connection, stream.id, after, limit, commit)
            connection.execute("COMMIT")
        return rows

    def snapshot(self, stream: Stream) -> Iterator[list[TableEntry]]:
        check_table(stream)
        with self._pool.lend() as connection:
            connection.execute("BEGIN")
            after: bytes | None = None
            while rows := _page(connection, stream.id, after, SNAPSHOT_ROWS, None):
                yield rows
                after = rows[-1].key


def pinned_commit(connection: apsw.Connection, pin: Pin) -> int:
    row = one(connection, "pin", int(pin.token), now_us())
    if row is None:
        raise PinExpiredError(
            f"pin {pin.token} expired at {pin.expires.isoformat()} or was released: pin again"
        )
    return int(row[0])


def _entries(
    connection: apsw.Connection, stream_id: int, keys: Sequence[bytes], commit: int | None
) -> dict[bytes, TableEntry]:
    # In key order, as they are stored: adjacent entries share pages.
    wanted = tuple(sorted(set(keys)))
    if not wanted:
        return {}
    rows = many(connection, "entries_of", apsw.carray(wanted), stream_id)
    if commit is None:
        return {key: TableEntry(key, *rest) for key, _, *rest in rows}
    found = {key: TableEntry(key, *rest) for key, since, *rest in rows if since <= commit}
    for key in wanted:
        if key not in found:
            values = {"stream": stream_id, "key": key, "commit": commit}
            old = one(connection, "old_entry", values)
            if old is not None:
                found[key] = TableEntry(key, *old)
    return found


def _page(
    connection: apsw.Connection, stream_id: int, after: bytes | None, limit: int, commit: int | None
) -> list[TableEntry]:
    start = after if after is not None else b""
    if commit is None:
        rows = many(connection, "entries_after", stream_id, start, limit)
    else:
        values = {"stream": stream_id, "after": start, "commit": commit, "limit": limit}
        rows = many(connection, "entries_after_at", values)
    return [TableEntry(*row) for row in rows]


def write_pin(write: Write, duration_s: float) -> Pin:
    expires_us = write.time_us + int(duration_s * 1e6)
    token = write.insert("insert_pin", write.commit_number, expires_us)
    return Pin(str(token), from_microseconds(expires_us))
