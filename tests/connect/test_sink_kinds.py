"""Every sink keeps the promises of `Sink`: random steps and restarts against a model."""

from __future__ import annotations

import random
import secrets
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from penstock.connect.reading import SPOOL_BYTES_MAX
from penstock.connect.sink import Sink
from penstock.connect.sinks.file import FileSink
from penstock.connect.sinks.kafka import KafkaSink
from penstock.connect.sinks.postgres import PostgresSink
from penstock.connect.sinks.redis import RedisPublishSink
from penstock.connect.spool import Spool, SpoolSink
from penstock.connect.wire import Message
from penstock.testing.brokers import Brokers
from penstock.testing.servers import PostgresServer, RedisServer
from tests.connect.test_kafka_sink import Topic

Texts = list[bytes]


class Kind:
    """A kind of sink, and how to see what it has made visible."""

    looks = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def texts(self, number: int) -> Texts:
        """What a message may be."""
        return [b"", b"%d" % number]

    def make(self) -> Sink:
        raise NotImplementedError

    def restart(self) -> Sink:
        """As after a kill: what was in memory is gone."""
        return self.make()

    def visible(self, committed: int) -> Texts:
        """What readers see; a sink that cannot hide anything shows it up to `committed`."""
        raise NotImplementedError


class Files(Kind):
    def make(self) -> Sink:
        return FileSink(self.folder, "w")

    def visible(self, committed: int) -> Texts:
        texts, at = [], 0
        for line in FileSink(self.folder, "w").path.read_bytes().splitlines():
            at += len(line)
            texts.append(line)
        assert at == committed
        return texts


class Spools(Kind):
    spool: Spool | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._read: Texts = []

    def make(self) -> Sink:
        self.spool = Spool(self.folder, SPOOL_BYTES_MAX)
        return SpoolSink(self.spool, "w")

    def restart(self) -> Sink:
        assert self.spool is not None
        self.spool.close()
        return self.make()

    def visible(self, committed: int) -> Texts:
        assert self.spool is not None
        while (found := self.spool.take()) is not None:
            self._read.append(found.data)
        return self._read


class RedisStreams(Kind):
    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder)
        self._url = url
        self._name = f"out-{secrets.token_hex(4)}"

    def make(self) -> Sink:
        return RedisPublishSink(self._url, self._name, stream=self._name)

    def visible(self, committed: int) -> Texts:
        with redis.Redis.from_url(self._url) as client:
            entries: Any = client.xrange(self._name)
        return [fields[b"data"] for _, fields in entries]


class KafkaTopics(Kind):
    def __init__(self, folder: Path, servers: str) -> None:
        super().__init__(folder)
        self._topic = Topic(servers, partitions=1)

    def make(self) -> Sink:
        return KafkaSink(self._topic.servers, self._topic.name, self._topic.name, self.folder)

    def visible(self, committed: int) -> Texts:
        return self._topic.values(0)


class PostgresTables(Kind):
    """Rows that are inserted, and a trigger that notes each that is, or is again."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder)
        self._url = url
        self._worker = secrets.token_hex(4)
        with psycopg.connect(url) as connection:
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

    def texts(self, number: int) -> Texts:
        return [b'{"id": %d, "x": 0}' % number]

    def make(self) -> Sink:
        return PostgresSink(self._url, self._worker, "walked", ["id"])

    def visible(self, committed: int) -> Texts:
        with psycopg.connect(self._url) as connection:
            rows = connection.execute("SELECT id FROM noted ORDER BY number").fetchall()
        return [text for (number,) in rows for text in self.texts(number)]


def walked(kind: Kind, steps: int, chance: random.Random) -> Walk:
    walk = Walk(kind, chance)
    walk.go(steps)
    return walk


@pytest.mark.row("W12", engine="any")
def test_files(tmp_path: Path, chance: random.Random) -> None:
    walked(Files(tmp_path), 300, chance)


@pytest.mark.row("W12", engine="any")
def test_spools(tmp_path: Path, chance: random.Random) -> None:
    walked(Spools(tmp_path), 300, chance)


@pytest.mark.row("W12", engine="any")
def test_redis(tmp_path: Path, redis_server: RedisServer, chance: random.Random) -> None:
    walked(RedisStreams(tmp_path, redis_server.url), 300, chance)


@pytest.mark.row("W12", engine="any")
@pytest.mark.parametrize("held_bytes", [150, 1 << 20])
def test_postgres(
    tmp_path: Path, postgres: PostgresServer, chance: random.Random, held_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Kept here until the vote, or put into the database row by row and read in small pages."""
    monkeypatch.setattr("penstock.connect.sinks.postgres.HELD_BYTES_MAX", held_bytes)
    monkeypatch.setattr("penstock.connect.sinks.postgres.PAGE_ROWS", 3)
    monkeypatch.setattr("penstock.connect.sinks.postgres.PAGE_BYTES", 20)
    walked(PostgresTables(tmp_path, postgres.url), 150, chance)


@pytest.mark.row("W12", engine="any")
def test_kafka(tmp_path: Path, broker: Brokers, chance: random.Random) -> None:
    kind = KafkaTopics(tmp_path, broker.addresses[0])
    kind.looks = False  # reading a topic takes seconds: once, at the end
    walk = walked(kind, 40, chance)
    assert kind._topic.values(len(walk.done)) == walk.done


class Walk:
    """A worker that sends, asks for votes, tells outcomes, and is interrupted anywhere."""

    def __init__(self, kind: Kind, chance: random.Random) -> None:
        self.kind = kind
        self.chance = chance
        self.sink = kind.make()
        self.done: Texts = []
        """What was committed."""
        self.sent: Texts = []
        self.pending: Texts | None = None
        self.count = 0
        self.sink.open(0, None)

    @property
    def committed(self) -> int:
        return sum(map(len, self.done))

    def go(self, count: int) -> None:
        for _ in range(count):
            steps = [self.append, self.append, self.vote, self.tell, self.reopened]
            step = self.chance.choice(steps)
            step()
            if self.kind.looks and self.pending is None and not self.sent:
                assert self.kind.visible(self.committed) == self.done
        self.sink.close()

    def append(self) -> None:
        """What comes while a vote waits for its outcome belongs to the next."""
        texts = []
        for _ in range(self.chance.randrange(1, 4)):
            self.count += 1
            texts.append(self.chance.choice(self.kind.texts(self.count)))
        at = self.committed + sum(map(len, [*(self.pending or ()), *self.sent]))
        messages = []
        for text in texts:
            messages.append(Message(1, at, 0, None, text))
            at += len(text)
        self.sink.append(messages)
        self.sent += texts

    def vote(self) -> None:
        if self.pending is None:
            self.sink.flush()
            if self.chance.random() < 0.2:  # killed before the vote was saved
                self.reopened()
            else:
                self.pending, self.sent = self.sent, []

    def tell(self) -> None:
        if self.pending is None:
            return
        start = self.committed
        is_yes = self.chance.random() < 0.6
        again = 1 + (self.chance.random() < 0.3)
        for left in reversed(range(again)):
            if is_yes:
                self.sink.commit(start, start + sum(map(len, self.pending)))
            else:
                self.sink.abort(start)
            if left:  # killed before the outcome was saved
                self.reopened()
        if is_yes:
            self.done += self.pending
        else:
            self.sent = []
        self.pending = None

    def reopened(self) -> None:
        self.sink.close()
        self.sink = self.kind.restart()
        kept = None if self.pending is None else self.committed + sum(map(len, self.pending))
        self.sink.open(self.committed, kept)
        self.sent = []
