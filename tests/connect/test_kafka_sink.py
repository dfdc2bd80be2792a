"""Kafka as a sink: transactions, tombstones, kills, brokers that go away."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.protocol.marks import Mark
from penstock.connect.push.worker import SinkWorker
from penstock.connect.sinks.kafka import STANDINGS, KafkaSink
from penstock.errors import ConnectorError, UsageError
from penstock.testing.brokers import Brokers
from penstock.testing.processes import wait_until
from tests.connect.hosting import Pusher, SinkProcess, hosted, refused, wait_applied

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

    def values_now(self) -> list[Any]:
        """All that are there now, of partition 0: up to its last stable offset."""
        settings = {"group.id": secrets.token_hex(4), "enable.partition.eof": True}
        consumer = Consumer({"bootstrap.servers": self.servers, **settings})
        consumer.assign([TopicPartition(self.name, 0, 0)])
        found: list[Any] = []

        def is_over() -> bool:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                found.append(message.value())
            return message is not None and message.error() is not None

        try:
            wait_until(is_over, 60, "the end of the topic")
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


def a_sink(topic: Topic, worker: str, **settings: Any) -> KafkaSink:
    return KafkaSink(topic.servers, worker, topic.name, settings=settings)


def test_messages_arrive_with_key_and_time(topic: Topic, worker: str, tmp_path: Path) -> None:
    with hosted(lambda name: a_sink(topic, name), tmp_path) as address:
        with SinkWorker(address, worker, (1,)) as out:
            out.send([(b"a", 5_000_000_000, b"one"), (None, 0, b"two"), (b"a", 0, b"")])
            assert out.vote("t1", 0)
            out.resolve("t1", True)
            out.send([(b"a", 0, b"never")])
            assert out.vote("t2", out.committed)
            out.resolve("t2", False)
            wait_applied(out)
    found = {message.value(): message for message in topic.messages(3)}
    assert set(found) == {b"one", b"two", None}
    assert (found[b"one"].key(), found[b"one"].timestamp()[1]) == (b"a", 5000)
    assert found[b"one"].partition() == found[None].partition()
    assert found[None].key() == b"a", "an empty message is a tombstone"


def test_an_earlier_versions_record_carries_over(topic: Topic, worker: str, tmp_path: Path) -> None:
    """It was written with the name of the last stretch, and without the number of messages."""
    sink = a_sink(topic, worker)
    assert sink.applied() == Mark()
    producer = Producer({"bootstrap.servers": topic.servers})
    key = f"{topic.name}/{worker}".encode()
    producer.produce(STANDINGS, b'{"end":9,"stretch":"0a1b"}', key)
    assert producer.flush(30) == 0
    with hosted(lambda name: a_sink(topic, name), tmp_path) as address:
        with SinkWorker(address, worker, (1,)) as out:
            assert out.committed == 9
            out.send([(None, 0, b"two")])
            assert out.vote("t", 9)
            out.resolve("t", True)
            wait_applied(out)
    assert a_sink(topic, worker).applied() == Mark(12, 1)
    assert topic.values(1) == [b"two"]


@pytest.mark.parametrize("step", ["sink.voted", "sink.apply", "sink.applied"])
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


def test_bad_configuration(topic: Topic, worker: str, tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(UsageError, match="topic missing-topic does not exist"):
        KafkaSink(topic.servers, worker, "missing-topic").applied()
    with hosted(lambda name: a_sink(topic, name), tmp_path, told) as address:
        with SinkWorker(address, worker, (1,)) as out:
            out.send([(None, 0, b"x" * 1_000_000)])
            assert not out.vote("t1", 0)
        assert any("Kafka accepts at most 999,488 (message.max.bytes)" in line for line in told)


def test_a_message_that_kafka_refuses_is_refused_for_good(topic: Topic, worker: str) -> None:
    """It is not tried for ever; the mark stays."""
    sink = a_sink(topic, worker, **{"message.max.bytes": 5000})
    assert sink.applied() == Mark()
    with pytest.raises(ConnectorError, match="Kafka refuses a message") as raised:
        sink.apply([SinkMessage(None, 0, b"x" * 10_000)], Mark(), Mark(10_000, 1))
    assert not raised.value.retriable
    assert sink.applied() == Mark()


def test_the_brokers_are_away(worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.connect.sinks.kafka.TIMEOUT_S", 1.0)
    told: list[str] = []
    make = lambda name: KafkaSink("127.0.0.1:1", name, "t")  # noqa: E731
    with hosted(make, tmp_path, told) as address, refused(told, "Kafka does not answer"):
        with SinkWorker(address, worker, (1,)):
            pass


def test_an_open_transaction_of_another_sink_hides_nothing(
    topic: Topic, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a worker stands is behind it, and is waited for rather than overlooked."""
    sink = a_sink(topic, worker)
    assert sink.applied() == Mark()
    other = Producer({"bootstrap.servers": topic.servers, "transactional.id": secrets.token_hex(4)})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(STANDINGS, b"{}", key=b"another")
    other.flush(30)
    sink.apply([SinkMessage(None, 0, b"one")], Mark(), Mark(3, 1))
    monkeypatch.setattr("penstock.connect.sinks.kafka.TIMEOUT_S", 2.0)
    with pytest.raises(ConnectorError, match="could not be read to its end"):
        sink.applied()
    other.abort_transaction(30)
    monkeypatch.undo()
    assert sink.applied() == Mark(3, 1)
    assert topic.values(1) == [b"one"]
