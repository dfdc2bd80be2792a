"""Kafka's topics as sources: several topics, rebalances, offsets that are gone."""

from __future__ import annotations

import contextlib
import secrets
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.connect.clients.source import Item
from penstock.connect.hosts.listener import Listener
from penstock.connect.hosts.registry import records
from penstock.connect.protocol import wire
from penstock.connect.sources.kafka import Held, KafkaTopics, PartitionSource
from penstock.errors import ConnectorError
from penstock.testing.brokers import Brokers
from penstock.testing.processes import wait_until
from tests.connect.test_sources import RAW, address_of


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("raw", content="bytes", partitions=2))])
        yield opened


@pytest.fixture
def address(log: Log) -> Iterator[str]:
    with Listener(log, RAW) as listener:
        yield address_of(listener)


class Topic:
    """A topic of somebody else."""

    def __init__(self, broker: Brokers, partitions: int) -> None:
        self.server = broker.addresses[0]
        self.name = f"foreign-{secrets.token_hex(4)}"
        self.partitions = partitions
        self.admin = AdminClient({"bootstrap.servers": self.server})
        self.admin.create_topics([NewTopic(self.name, partitions, 1)])[self.name].result(30)
        self._producer = Producer({"bootstrap.servers": self.server})
        self.sent: Counter[str] = Counter()

    def send(self, numbers: range) -> None:
        for n in numbers:
            text = f"{self.name}:{n}"
            self._producer.produce(self.name, text, key=f"k{n}", partition=n % self.partitions)
            self.sent[text] += 1
        assert self._producer.flush(30) == 0

    def send_large(self, numbers: range, size: int) -> None:
        for n in numbers:
            text = f"{n}".rjust(size)
            self._producer.produce(self.name, text, partition=n % self.partitions)
        assert self._producer.flush(30) == 0

    def cut(self, partition: int, before: int) -> None:
        place = TopicPartition(self.name, partition, before)
        self.admin.delete_records([place])[place].result(30)


def found(log: Log) -> Counter[str]:
    return Counter(event.data.decode() for event in read_events(log, "raw"))  # type: ignore[attr-defined]


@pytest.mark.row("W9", engine="any")
@pytest.mark.row("W10", engine="any")
def test_several_topics_and_going_on(log: Log, address: str, broker: Brokers) -> None:
    one, two = Topic(broker, 3), Topic(broker, 2)
    names = [one.name, two.name]
    for start in (0, 500):
        for topic in (one, two):
            topic.send(range(start, start + 500))
        with KafkaTopics(address, one.server, names, "g") as topics:
            wait_until(lambda: found(log) == one.sent + two.sent, 60, "everything")
            topics.check()
    assert len({record.name for record in records(log)}) == 5
    keys = {event.key for event in read_events(log, "raw")}
    assert b"k7" in keys


@pytest.mark.row("W4", engine="any")
@pytest.mark.row("W10", engine="any")
@pytest.mark.timeout(180)
def test_members_of_a_group_hand_partitions_over(log: Log, address: str, broker: Brokers) -> None:
    topic = Topic(broker, 6)
    group = secrets.token_hex(4)
    topic.send(range(2000))
    with KafkaTopics(address, topic.server, [topic.name], group) as first:
        wait_until(lambda: found(log).total() > 500, 60, "the first member reading")
        with KafkaTopics(address, topic.server, [topic.name], group) as second:
            wait_until(lambda: second._sources, 60, "the second member having partitions")
            topic.send(range(2000, 4000))
            wait_until(lambda: found(log).total() == 4000, 60, "both members reading")
            first.check()
            second.check()
        topic.send(range(4000, 5000))
        wait_until(lambda: found(log).total() == 5000, 90, "the first one having them again")
    assert found(log) == topic.sent


@pytest.mark.row("W10", engine="any")
@pytest.mark.parametrize("on_gone", ["fail", "earliest", "latest"])
def test_an_offset_that_is_gone(log: Log, address: str, broker: Brokers, on_gone: str) -> None:
    topic = Topic(broker, 1)
    topic.send(range(10))
    with KafkaTopics(address, topic.server, [topic.name], "g"):
        wait_until(lambda: found(log).total() == 10, 60, "the first ones")
    topic.send(range(10, 30))
    topic.cut(0, 20)
    with KafkaTopics(address, topic.server, [topic.name], "g", on_gone=on_gone) as topics:  # type: ignore[arg-type]
        if on_gone == "fail":
            wait_until(lambda: topics.failure, 60, "it noticing")
            with pytest.raises(ConnectorError, match="offset 10 does not exist, the first is 20"):
                topics.check()
            return
        wanted = 20 if on_gone == "earliest" else 10
        if on_gone == "latest":
            wait_until(
                lambda: any(not s.is_paused for s in topics._sources.values()), 60, "it going on"
            )
            topic.send(range(30, 31))
            wanted += 1
        wait_until(lambda: found(log).total() == wanted, 60, "what is left")


def test_nobody_there_is_no_hang(address: str) -> None:
    with KafkaTopics(address, "127.0.0.1:9", ["x"], "g", settings={"log_level": 0}) as topics:
        topics.check()
    with KafkaTopics(address, "127.0.0.1:9", ["x"], "g", settings={"no.such": "x"}) as topics:
        wait_until(lambda: topics.failure, 10, "the setting being refused")


def test_a_topic_that_is_not_there_and_what_was_meant(address: str, broker: Brokers) -> None:
    topic = Topic(broker, 1)
    wrong = topic.name.upper()
    with KafkaTopics(address, topic.server, [wrong], "g", settings={"log_level": 0}) as topics:
        wait_until(lambda: topics.failure, 30, "the topic being missed")
        # Others may be meant too: topics of other tests have names like it.
        said = f"topic {wrong} does not exist in this Kafka: did you mean {topic.name}"
        assert str(topics.failure).startswith(said)


class Stingy(socketserver.StreamRequestHandler):
    """A listener that gives every stream, and no credits for messages; then it sends away."""

    elsewhere = ""

    def handle(self) -> None:
        parser = wire.Parser()
        self.request.settimeout(0.1)
        while not self.elsewhere:
            with contextlib.suppress(TimeoutError):
                for frame in parser.feed(self.request.recv(1 << 16)):
                    if isinstance(frame, wire.Hello):
                        self.request.sendall(wire.encode(wire.Ok(8)))
                    elif isinstance(frame, wire.Notify):
                        answer = wire.NotifyAck(True, frame.stream_id, wire.NEVER)
                        self.request.sendall(wire.encode(answer))
        self.request.sendall(wire.encode(wire.Restart(self.elsewhere)))


@pytest.mark.row("W10", engine="any")
def test_what_waits_of_all_partitions_has_a_limit(
    log: Log, address: str, broker: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing can be sent; and when it can, everything comes."""
    topic = Topic(broker, 8)
    topic.send_large(range(4000), 2000)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Stingy) as stingy:
        serving = threading.Thread(target=stingy.serve_forever)
        serving.start()
        stingy_at = f"127.0.0.1:{stingy.server_address[1]}"
        with KafkaTopics(
            stingy_at, topic.server, [topic.name], secrets.token_hex(4), held_bytes_max=1 << 20
        ) as topics:
            wait_until(
                lambda: len(topics._sources) == 8
                and all(s.has_begun and s.is_paused for s in topics._sources.values()),
                60, "all of them being paused",
            )  # fmt: skip
            assert 1 << 20 <= topics.held_bytes < 4 << 20
            monkeypatch.setattr(Stingy, "elsewhere", address)
            wait_until(lambda: found(log).total() == 4000, 60, "everything")
            topics.check()
            wait_until(lambda: topics.held_bytes == 0, 10, "nothing being left")
        stingy.shutdown()
        serving.join(10)


def test_large_messages_fill_a_partition_too() -> None:
    source = PartitionSource("cluster", ("topic", 0), Held(1 << 30))
    source.handle_reset(None)
    source.begin()
    data = b"x" * (1 << 20)
    full = [source.put(Item(data, number)) for number in range(40)]
    assert full.index(True) < 33
    assert not source.has_room()
    while source.handle_next() is not None:
        pass
    assert source.has_room()
