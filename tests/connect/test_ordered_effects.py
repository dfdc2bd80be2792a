"""Strict order and effects once: outbox, relay, a group with one message in flight, a database."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from penstock import CreateStream, declare, outbox, read_events
from penstock import open as open_log
from penstock.testing.processes import wait_until
from penstock.testing.servers import PostgresServer
from tests.connect.test_outbox import Payment, emptied

WRITERS = 3
PAYMENTS = 120
"""By each writer."""


@contextlib.contextmanager
def program(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", *words])
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def pay(database: str, writer: int) -> None:
    """Business transactions beside those of the other writers; some of them fail."""
    with psycopg.connect(database) as connection:
        for n in range(PAYMENTS):
            amount = writer * PAYMENTS + n
            with contextlib.suppress(ZeroDivisionError), connection.transaction():
                outbox.add(connection, "payments", Payment("ada", amount), strict=True)
                if n % 10 == 9:
                    raise ZeroDivisionError
                add = "INSERT INTO business (amount) VALUES (%s)"
                connection.execute(add, (amount,))


@pytest.mark.timeout(600)
@pytest.mark.row("H18", engine="embedded")
def test_effects_follow_in_order_and_once(
    postgres: PostgresServer, tmp_path: Path, chance: random.Random
) -> None:
    """Relay and handler are killed at random moments. The oracle: every payment that was committed
    has one effect, and effects are in the order in which payments were committed.
    """
    database, url = emptied(postgres), str(tmp_path / "log.db")
    with psycopg.connect(database, autocommit=True) as connection:
        outbox.create(connection)
        for table in ("business", "effects"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
        connection.execute("CREATE TABLE business (amount BIGINT PRIMARY KEY)")
        connection.execute(
            "CREATE TABLE effects (id TEXT PRIMARY KEY, amount BIGINT, place BIGSERIAL)"
        )
        with open_log(url, create=True) as log:
            log.apply([CreateStream(declare("payments", Payment, ids="producer"))])
        writers = [threading.Thread(target=pay, args=(database, n)) for n in range(WRITERS)]
        for writer in writers:
            writer.start()
        relay = ("penstock.cli", "outbox", "relay", database, "--log", url)
        handler = ("tests.connect.effects", url, database)

        def effects() -> int:
            return int(connection.execute("SELECT count(*) FROM effects").fetchone()[0])  # type: ignore[index]

        for _ in range(5):
            wanted = effects() + chance.randrange(3, 25)
            with program(*relay), program(*handler):
                wait_until(lambda wanted=wanted: effects() >= wanted, 120, "effects")  # type: ignore[misc]
        for writer in writers:
            writer.join()
        with program(*relay, "--until-idle") as last:
            assert last.wait(120) == 0
        with program(*handler, "3") as last:
            assert last.wait(240) == 0
        paid = connection.execute("SELECT amount FROM business").fetchall()
        done = connection.execute("SELECT id, amount FROM effects ORDER BY place").fetchall()
        connection.execute("DROP TABLE effects, business")
    assert sorted(amount for _, amount in done) == sorted(amount for (amount,) in paid)
    numbers = [int(id_) for id_, _ in done]
    assert numbers == sorted(numbers), "an effect came before that of an earlier payment"
    with open_log(url) as log:
        events = [(e.id, e.data.amount) for e in read_events(log, "payments", Payment)]
    assert [(str(id_), amount) for id_, amount in events] == done
