"""PostgreSQL as a source and as a sink: a real one, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock import CreateStream, Log, declare
from penstock import open as open_log
from penstock.connect.clients.source import Item
from penstock.connect.hosts.registry import records
from penstock.connect.hosts.sink_host import SinkHost
from penstock.connect.hosts.spool import read_dead
from penstock.connect.hosts.targets import SinkMessage, SinkTarget
from penstock.connect.protocol.marks import Mark
from penstock.connect.push.worker import DialOptions, SinkWorker
from penstock.connect.sinks.postgres import PostgresSink
from penstock.connect.sources.postgres import (
    PostgresListenSource,
    _Rows,
)
from penstock.connect.systems.postgres import PostgresConnection, connect
from penstock.errors import ConnectorError, UsageError
from penstock.testing.processes import wait_until
from penstock.testing.servers import PostgresServer
from tests.connect.hosting import Make, hosted, refused, running, texts, wait_applied

pytestmark = pytest.mark.row("W9", engine="any")

SCHEMA = """
    DROP TABLE IF EXISTS events, people, pairs, penstock_sink, penstock_sink_pending;
    CREATE TABLE events (id bigserial PRIMARY KEY, n int NOT NULL);
    CREATE TABLE people (
        id int PRIMARY KEY, name text, born date, score numeric, tags text[], more jsonb,
        CHECK (score >= 0)
    );
    CREATE TABLE pairs (a int, b text, "Some Value" int, PRIMARY KEY (a, b));
"""


@pytest.fixture
def server(postgres: PostgresServer) -> PostgresServer:
    do(postgres, SCHEMA)
    return postgres


def do(server: PostgresServer, *statements: str) -> list[Any]:
    """The rows of the last statement."""
    rows: list[Any] = []
    with psycopg.connect(server.url) as connection:
        for statement in statements:
            found = connection.execute(statement.encode())
            rows = found.fetchall() if found.description else []
    return rows


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("raw", content="bytes"))])
        yield opened


def come(log: Log, count: int) -> None:
    def has_come() -> bool:
        return sum(record.messages for record in records(log)) >= count

    wait_until(has_come, 60, f"{count} messages")


def numbers(log: Log) -> list[int]:
    return [json.loads(text)["n"] for text in texts(log)]


def insert(server: PostgresServer, first: int, last: int) -> None:
    many = f"INSERT INTO events (n) SELECT generate_series({first}, {last - 1})"
    do(server, many, "NOTIFY news")


def table(server: PostgresServer, **options: Any) -> PostgresListenSource:
    return PostgresListenSource("a", server.url, "news", table="events", **options)


# Sources


def test_a_table_goes_on_where_the_log_has_it(server: PostgresServer, log: Log) -> None:
    insert(server, 0, 2500)
    with running(log, table(server)):
        come(log, 2500)
    insert(server, 2500, 2600)
    for until in (2600, 2700):
        with running(log, table(server)):
            come(log, until)
            insert(server, until, until + 100)
            come(log, until + 100)
    assert numbers(log) == list(range(2800))
    assert texts(log)[0] == '{"id":1,"n":0}'


def test_a_notification_is_heard_before_the_table_is_looked_at(
    server: PostgresServer, log: Log
) -> None:
    with running(log, table(server, poll_s=1000.0)):
        for n in range(5):
            insert(server, n, n + 1)
            come(log, n + 1)
    with running(log, table(server, poll_s=0.1)):
        do(server, "INSERT INTO events (n) VALUES (5)")  # nobody is notified
        come(log, 6)
    assert numbers(log) == list(range(6))


def test_the_server_is_killed_in_the_middle(server: PostgresServer, log: Log) -> None:
    with running(log, table(server)) as connector:
        for n in range(3):
            insert(server, n * 5000, (n + 1) * 5000)
            come(log, n * 5000 + 1)
            server.kill()
            connector.check()
            server.start()
        come(log, 15_000)
        assert connector.counts.connections == 1, "the connector never noticed"
    assert numbers(log) == list(range(15_000))


@pytest.mark.parametrize("early", ["INSERT INTO events (n) VALUES (0)", "draw"])
def test_a_smaller_id_that_is_committed_later_is_not_lost(
    server: PostgresServer, log: Log, early: str
) -> None:
    with running(log, table(server, poll_s=0.05)), psycopg.connect(server.url) as slow:
        if early == "draw":
            found = slow.execute("SELECT nextval('events_id_seq')").fetchone()
        else:
            slow.execute(early.encode())
        insert(server, 1, 3)
        threading.Event().wait(0.5)  # that nothing comes cannot be waited for otherwise
        assert texts(log) == []
        if early == "draw":
            slow.execute("INSERT INTO events (id, n) VALUES (%s, 0)", found)
        slow.commit()
        come(log, 3)
    assert numbers(log) == [0, 1, 2]


def test_a_transaction_that_begins_while_the_newest_row_is_found_is_waited_for(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rows there are is asked before who writes: whoever has a smaller id is seen then."""
    insert(server, 0, 1)
    rows, looks = _Rows("events", "id"), list[object]()
    look = _Rows._find_writers
    with psycopg.connect(server.url) as slow, connect(server.url) as connection:

        def writing(rows: _Rows, connection: PostgresConnection) -> set[str]:
            found = look(rows, connection)
            if not looks:
                slow.execute("INSERT INTO events (n) VALUES (1)")
                insert(server, 2, 3)
            looks.append(found)
            return found

        monkeypatch.setattr(_Rows, "_find_writers", writing)
        read = [item for _ in range(5) for item in rows.read(connection)]
        slow.commit()
        read += [item for _ in range(5) for item in rows.read(connection)]
    assert [json.loads(item.data)["n"] for item in read] == [0, 1, 2]


def test_after_a_reset_nothing_comes_of_before_it(server: PostgresServer) -> None:
    insert(server, 0, 3)
    source = table(server)
    found: list[Item] = []

    def has_come() -> bool:
        found.extend(filter(None, [source.handle_next()]))
        return bool(found)

    for _ in range(2):
        found.clear()
        source.handle_reset(None)
        wait_until(has_come, 30, "the first row")
        assert [json.loads(item.data)["n"] for item in found] == [0]
    source.handle_close()


def test_many_write_at_once(server: PostgresServer, log: Log) -> None:
    def write(first: int) -> None:
        with psycopg.connect(server.url) as connection:
            for n in range(first, first + 200):
                connection.execute("INSERT INTO events (n) VALUES (%s)", (n,))
                if n % 3 == 0:
                    connection.commit()

    threads = [threading.Thread(target=write, args=(n * 200,)) for n in range(6)]
    with running(log, table(server, poll_s=0.01)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        come(log, 1200)
    assert sorted(numbers(log)) == list(range(1200))


def test_a_table_that_is_not_there(server: PostgresServer, log: Log) -> None:
    source = PostgresListenSource("a", server.url, "news", table="public.nothing")
    with pytest.raises(ConnectorError, match=r'relation "public\.nothing" does not exist'):
        with running(log, source) as connector:
            connector.finish(30)


def test_notifications(server: PostgresServer, log: Log) -> None:
    for first in (0, 10):
        source = PostgresListenSource("a", server.url, "News Of Today")
        with running(log, source):
            wait_until(lambda: source.connections, 30, "listening")  # noqa: B023
            do(
                server,
                *(f"SELECT pg_notify('News Of Today', '{n}')" for n in range(first, first + 10)),
            )
            come(log, first + 10)
            if first:
                server.kill()
                server.start()
                wait_until(lambda: source.connections == 2, 30, "listening again")  # noqa: B023
                do(server, "SELECT pg_notify('News Of Today', 'end')")
                come(log, 21)
    assert texts(log) == [*(f"{n}" for n in range(20)), "end"]


def test_notifications_that_are_not_safe_come_again(server: PostgresServer) -> None:
    source = PostgresListenSource("a", server.url, "news")
    source.handle_open()
    source.handle_reset(None)
    assert source.handle_next() is None
    do(server, *(f"SELECT pg_notify('news', '{n}')" for n in range(5)))
    taken = []

    def has_four() -> bool:
        taken.extend([item] if (item := source.handle_next()) else [])
        return len(taken) == 4

    wait_until(has_four, 30, "four")
    first = taken[0].point_of_ref
    source.handle_progress("a", first)
    source.handle_reset(first + 1)  # the listener went away and came again
    again = [source.handle_next() for _ in range(4)]
    assert [item and int(item.data) for item in again] == [2, 3, 4, None]
    told: list[str] = []
    source.on_tell = told.append
    source.handle_reset(1 << 60)  # and meanwhile another program has written
    assert source.handle_next() is None
    assert told == [
        "another program has written to a in the meantime: "
        "3 messages that were in transit may be lost"
    ]
    source.handle_close()


# Sinks


def people(server: PostgresServer, **options: Any) -> Make:
    return lambda name: PostgresSink(server.url, name, "public.people", ["id"], **options)


def worker(address: str, attempt: int, name: str = "w") -> SinkWorker:
    return SinkWorker(address, name, (attempt,), DialOptions(timeout_s=30))


def row(data: str | dict[str, object], key: str | None = None) -> tuple[bytes | None, int, bytes]:
    text = data if isinstance(data, str) else json.dumps(data)
    return None if key is None else key.encode(), 0, text.encode()


def person(number: int, **columns: object) -> tuple[bytes | None, int, bytes]:
    return row({"id": number, **columns}, f"{number}")


def names(server: PostgresServer) -> list[Any]:
    return do(server, "SELECT id, name FROM people ORDER BY id")


def test_rows_are_inserted_updated_and_deleted(server: PostgresServer, tmp_path: Path) -> None:
    with hosted(people(server), tmp_path) as address, worker(address, 1) as sink:
        full = {"born": "1815-12-10", "score": 1.5, "tags": ["a", "b"], "more": {"x": [1, None]}}
        sink.send([
            person(1, name="Ida"), person(2, name="Bob", **full), person(1, name="Ada", **full),
            person(3, name="Cyd"), row("", "3"), row('{"id": 4, "score": 0.10000000000000000001}'),
        ])  # fmt: skip
        assert sink.vote("t1", 0)
        assert names(server) == [], "not visible before it is committed"
        sink.resolve("t1", True)
        wait_applied(sink)
        assert names(server) == [(1, "Ada"), (2, "Bob"), (4, None)]
        (found,) = do(server, "SELECT born::text, score, tags, more FROM people WHERE id = 1")
        assert (found[0], float(found[1]), found[2], found[3]) == tuple(full.values())
        ((score,),) = do(server, "SELECT score FROM people WHERE id = 4")
        assert str(score).endswith("01"), "no digit is lost"
        start = sink.sent
        sink.send([person(1, name="no"), row("", "2")])
        assert sink.vote("t2", start)
        sink.resolve("t2", False)
        sink.sent = start
        sink.send([person(2, score=7)])
        assert sink.vote("t3", start)
        sink.resolve("t3", True)
        wait_applied(sink)
    assert do(server, "SELECT name, score FROM people WHERE id = 2") == [("Bob", 7)]
    assert names(server) == [(1, "Ada"), (2, "Bob"), (4, None)]


def test_a_transaction_of_nothing_but_deletes(server: PostgresServer, tmp_path: Path) -> None:
    """It has no bytes, so it ends where it starts; over several connections, as a query does it."""
    do(server, "INSERT INTO people (id) VALUES (1), (2)")
    with hosted(people(server), tmp_path) as address:
        for attempt, (key, commit) in enumerate([("1", False), ("2", True)]):
            with worker(address, 10 * attempt + 2) as sink:
                sink.send([row("", key)])
                assert sink.vote(key, sink.committed)
            with worker(address, 10 * attempt + 3) as sink:
                assert sink.uncommitted == (key,)
                sink.resolve(key, commit)
                sink.resolve(key, commit)
                wait_applied(sink)
    assert names(server) == [(1, None)]


def test_several_key_columns(server: PostgresServer, tmp_path: Path) -> None:
    def make(name: str) -> SinkTarget:
        return PostgresSink(server.url, name, "pairs", ["a", "b"])

    with hosted(make, tmp_path) as address, worker(address, 1) as sink:
        first = [row({"a": n % 3, "b": "x", "Some Value": n}) for n in range(10)]
        sink.send([*first, row({"a": 1, "b": "x"})])
        assert sink.vote("t1", 0)
        sink.resolve("t1", True)
        wait_applied(sink)
        start = sink.sent
        sink.send([row("", "1")])
        assert not sink.vote("t2", start), "which row is it?"
    assert sorted(do(server, "SELECT * FROM pairs")) == [(0, "x", 9), (1, "x", 7), (2, "x", 8)]


@pytest.mark.parametrize("commit", [True, False])
def test_a_vote_outlives_the_sink_and_the_server(
    server: PostgresServer, tmp_path: Path, commit: bool
) -> None:
    with hosted(people(server), tmp_path) as address, worker(address, 1) as sink:
        sink.send([person(n, name=f"{n}") for n in range(2000)])
        assert sink.vote("t1", 0)
        sink.send([person(5000)])
    server.kill()
    server.start()
    with hosted(people(server), tmp_path) as address, worker(address, 2) as sink:
        assert (sink.committed, sink.uncommitted) == (0, ("t1",))
        assert names(server) == []
        sink.resolve("t1", commit)
        wait_applied(sink)
    expected = [(n, f"{n}") for n in range(2000)] if commit else []
    assert names(server) == expected
    with hosted(people(server), tmp_path) as address, worker(address, 3) as sink:
        sink.send([person(7000, name="next")])
        assert sink.vote("t2", sink.committed)
        sink.resolve("t2", True)
        wait_applied(sink)
    assert names(server) == [*expected, (7000, "next")]


def test_an_earlier_versions_record_carries_over(server: PostgresServer, tmp_path: Path) -> None:
    """It had a table without the number of messages, and others that are not used any more."""
    do(
        server,
        "CREATE TABLE penstock_sink (worker text PRIMARY KEY, committed bigint NOT NULL DEFAULT 0,"
        " waiting smallint, waiting_end bigint, opened bigint NOT NULL DEFAULT 0)",
        "INSERT INTO penstock_sink VALUES ('public.people/w', 9, NULL, NULL, 4)",
        "INSERT INTO people (id) VALUES (1)",
    )
    with hosted(people(server), tmp_path) as address, worker(address, 1) as sink:
        assert sink.committed == 9, "known from the table alone"
        sink.send([person(2)])
        assert sink.vote("t", 9)
        sink.resolve("t", True)
        wait_applied(sink)
    assert names(server) == [(1, None), (2, None)]
    assert do(server, "SELECT committed, messages FROM penstock_sink") == [(18, 1)]


def test_a_large_transaction_does_not_stay_in_memory(server: PostgresServer) -> None:
    """It is one of the database's, written a page at a time."""
    sink = PostgresSink(server.url, "w", "people", ["id"])
    assert sink.applied() == Mark()
    kept = weakref.WeakSet[bytearray]()
    most = 0

    class Data(bytearray):
        __hash__ = object.__hash__  # type: ignore[assignment]

    def messages() -> Iterator[SinkMessage]:
        nonlocal most
        for number in range(5000):
            data = Data(json.dumps({"id": number, "name": "x" * 100}).encode())
            kept.add(data)
            most = max(most, len(kept))
            yield SinkMessage(None, 0, data)  # type: ignore[arg-type]
            del data

    sink.apply(messages(), Mark(), Mark(1, 5000))
    assert len(names(server)) == 5000
    assert most <= 1001
    sink.close()


@pytest.mark.parametrize(
    "bad",
    [
        row("no json"), row("[1]"), row({"name": "no id"}), row(""),
        row('{"id": 1, "name": "\\u0000"}'),
        row({"id": "x"}), row({"id": 1, "score": -1}), row({"id": 1, "no column": 1}),
        row("", "no number"), row({"id": None}), (None, 0, b'{"id": 1, "name": "\xff"}'),
    ],
)  # fmt: skip
def test_what_the_table_refuses_is_voted_against(
    server: PostgresServer, tmp_path: Path, bad: tuple[bytes | None, int, bytes]
) -> None:
    with hosted(people(server), tmp_path) as address, worker(address, 1) as sink:
        sink.send([person(1), bad])
        assert not sink.vote("t", 0)
        sink.resolve("t", False)
        sink.sent = 0
        sink.send([person(2)])
        assert sink.vote("good", 0)
        sink.resolve("good", True)
        wait_applied(sink)
    assert names(server) == [(2, None)]


def test_what_is_refused_only_at_the_end_of_a_transaction_is_voted_against_too(
    server: PostgresServer, tmp_path: Path
) -> None:
    """A constraint that is deferred would refuse the commit of what was voted for."""
    unique = "ALTER TABLE people ADD UNIQUE (name) DEFERRABLE INITIALLY DEFERRED"
    do(server, unique)
    with hosted(people(server), tmp_path) as address, worker(address, 1) as sink:
        sink.send([person(1, name="ada"), person(2, name="ada")])
        assert not sink.vote("t", 0)
        sink.resolve("t", False)
    assert names(server) == []


@pytest.mark.row("X10", engine="any")
def test_what_is_refused_after_it_was_decided_is_put_aside(
    server: PostgresServer, tmp_path: Path
) -> None:
    """The rows around it are there; the one that is refused can be looked at, and why."""
    told: list[str] = []
    with hosted(people(server, rehearse=False), tmp_path, told) as address:
        with worker(address, 1) as sink:
            sink.send([person(n, score=-1 if n in (3, 7) else 1) for n in range(10)])
            assert sink.vote("t", 0), "it was not tried"
            sink.resolve("t", True)
            wait_applied(sink)
            sink.send([person(11)])
            assert sink.vote("next", sink.committed)
            sink.resolve("next", True)
            wait_applied(sink)
    assert [number for number, _ in names(server)] == [0, 1, 2, 4, 5, 6, 8, 9, 11]
    dead = read_dead(tmp_path)
    assert [(found.name, found.place.messages, found.message.key) for found in dead] == [
        ("w", 3, b"3"), ("w", 7, b"7"),
    ]  # fmt: skip
    assert all("violates check constraint" in found.error for found in dead)
    assert sum("which was set aside" in line for line in told) == 2


def test_a_table_that_is_gone_is_not_a_row_that_is_refused(
    server: PostgresServer, tmp_path: Path
) -> None:
    """Nothing is put aside: the sink gives up, and goes on when it is started with the table."""
    with SinkHost(people(server), tmp_path) as host:
        address = "{}:{}".format(*host.address)
        with worker(address, 1) as sink:
            sink.send([person(1)])
            do(server, "ALTER TABLE people RENAME TO elsewhere")
            assert sink.vote("t", 0)
            sink.resolve("t", True)
            wait_until(lambda: host._failure is not None, 30, "its giving up")
        with pytest.raises(UsageError, match="the table must exist"):
            host.check()
    do(server, "ALTER TABLE elsewhere RENAME TO people")
    with hosted(people(server), tmp_path) as address, worker(address, 2) as sink:
        wait_applied(sink)
    assert names(server) == [(1, None)]
    assert read_dead(tmp_path) == []


def test_several_workers_begin_at_once(server: PostgresServer, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def push(address: str, number: int) -> None:
        try:
            with worker(address, 1, f"w{number}") as sink:
                sink.send([person(n) for n in range(number * 100, number * 100 + 100)])
                assert sink.vote("t", 0)
                sink.resolve("t", True)
                wait_applied(sink)
        except BaseException as error:
            failures.append(error)

    with hosted(people(server), tmp_path) as address:
        threads = [threading.Thread(target=push, args=(address, n)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    assert len(names(server)) == 600


def test_key_columns_are_needed(server: PostgresServer) -> None:
    with pytest.raises(UsageError, match="no key column given"):
        PostgresSink(server.url, "w", "people", [])


def test_the_server_is_down(server: PostgresServer, tmp_path: Path) -> None:
    """Votes and outcomes do not need it; what is decided is applied when it is back."""
    told: list[str] = []
    with hosted(people(server), tmp_path, told) as address, worker(address, 1) as sink:
        sink.send([person(1)])
        server.kill()
        assert sink.vote("t1", 0)
        sink.resolve("t1", True)
        wait_until(lambda: any("not available" in line for line in told), 30, "its being noticed")
        with refused(told, "the target cannot be used"):
            worker(address, 1, "other").__enter__()
        server.start()
        wait_applied(sink)
    assert names(server) == [(1, None)]


def test_the_server_stands_still(server: PostgresServer, tmp_path: Path) -> None:
    """It holds its connections and does not answer; later it does what it was told before."""
    told: list[str] = []
    make = people(server, timeout_s=1.0, rehearse=False)
    with hosted(make, tmp_path, told) as address, worker(address, 1) as sink:
        (found,) = do(
            server,
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
            " AND pid <> pg_backend_pid()",
        )
        os.kill(found[0], signal.SIGSTOP)
        try:
            sink.send([person(1)])
            assert sink.vote("t1", 0)
            sink.resolve("t1", True)
            wait_until(
                lambda: any("not available" in line for line in told), 30, "its being noticed"
            )
        finally:
            os.kill(found[0], signal.SIGCONT)
        wait_applied(sink)
        sink.send([person(2)])
        assert sink.vote("t2", sink.committed)
        sink.resolve("t2", True)
        wait_applied(sink)
    assert names(server) == [(1, None), (2, None)]
