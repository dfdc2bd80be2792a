"""Connections to PostgreSQL for sources and sinks: every wait has a limit."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql

from penstock.errors import UsageError
from penstock.postgresql import parse_address, refusal_of

PostgresConnection = psycopg.Connection[tuple[Any, ...]]
CONNECT_TIMEOUT_S = 5
TIMEOUT_S = 20.0


def connect(url: str, timeout_s: float = TIMEOUT_S) -> PostgresConnection:
    """A connection in autocommit mode, on which no statement takes longer than `timeout_s`.

    Raises `UsageError` if PostgreSQL refuses it permanently, psycopg's own error if the server is
    unavailable.
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
        with limit_time(connection, timeout_s):
            connection.execute(
                "SELECT set_config('statement_timeout', %s, false)", (f"{int(timeout_s * 1000)}",)
            )
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def limit_time(connection: PostgresConnection, timeout_s: float) -> Iterator[None]:
    """Limit the time of the block: after that the connection is cut, and `OperationalError`
    raised. The server's own limit does not help if the server hangs.
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


def quote_table(table: str) -> sql.Identifier:
    """`table` or `schema.table`, quoted."""
    return sql.Identifier(*table.split("."))


def parse_database(url: str) -> tuple[str, str]:
    """The host of a database, and its port and name."""
    given = parse_address(url)
    name = given.get("dbname") or given.get("user") or ""
    return given.get("host", ""), f"{given.get('port', '5432')}/{name}"
