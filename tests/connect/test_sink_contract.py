"""Every sink that ships keeps the promises of the contract suite."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from penstock.connect.clients.reader import SinkClient
from penstock.connect.hosts.targets import SinkMessage, TargetMaker
from penstock.connect.sinks.file import FileSink
from penstock.connect.sinks.kafka import KafkaSink
from penstock.connect.sinks.postgres import PostgresSink
from penstock.connect.sinks.redis import RedisHashSink, RedisPublishSink
from penstock.errors import ConnectorTimeoutError
from penstock.testing.brokers import Brokers
from penstock.testing.servers import PostgresServer, RedisServer
from penstock.testing.sink_contract import OpenSink, SinkContract, SinkTargetContract, Visible
from tests.connect.test_kafka_sink import Topic

pytestmark = [pytest.mark.row("W12", engine="any"), pytest.mark.row("X10", engine="any")]


class TestFiles(SinkTargetContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> TargetMaker:
        return lambda worker: FileSink(tmp_path / "files", worker)

    @pytest.fixture
    def visible(self, tmp_path: Path, worker: str) -> Visible:
        path = FileSink(tmp_path / "files", worker).path
        return lambda: path.read_bytes().splitlines() if path.exists() else []

    def message(self, number: int) -> SinkMessage:
        return SinkMessage(None, 0, b"" if number % 5 == 4 else b"%d" % number)


class TestRedisStreams(SinkTargetContract):
    @pytest.fixture
    def make(self, server: RedisServer) -> TargetMaker:
        return lambda worker: RedisPublishSink(server.url, worker, stream="out")

    @pytest.fixture
    def visible(self, client: redis.Redis) -> Visible:
        def look() -> list[bytes]:
            entries: Any = client.xrange("out")
            return [fields[b"data"] for _, fields in entries]

        return look


class TestRedisChannels(SinkTargetContract):
    """What a subscriber hears."""

    @pytest.fixture
    def make(self, server: RedisServer) -> TargetMaker:
        return lambda worker: RedisPublishSink(server.url, worker, channel="c")

    @pytest.fixture
    def visible(self, client: redis.Redis) -> Iterator[Visible]:
        heard: list[bytes] = []
        listening: Any = client
        with listening.pubsub(ignore_subscribe_messages=True) as there:
            there.subscribe("c")
            there.get_message(timeout=5)

            def look() -> list[bytes]:
                while found := there.get_message(timeout=0.3):
                    heard.append(found["data"])
                return list(heard)

            yield look


class TestRedisHashes(SinkTargetContract):
    """A key for each message, and the fields are its number."""

    @pytest.fixture
    def make(self, server: RedisServer) -> TargetMaker:
        return lambda worker: RedisHashSink(server.url, worker, "h")

    @pytest.fixture
    def visible(self, client: redis.Redis) -> Visible:
        def look() -> list[bytes]:
            names: Any = client.keys("h:*")
            numbers = sorted(int(name.rpartition(b":")[2]) for name in names)
            return [self.message(number).data for number in numbers]

        return look

    def message(self, number: int) -> SinkMessage:
        return SinkMessage(b"%d" % number, 0, b'{"n": %d}' % number)


class TestPostgres(SinkTargetContract):
    """Rows that are inserted, and a trigger that notes each that is, or is again."""

    @pytest.fixture
    def make(self, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> TargetMaker:
        monkeypatch.setattr("penstock.connect.sinks.postgres.PAGE_ROWS", 3)
        with psycopg.connect(postgres.url) as connection:
            connection.execute(
                """
                DROP TABLE IF EXISTS walked, noted;
                CREATE TABLE walked (id int PRIMARY KEY, x int);
                CREATE TABLE noted (number serial, id int);
                CREATE OR REPLACE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
                    'BEGIN INSERT INTO noted (id) VALUES (NEW.id); RETURN NEW; END';
                CREATE TRIGGER notes AFTER INSERT OR UPDATE ON walked
                    FOR EACH ROW EXECUTE FUNCTION note();
                """
            )
        return lambda worker: PostgresSink(postgres.url, worker, "walked", ["id"])

    @pytest.fixture
    def worker(self) -> str:
        return secrets.token_hex(4)

    @pytest.fixture
    def visible(self, postgres: PostgresServer) -> Visible:
        def look() -> list[bytes]:
            with psycopg.connect(postgres.url) as connection:
                rows = connection.execute("SELECT id FROM noted ORDER BY number").fetchall()
            return [self.message(number).data for (number,) in rows]

        return look

    def message(self, number: int) -> SinkMessage:
        return SinkMessage(None, 0, b'{"id": %d, "x": 0}' % number)


class TestKafka(SinkTargetContract):
    steps = 12
    looks = False

    @pytest.fixture
    def topic(self, broker: Brokers) -> Topic:
        return Topic(broker.addresses[0], partitions=1)

    @pytest.fixture
    def worker(self) -> str:
        return secrets.token_hex(4)

    @pytest.fixture
    def make(self, topic: Topic) -> TargetMaker:
        return lambda worker: KafkaSink(topic.servers, worker, topic.name)

    @pytest.fixture
    def visible(self, topic: Topic) -> Visible:
        return topic.values_now


class TestReading(SinkContract):
    """A program that reads what it is sent."""

    survives_loss = False

    @pytest.fixture
    def reading(self) -> list[SinkClient[bytes]]:
        return []

    @pytest.fixture
    def open_sink(self, reading: list[SinkClient[bytes]], heard: list[bytes]) -> OpenSink:
        @contextlib.contextmanager
        def open_(folder: Path) -> Iterator[str]:
            with SinkClient[bytes]("127.0.0.1:0", folder) as sink:
                reading[:] = [sink]
                try:
                    yield "{}:{}".format(*sink.address)
                finally:
                    read_all(sink, heard)
                    reading.clear()

        return open_

    @pytest.fixture
    def heard(self) -> list[bytes]:
        return []

    @pytest.fixture
    def visible(self, reading: list[SinkClient[bytes]], heard: list[bytes]) -> Visible:
        def look() -> list[bytes]:
            for sink in reading:
                read_all(sink, heard)
            return list(heard)

        return look


def read_all(sink: SinkClient[bytes], heard: list[bytes]) -> None:
    with contextlib.suppress(ConnectorTimeoutError):
        while True:
            heard.append(sink.read(timeout=0))
