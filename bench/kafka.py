"""The log on Kafka, beside confluent-kafka used directly on the same broker."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import penstock
from bench.embedded import ROWS, Order, typed_rows
from bench.result import Result, in_turns, seconds
from bench.spark import agent_latency, session
from penstock.log.compose import Composer
from penstock.log.kafka.messages import Headers, encode
from penstock.testing.brokers import Brokers

Message = tuple[bytes | None, bytes | None, Headers]
PARTITIONS = 2


def rate(rows: int, took_s: float) -> str:
    return f"{rows / took_s:,.0f} events/s"


def on_kafka(folder: Path, quick: bool) -> list[Result]:
    """Appending and reading typed events; each append is a transaction of 65,536."""
    count = 6 if quick else 80
    rounds = 1 if quick else 3
    with Brokers(1, folder / "kafka") as brokers:
        url = f"{brokers.url}/bench"
        with penstock.open(url, cache=str(folder), upkeep_interval_ms=0) as log:
            return [
                *_append(log, brokers.addresses[0], count, rounds),
                *_read(log, brokers.addresses[0], count, rounds),
            ]


def _stream(log: penstock.Log) -> str:
    name = f"orders-{secrets.token_hex(4)}"
    spec = penstock.declare(name, Order, key="user", time="at", partitions=PARTITIONS)
    log.apply([penstock.CreateStream(spec)])
    return name


def _topic(server: str) -> str:
    name = f"raw-{secrets.token_hex(4)}"
    admin = AdminClient({"bootstrap.servers": server})
    admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(30)
    return name


def _append(log: penstock.Log, server: str, count: int, rounds: int) -> list[Result]:
    data = [typed_rows(seed=n) for n in range(4)]
    ready = [_messages(log, batch) for batch in data]

    def ours() -> float:
        name = _stream(log)
        options = penstock.ProducerOptions(batch_rows_max=1)
        with penstock.Producer(log, options) as producer:

            def send() -> None:
                for batch in itertools.islice(itertools.cycle(data), count):
                    producer.append(name, batch)
                producer.flush()

            return seconds(send)

    def theirs() -> float:
        topic = _topic(server)
        producer = Producer({
            "bootstrap.servers": server, "transactional.id": topic, "compression.type": "lz4",
            "linger.ms": 1, "queue.buffering.max.messages": 500_000,
            "queue.buffering.max.kbytes": 128 << 10,
        })  # fmt: skip
        producer.list_topics(timeout=30)
        producer.init_transactions(30)

        def send() -> None:
            for messages in itertools.islice(itertools.cycle(ready), count):
                producer.begin_transaction()
                for row, (key, value, headers) in enumerate(messages):
                    _produce(producer, topic, value, key, row % PARTITIONS, headers)
                producer.flush(60)
                producer.commit_transaction(60)

        return seconds(send)

    mine, limit = in_turns(ours, theirs, rounds)
    rows = count * ROWS
    return [
        Result(
            what=f"Kafka: append of {rows:,} typed events, 65,536 to a commit",
            measured=rate(rows, mine),
            beside=f"{rate(rows, limit)}: confluent-kafka, the same messages ready-made",
            ratio=limit / mine,
            at_least=0.7,
        )
    ]


def _produce(
    producer: Producer, topic: str, value: bytes | None, key: bytes | None, partition: int,
    headers: Headers,
) -> None:  # fmt: skip
    while True:
        try:
            producer.produce(topic, value, key, partition, headers=headers)
            return
        except BufferError:
            producer.poll(0.05)


def _messages(log: penstock.Log, batch: object) -> list[Message]:
    stream = log.stream(_stream(log))
    part = Composer("bench", log.limits).arrow_part(stream, batch)
    encoded = encode(stream, part.batch)
    return list(zip(encoded.keys, encoded.values, encoded.headers(), strict=True))


def _read(log: penstock.Log, server: str, count: int, rounds: int) -> list[Result]:
    name = _stream(log)
    data = [typed_rows(seed=n) for n in range(4)]
    with penstock.Producer(log) as producer:
        for batch in itertools.islice(itertools.cycle(data), count):
            producer.append(name, batch)
    topic = f"bench.default.{name}"

    def ours() -> float:
        def read() -> None:
            rows = sum(batch.data().num_rows for batch in penstock.read_batches(log, name))
            assert rows == count * ROWS

        return seconds(read)

    decoder = msgspec.json.Decoder(list[Order])

    def theirs() -> float:
        def read() -> None:
            rows = 0
            for values in _consumed(server, topic):
                rows += len(decoder.decode(b"[" + b",".join(values) + b"]"))
            assert rows == count * ROWS

        return seconds(read)

    mine, limit = in_turns(ours, theirs, rounds)
    rows = count * ROWS
    return [
        Result(
            what=f"Kafka: reading {rows:,} typed events as Arrow",
            measured=rate(rows, mine),
            beside=f"{rate(rows, limit)}: confluent-kafka, decoded to records by msgspec",
            ratio=limit / mine,
            at_least=0.7,
        )
    ]


def _consumed(server: str, topic: str) -> Iterator[list[bytes]]:
    consumer = Consumer({
        "bootstrap.servers": server, "group.id": "bench", "isolation.level": "read_committed",
        "enable.auto.commit": False, "enable.partition.eof": True,
        "queued.min.messages": 100_000, "fetch.message.max.bytes": 4 << 20,
        "fetch.wait.max.ms": 5,
    })  # fmt: skip
    consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
    ended = 0
    while ended < PARTITIONS:
        first = consumer.poll(1.0)
        found = [] if first is None else [first, *consumer.consume(20_000, 0)]
        good = [m.value() for m in found if m.error() is None]
        ended += sum(
            1 for m in found
            if (error := m.error()) is not None and error.code() == KafkaError._PARTITION_EOF
        )  # fmt: skip
        if good:
            yield [value for value in good if isinstance(value, bytes)]
    consumer.close()


def latency_on_kafka(folder: Path, quick: bool) -> list[Result]:
    """As on the embedded log; whoever asks for an entry materialises the table first."""
    with Brokers(1, folder / "kafka") as brokers:
        with penstock.open(f"{brokers.url}/bench", cache=str(folder)) as log:
            found = agent_latency(session(), log, 20 if quick else 100)
    return [
        Result(
            what="Kafka: event sent → table readable, through an agent, median",
            measured=f"{found[0]:.0f} ms (p95 {found[1]:.0f} ms)",
            beside="400 ms wanted",
            ratio=found[0] / 400,
            at_most=1.0,
        )
    ]


BENCHMARKS: dict[str, Callable[[Path, bool], list[Result]]] = {
    "kafka": on_kafka,
    "kafka-latency": latency_on_kafka,
}
