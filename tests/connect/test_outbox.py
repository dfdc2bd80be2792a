"""The outbox: rows in the user's own transaction, published once, whatever is killed when."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row

from penstock import CreateStream, DropStream, Log, Record, declare, outbox, read_events
from penstock import open as open_log
from penstock.errors import (
    DatabaseGoneError,
    FencedError,
    OutboxError,
    RecordError,
    UsageError,
)
from penstock.failpoints import CONNECTOR_NAMES, ENVIRONMENT
from penstock.log.api import Commit
from penstock.testing.processes import wait_until
from penstock.testing.servers import PostgresServer


class Payment(Record):
    user: str
    amount: int


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'business.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return emptied(server)


def emptied(server: PostgresServer) -> str:
    with psycopg.connect(server.url) as connection:
        for table in ("penstock_outbox", "penstock_outbox_origin", "accounts"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
    return server.url


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("payments", Payment, ids="producer"))])
        yield opened


def connect(database: str) -> contextlib.AbstractContextManager[Any]:
    return outbox.connect(database)


def prepare(database: str) -> None:
    with connect(database) as connection:
        outbox.create(connection)
        outbox.create(connection)  # there already: nothing happens
        connection.execute("CREATE TABLE accounts (name TEXT PRIMARY KEY, balance BIGINT)")
        connection.commit()


def pay(database: str, amounts: range, *, strict: bool = False) -> None:
    with connect(database) as connection:
        for amount in amounts:
            add = "INSERT INTO accounts (name, balance) VALUES ('{}', {})"
            connection.execute(add.format(f"a{amount}", amount))
            outbox.add(connection, "payments", Payment("ada", amount), strict=strict)
            connection.commit()


def amounts(log: Log) -> list[int]:
    return [event.data.amount for event in read_events(log, "payments", Payment)]


def test_whatever_rows_the_connection_gives(database: str, log: Log) -> None:
    prepare(database)

    def odd() -> contextlib.AbstractContextManager[Any]:
        return contextlib.closing(opened(database))

    with odd() as connection:
        outbox.add(connection, "payments", Payment("ada", 1), strict=True)
        connection.commit()
    assert outbox.Relay(log, odd).drain() == 1
    assert amounts(log) == [1]


def opened(database: str) -> Any:
    """A connection whose rows are dictionaries."""
    if database.startswith("postgresql"):
        return psycopg.connect(database, row_factory=dict_row)
    made = sqlite3.connect(database.removeprefix("sqlite:///"))
    made.row_factory = lambda cursor, row: {
        column[0]: value for column, value in zip(cursor.description, row, strict=True)
    }
    return made


@pytest.mark.row("H15", engine="embedded")
def test_rows_are_published_once_and_deleted(database: str, log: Log) -> None:
    prepare(database)
    with connect(database) as connection:
        outbox.add(
            connection, "payments", Payment("ada", 1), key="ada", headers={"trace": "x"},
            time=dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        )  # fmt: skip
        connection.commit()
        outbox.add(connection, "payments", Payment("ada", 2))
        connection.rollback()
        outbox.add(connection, "payments", {"user": "bob", "amount": 3})
        connection.commit()
    relay = outbox.Relay(log, lambda: connect(database))
    assert relay.drain() == 2
    assert relay.drain() == 0
    first, second = read_events(log, "payments", Payment)
    assert (first.data, first.key, first.headers) == (Payment("ada", 1), b"ada", {"trace": "x"})
    assert first.time == dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    assert second.data == Payment("bob", 3)
    with connect(database) as connection:
        rows = connection.execute("SELECT count(*) FROM penstock_outbox").fetchall()
        assert rows[0][0] == 0


def test_sqlalchemy_connections_and_sessions(database: str, log: Log) -> None:
    from sqlalchemy.orm import Session

    prepare(database)
    url = database.replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(url)
    try:
        with engine.begin() as connection:
            outbox.add(connection, "payments", Payment("ada", 1))
        with Session(engine) as session, session.begin():
            outbox.add(session, "payments", Payment("ada", 2), strict=True)
        with contextlib.suppress(ZeroDivisionError), engine.begin() as connection:
            outbox.add(connection, "payments", Payment("ada", 3))
            raise ZeroDivisionError
    finally:
        engine.dispose()
    outbox.Relay(log, lambda: connect(database)).drain()
    assert amounts(log) == [1, 2]


@pytest.mark.row("H15", engine="embedded")
@pytest.mark.parametrize("step", [n for n in CONNECTOR_NAMES if n.startswith("outbox.")])
def test_the_relay_is_killed_at(database: str, log: Log, step: str) -> None:
    kill_the_relay(database, log, step)


def kill_the_relay(database: str, log: Log, step: str) -> None:
    prepare(database)
    pay(database, range(50))
    command = [sys.executable, "-m", "penstock.cli", "outbox", "relay", database, "--until-idle",
               "--log", log.url]  # fmt: skip
    armed = {**os.environ, ENVIRONMENT: f"{step}=kill"}
    killed = subprocess.run(command, env=armed, timeout=60, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    pay(database, range(50, 80))
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert amounts(log) == list(range(80))


@pytest.mark.row("H15", engine="embedded")
def test_numbers_that_commit_out_of_order_are_not_lost(postgres: PostgresServer, log: Log) -> None:
    database = emptied(postgres)
    prepare(database)
    relay = outbox.Relay(log, lambda: connect(database))
    with connect(database) as slow, connect(database) as quick:
        first = outbox.add(slow, "payments", Payment("slow", 1))
        second = outbox.add(quick, "payments", Payment("quick", 2))
        assert first < second
        quick.commit()
        assert relay.drain() == 1
        slow.commit()
        assert relay.drain() == 1
    assert amounts(log) == [2, 1]


@pytest.mark.row("H18", engine="embedded")
def test_in_strict_mode_numbers_have_the_order_of_commits(
    postgres: PostgresServer, log: Log
) -> None:
    database = emptied(postgres)
    prepare(database)
    order: list[int] = []
    with connect(database) as slow:
        outbox.add(slow, "payments", Payment("slow", 1), strict=True)

        def quick() -> None:
            with connect(database) as connection:
                outbox.add(connection, "payments", Payment("quick", 2), strict=True)
                connection.commit()
            order.append(2)

        other = threading.Thread(target=quick)
        other.start()
        with connect(database) as watching:
            waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            wait_until(
                lambda: watching.execute(waits).fetchall()[0][0] == 1, 10, "the other one waiting"
            )
        order.append(1)
        slow.commit()
        other.join(10)
    assert order == [1, 2]
    outbox.Relay(log, lambda: connect(database)).drain()
    assert amounts(log) == [1, 2]


def test_two_relays_do_not_both_go_on(database: str, log: Log) -> None:
    prepare(database)
    pay(database, range(3))
    first, second = (outbox.Relay(log, lambda: connect(database)) for _ in range(2))
    stop = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            first.run(stop)
        except FencedError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: first.published == 3, 20, "the first one publishing")
        second.drain()
        pay(database, range(3, 6))
        wait_until(lambda: failed, 20, "the first one being fenced")
        second.drain()
    finally:
        stop.set()
        thread.join(20)
    assert amounts(log) == list(range(6))


def test_what_does_not_fit_is_named_and_nothing_behind_it_is_lost(database: str, log: Log) -> None:
    prepare(database)
    with connect(database) as connection:
        number = outbox.add(connection, "payments", {"user": 3})
        connection.commit()
    pay(database, range(2))
    relay = outbox.Relay(log, lambda: connect(database))
    with pytest.raises(OutboxError, match=rf"row {number} of the outbox is not valid"):
        relay.drain()
    with connect(database) as connection:
        connection.execute(f"DELETE FROM penstock_outbox WHERE id = {number}")  # noqa: S608
        connection.commit()
    relay.drain()
    assert amounts(log) == [0, 1]


def test_an_outbox_of_another_database_is_noticed(tmp_path: Path, log: Log) -> None:
    for name in ("one", "two"):
        database = f"sqlite:///{tmp_path / name}.db"
        prepare(database)
        pay(database, range(2))
        relay = outbox.Relay(log, lambda: connect(database))  # noqa: B023
        if name == "one":
            relay.drain()
        else:
            with pytest.raises(OutboxError, match="is fed by another outbox"):
                relay.drain()


def test_an_outbox_that_was_made_anew_is_noticed_by_a_relay_that_runs(
    tmp_path: Path, log: Log
) -> None:
    """Its numbers begin again: the stream would take them for repeats."""
    file = tmp_path / "business.db"
    database = f"sqlite:///{file}"
    relay = outbox.Relay(log, lambda: connect(database))
    prepare(database)
    pay(database, range(2))
    assert relay.drain() == 2
    file.unlink()
    prepare(database)
    pay(database, range(2, 4))
    with pytest.raises(OutboxError, match="is fed by another outbox"):
        relay.drain()
    with connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM penstock_outbox").fetchall() == [(2,)]


def test_mistakes_are_told(tmp_path: Path, log: Log) -> None:
    log.apply([CreateStream(declare("plain", Payment))])
    with contextlib.closing(sqlite3.connect(tmp_path / "b.db")) as connection:
        outbox.create(connection)
        with pytest.raises(RecordError, match="cannot be written to the outbox"):
            outbox.add(connection, "payments", object())
        outbox.add(connection, "plain", Payment("a", 1))
        connection.commit()
    with pytest.raises(UsageError, match="not a connection that the outbox supports"):
        outbox.add(object(), "payments", Payment("a", 1))
    with pytest.raises(OutboxError, match="--ids producer"):
        outbox.Relay(log, lambda: connect(f"sqlite:///{tmp_path / 'b.db'}")).drain()
    with pytest.raises(UsageError, match="not a valid database address"), connect("mysql://x"):
        pass


def test_a_database_without_an_outbox_or_that_is_away(database: str, log: Log) -> None:
    relay = outbox.Relay(log, lambda: connect(database))
    with pytest.raises(OutboxError, match="penstock outbox create"):
        relay.drain()
    away = outbox.Relay(log, lambda: connect("postgresql://nobody@127.0.0.1:9/x"))
    with pytest.raises(DatabaseGoneError, match="cannot be reached"):
        away.drain()


def test_a_stream_is_one_stream_however_it_is_written(tmp_path: Path, log: Log) -> None:
    """Another outbox is noticed whichever name its rows give; the same one may use both."""
    databases = [f"sqlite:///{tmp_path / name}.db" for name in ("one", "two")]
    for database in databases:
        prepare(database)
        with connect(database) as connection:
            outbox.add(connection, "default.payments", Payment("ada", 1))
            connection.commit()
        pay(database, range(2, 4))
    outbox.Relay(log, lambda: connect(databases[0])).drain()
    assert amounts(log) == [1, 2, 3]
    with pytest.raises(OutboxError, match="stream payments is fed by another outbox"):
        outbox.Relay(log, lambda: connect(databases[1])).drain()
    assert waiting(databases[1]) == 3


def waiting(database: str) -> int:
    with connect(database) as connection:
        return int(connection.execute("SELECT count(*) FROM penstock_outbox").fetchall()[0][0])


def test_of_outboxes_that_begin_at_once_one_gets_the_stream(tmp_path: Path, log: Log) -> None:
    """Nothing of the others is taken for a repeat, and they keep their rows."""
    databases = [f"sqlite:///{tmp_path / name}.db" for name in ("one", "two", "three")]
    for database in databases:
        prepare(database)
    for number in range(20):
        stream = f"s{number}"
        log.apply([CreateStream(declare(stream, Payment, ids="producer"))])
        for database in databases:
            with connect(database) as connection:
                connection.execute("DELETE FROM penstock_outbox")
                for n in range(number, number + 2):
                    outbox.add(connection, stream, Payment("ada", n))
                connection.commit()
        published = drain_at_once(log, databases)
        assert sorted(published) == [0, 0, 2]
        assert sorted(waiting(database) for database in databases) == [0, 2, 2]
        assert len(list(read_events(log, stream))) == 2


def drain_at_once(log: Log, databases: list[str]) -> list[int]:
    """How many each has published."""
    ready = threading.Barrier(len(databases))
    published = dict.fromkeys(databases, 0)

    def run(database: str) -> None:
        relay = outbox.Relay(log, lambda: connect(database))
        ready.wait(30)
        with contextlib.suppress(OutboxError):
            published[database] = relay.drain()

    threads = [threading.Thread(target=run, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return list(published.values())


def test_a_stream_that_was_made_anew_takes_another_outbox(tmp_path: Path, log: Log) -> None:
    for name in ("one", "two"):
        database = f"sqlite:///{tmp_path / name}.db"
        prepare(database)
        pay(database, range(2))
        assert outbox.Relay(log, lambda: connect(database)).drain() == 2  # noqa: B023
        assert amounts(log) == [0, 1]
        log.apply([
            DropStream("payments"), CreateStream(declare("payments", Payment, ids="producer"))
        ])  # fmt: skip


def test_what_an_earlier_version_noted_of_a_stream_counts(tmp_path: Path, log: Log) -> None:
    """It kept the outbox of a stream under the name that the rows gave."""
    database = f"sqlite:///{tmp_path / 'one'}.db"
    prepare(database)
    pay(database, range(2))
    for name in ("payments", "default.payments"):
        holder = log.hold(f"earlier/{name}")
        log.commit(holder, 0, Commit(progress={f"outbox/stream/{name}": b"another"}))
        with pytest.raises(OutboxError, match="is fed by another outbox"):
            outbox.Relay(log, lambda: connect(database)).drain()
        log.commit(holder, 1, Commit(progress={f"outbox/stream/{name}": None}))
    with connect(database) as connection:
        [[own]] = connection.execute("SELECT origin FROM penstock_outbox_origin").fetchall()
    holder = log.hold("earlier")
    log.commit(holder, 0, Commit(progress={"outbox/stream/payments": own.encode()}))
    assert outbox.Relay(log, lambda: connect(database)).drain() == 2
    assert log.progress("outbox/stream/payments") is None, "it is noted anew"


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, log: Log) -> None:
    """Such as one that was edited by hand, or is nested deeper than Python can follow."""
    database = f"sqlite:///{tmp_path / 'one'}.db"
    prepare(database)
    for data in (b'{"user": ', b"[" * 5000 + b"]" * 5000):
        with connect(database) as connection:
            number = outbox.add(connection, "payments", {"user": "ada", "amount": 1})
            change = "UPDATE penstock_outbox SET data = ? WHERE id = ?"
            connection.execute(change, (data, number))
            connection.commit()
        with pytest.raises(OutboxError, match=f"row {number} of the outbox is not valid"):
            outbox.Relay(log, lambda: connect(database)).drain()
        with connect(database) as connection:
            connection.execute("DELETE FROM penstock_outbox")
            connection.commit()
