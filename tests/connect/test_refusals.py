"""Servers that will never take a connection, and tables that will never take a row: commands end,
and apps say why.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from penstock import CreateStream, Log, declare, outbox
from penstock import open as open_log
from penstock.cli.main import main
from penstock.connect.hosts.spool import read_dead
from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.push.worker import SinkWorker
from penstock.connect.sinks.postgres import PostgresSink
from penstock.connect.sources.postgres import PostgresListenSource
from penstock.connect.sources.redis import RedisStreamSource
from penstock.errors import ConnectorError, OutboxError, SinkGoneError, UsageError
from penstock.testing.processes import wait_until
from penstock.testing.servers import PostgresServer, RedisServer
from tests.connect.hosting import hosted, running, wait_applied

SECRET = "not-this-one"  # noqa: S105  the wrong one


@pytest.fixture(scope="module")
def guarded(postgres: PostgresServer) -> PostgresServer:
    """The user `guarded` needs a password; everybody else is let in as before."""
    rules = postgres.folder / "data" / "pg_hba.conf"
    rules.write_text(f"host all guarded 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS guarded")
        connection.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        connection.execute("SELECT pg_reload_conf()")
    wait_until(lambda: not can_connect(guarded_url(postgres)), 30, "the rule being read")
    return postgres


def guarded_url(server: PostgresServer) -> str:
    return f"postgresql://guarded:{SECRET}@127.0.0.1:{server.port}/postgres"


def can_connect(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def table(postgres: PostgresServer) -> str:
    with psycopg.connect(postgres.url) as connection:
        connection.execute("DROP TABLE IF EXISTS taken, penstock_sink, penstock_sink_pending")
        connection.execute("CREATE TABLE taken (id int PRIMARY KEY, amount int CHECK (amount > 0))")
    return "taken"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("raw", content="bytes"))])
        yield opened


def test_a_wrong_password_of_postgres_ends_the_command(
    guarded: PostgresServer, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = guarded_url(guarded)
    sink = ["postgres-sink", url, "taken", "--key", "id", "--state", str(tmp_path / "s")]
    assert main(["connect", *sink, "--at", "127.0.0.1:0"]) == 2
    said = capsys.readouterr().err
    assert "password authentication failed" in said
    assert SECRET not in said
    with running(log, PostgresListenSource("s", url, "channel")) as connector:
        with pytest.raises(ConnectorError, match="password authentication failed"):
            connector.finish(30)
        connector.failure = None
    assert main(["outbox", "relay", url, "--log", log.url]) == 1
    assert "password authentication failed" in capsys.readouterr().err
    with pytest.raises(OutboxError, match="no password supplied"):
        outbox.Relay(log, lambda: outbox.connect(url.replace(f":{SECRET}", ""))).run(
            threading.Event()
        )


@pytest.mark.parametrize(
    ("name", "key", "why"),
    [
        ("nowhere", "id", 'relation "nowhere" does not exist'),
        ("taken", "nothing", 'column "nothing" of relation "taken" does not exist'),
        ("taken", "amount", "no unique or exclusion constraint"),
    ],
)
def test_a_table_that_cannot_be_used_ends_the_command(
    postgres: PostgresServer, table: str, tmp_path: Path, name: str, key: str, why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sink = ["postgres-sink", postgres.url, name, "--key", key, "--state", str(tmp_path / "s")]
    assert main(["connect", *sink, "--at", "127.0.0.1:0"]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert f"a unique index on {key}" in said


def test_a_table_that_goes_ends_the_command_and_workers_wait(
    postgres: PostgresServer, table: str, tmp_path: Path
) -> None:
    command = ["connect", "postgres-sink", postgres.url, table, "--key", "id", "--state"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *command, str(tmp_path), "--at", "127.0.0.1:0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        port = process.stdout.readline().rpartition(":")[2].strip()
        try:
            with SinkWorker(f"127.0.0.1:{port}", "w", (1,)) as worker:
                with psycopg.connect(postgres.url) as connection:
                    connection.execute("DROP TABLE taken")
                with pytest.raises(SinkGoneError, match='relation "taken" does not exist'):
                    SinkWorker(f"127.0.0.1:{port}", "new", (1,)).__enter__()
                worker.send([(None, 0, b'{"id": 1, "amount": 1}')])
                with contextlib.suppress(SinkGoneError):  # it may be ending already
                    assert worker.vote("t", 0)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 2
    assert 'penstock: PostgreSQL accepts no rows for "taken": relation "taken"' in said


@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b'{"id": 2, "amount": -1}', "Failing row contains (2, -1)"),
        (b'{"id": 2, "amount": "many"}', 'invalid input syntax for type integer: "many"'),
        (b'{"id": 2, "colour": "red"}', 'column "colour" of relation "taken" does not exist'),
        (b'{"amount": 2}', "the message has no value for key column id"),
        (b"[", "the message is not a JSON object"),
    ],
)
def test_a_row_that_the_table_never_takes_is_told_with_the_reason(
    postgres: PostgresServer, table: str, tmp_path: Path, row: bytes, why: str, rehearse: bool
) -> None:
    def make(worker: str) -> PostgresSink:
        return PostgresSink(postgres.url, worker, table, ["id"], rehearse=rehearse)

    with hosted(make, tmp_path) as address:
        with SinkWorker(address, "w", (1,)) as worker:
            worker.send([(None, 0, b'{"id": 1, "amount": 1}'), (None, 0, row)])
            has_voted = worker.vote("t", 0)
            refusal = worker.refusal
            if has_voted:
                worker.resolve("t", True)
                wait_applied(worker)
    assert not (rehearse and has_voted)
    if has_voted:
        (dead,) = read_dead(tmp_path)
        assert why in dead.error
        assert dead.message.data == row
    else:
        assert refusal is not None
        assert not refusal.retriable
        assert why in str(refusal)


def test_a_database_that_is_away_is_no_refusal(
    postgres: PostgresServer, table: str, tmp_path: Path
) -> None:
    def make(worker: str) -> PostgresSink:
        return PostgresSink(postgres.url, worker, table, ["id"])

    with hosted(make, tmp_path) as address, SinkWorker(address, "w", (1,)) as worker:
        worker.send([(None, 0, b'{"id": 1, "amount": 1}')])
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
        assert worker.vote("t", 0)
        worker.resolve("t", True)
        wait_applied(worker)
    assert read_dead(tmp_path) == []


def test_a_database_that_goes_away_before_rows_are_taken_back_is_no_refusal(
    postgres: PostgresServer, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DoomedConnection(psycopg.Connection[tuple[Any, ...]]):
        def execute(self, query: Any, *rest: Any, **named: Any) -> Any:
            answer = super().execute(query, *rest, **named)
            if query == "SET CONSTRAINTS ALL IMMEDIATE":
                with psycopg.connect(postgres.url, autocommit=True) as other:
                    pid = self.info.backend_pid
                    other.execute("SELECT pg_terminate_backend(%s, 30000)", (pid,))
            return answer

    def connect_doomed(url: str, _timeout_s: float) -> DoomedConnection:
        return DoomedConnection.connect(url, autocommit=True)

    monkeypatch.setattr("penstock.connect.sinks.postgres.connect", connect_doomed)
    sink = PostgresSink(postgres.url, "w", table, ["id"])
    try:
        for _ in range(2):  # the second one on a connection of its own
            sink.check([SinkMessage(None, 0, b'{"id": 1, "amount": 1}')])
            with pytest.raises(ConnectorError, match="refuses a row"):
                sink.check([SinkMessage(None, 0, b'{"id": 1, "amount": "x"}')])
    finally:
        sink.close()


def test_a_wrong_password_of_redis_ends_the_command(
    server: RedisServer, client: redis.Redis, log: Log, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    client.config_set("requirepass", "right")
    try:
        for url in (server.url, server.url.replace("127", f":{SECRET}@127")):
            sink = ["redis-sink", url, "--hash", "h", "--state", str(tmp_path / "s")]
            assert main(["connect", *sink, "--at", "127.0.0.1:0"]) == 2
            said = capsys.readouterr().err
            assert "Redis refuses the connection" in said
            assert SECRET not in said
            with running(log, RedisStreamSource("s", url, "x")) as connector:
                with pytest.raises(ConnectorError, match="source s failed"):
                    connector.finish(30)
                connector.failure = None
    finally:
        client.config_set("requirepass", "")


def test_an_address_that_cannot_be_read_is_refused_without_its_secret() -> None:
    for url in (f"postgresql://a:{SECRET}/x@h/d", f"host=x password='{SECRET}"):
        with pytest.raises(UsageError) as raised:
            PostgresSink(url, "w", "t", ["id"]).check_server()
        assert SECRET not in str(raised.value)
