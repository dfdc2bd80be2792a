"""Kafka as a sink: transactions, tombstones, kills, brokers that go away."""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.connect.dial import SinkWorker
from penstock.connect.sinks.kafka import STANDINGS, KafkaSink
from penstock.connect.wire import Message
from penstock.errors import ConnectorError, UsageError
from penstock.testing.brokers import Brokers
from penstock.testing.processes import wait_until
from tests.connect.hosting import Pusher, SinkProcess, hosted, refused

pytestmark = pytest.mark.row("W9", engine="any")


class Topic:
    """A topic, and what readers of committed messages see in it."""

    def __init__(self, servers: str, partitions: int = 2) -> None:
        self.servers = servers
        self.name = f"out-{secrets.token_hex(4)}"
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([NewTopic(self.name, partitions, 1)])[self.name].result(30)

    def messages(self, count: int) -> list[Any]:
        """All that are there, when there are so many; and no more after a while."""
        settings = {"group.id": secrets.token_hex(4), "auto.offset.reset": "earliest"}
        consumer = Consumer({"bootstrap.servers": self.servers, **settings})
        consumer.subscribe([self.name])
        found: list[Any] = []

        def are_there() -> bool:
            found.extend(m for m in consumer.consume(1000, 0.2) if m.error() is None)
            return len(found) >= count

        try:
            wait_until(are_there, 60, f"{count} messages")
            found.extend(m for m in consumer.consume(1000, 1.0) if m.error() is None)
        finally:
            consumer.close()
        return found

    def values(self, count: int) -> list[Any]:
        return [message.value() for message in self.messages(count)]


@pytest.fixture
def topic(broker: Brokers) -> Topic:
    return Topic(broker.addresses[0])


@pytest.fixture
def worker() -> str:
    return f"w-{secrets.token_hex(4)}"


def a_sink(topic: Topic, worker: str, folder: Path, **settings: Any) -> KafkaSink:
    return KafkaSink(topic.servers, worker, topic.name, folder, settings=settings)


def test_messages_arrive_with_key_and_time(topic: Topic, worker: str, tmp_path: Path) -> None:
    with hosted(lambda name: a_sink(topic, name, tmp_path), tmp_path) as address:
        with SinkWorker(address, worker, (1,)) as out:
            out.send([(b"a", 5_000_000_000, b"one"), (None, 0, b"two"), (b"a", 0, b"")])
            assert out.vote("t1", 0)
            out.resolve("t1", True)
            out.send([(b"a", 0, b"never")])
            assert out.vote("t2", out.committed)
            out.resolve("t2", False)
    found = {message.value(): message for message in topic.messages(3)}
    assert set(found) == {b"one", b"two", None}
    assert (found[b"one"].key(), found[b"one"].timestamp()[1]) == (b"a", 5000)
    assert found[b"one"].partition() == found[None].partition()
    assert found[None].key() == b"a", "an empty message is a tombstone"


def test_a_repeated_commit_changes_nothing(topic: Topic, worker: str, tmp_path: Path) -> None:
    """Also of a stretch that has no bytes, and after a restart at every point."""
    sink = a_sink(topic, worker, tmp_path)
    sink.open(0, None)
    done = 0
    for data in (b"", b"", b"x", b""):
        sink.append([Message(1, done, 0, b"k", data)])
        sink.flush()
        end = done + len(data)
        sink.open(done, end)
        sink.commit(done, end)
        sink.commit(done, end)
        sink.open(done, end)
        sink.commit(done, end)
        done = end
    sink.close()
    assert Counter(topic.values(4)) == Counter([None, None, b"x", None])


@pytest.mark.parametrize("step", ["sink.resolve", "sink.resolved", "sink.voted"])
def test_the_sink_is_killed(topic: Topic, worker: str, tmp_path: Path, step: str) -> None:
    """Around its second commit; it is started again, and told what it has not heard."""
    sink = SinkProcess(tmp_path, "kafka-sink", topic.servers, topic.name, "--state", str(tmp_path))
    try:
        sink.start(f"{step}=kill@2")
        pusher = Pusher(sink.address, worker)
        for text in ("one", "two", "three"):
            pusher.push_surely(text, ensure=sink.ensure)
    finally:
        sink.stop()
    assert topic.values(3) == [b"one", b"two", b"three"]


def test_a_zombie_cannot_commit(topic: Topic, worker: str, tmp_path: Path) -> None:
    zombie, sink = a_sink(topic, worker, tmp_path / "a"), a_sink(topic, worker, tmp_path / "b")
    zombie.open(0, None)
    zombie.append([Message(1, 0, 0, None, b"old")])
    zombie.flush()
    sink.open(0, None)
    sink.append([Message(1, 0, 0, None, b"new")])
    sink.flush()
    with pytest.raises(ConnectorError, match="was opened again by somebody else"):
        zombie.commit(0, 3)
    sink.commit(0, 3)
    zombie.close()
    sink.close()
    assert topic.values(1) == [b"new"]


def test_bad_configuration(topic: Topic, worker: str, tmp_path: Path) -> None:
    told: list[str] = []
    sink = KafkaSink(topic.servers, worker, "missing-topic", tmp_path)
    with pytest.raises(UsageError, match="there is no topic missing-topic"):
        sink.open(0, None)
    with hosted(lambda name: a_sink(topic, name, tmp_path), tmp_path, told) as address:
        with SinkWorker(address, worker, (1,)) as out:
            out.send([(None, 0, b"x" * 1_000_000)])
            assert not out.vote("t1", 0)
        assert any("Kafka takes 999,488 (message.max.bytes)" in line for line in told)
    other = KafkaSink(topic.servers, worker, topic.name, tmp_path)
    with pytest.raises(ConnectorError, match="it is another Kafka, or it has lost some"):
        other.open(500, None)


def test_the_brokers_are_away(worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.connect.sinks.kafka.TIMEOUT_S", 1.0)
    told: list[str] = []
    make = lambda name: KafkaSink("127.0.0.1:1", name, "t", tmp_path)  # noqa: E731
    with hosted(make, tmp_path, told) as address, refused(told, "Kafka does not answer"):
        with SinkWorker(address, worker, (1,)):
            pass


def test_an_open_transaction_of_another_sink_hides_nothing(
    topic: Topic, worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a worker stands is behind it, and is waited for rather than overlooked."""
    sink = a_sink(topic, worker, tmp_path)
    sink.open(0, None)
    other = Producer({"bootstrap.servers": topic.servers, "transactional.id": secrets.token_hex(4)})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(STANDINGS, b"{}", key=b"another")
    other.flush(30)
    sink.append([Message(1, 0, 0, None, b"one")])
    sink.flush()
    sink.commit(0, 3)
    monkeypatch.setattr("penstock.connect.sinks.kafka.TIMEOUT_S", 2.0)
    with pytest.raises(ConnectorError, match="could not be read to its end"):
        sink.open(0, 3)
    other.abort_transaction(30)
    monkeypatch.undo()
    sink.open(0, 3)
    sink.commit(0, 3)
    sink.close()
    assert topic.values(1) == [b"one"]
