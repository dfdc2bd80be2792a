"""The log on Kafka, beside confluent-kafka used directly on the same broker."""

from __future__ import annotations

import itertools
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import DataFrame

import penstock
from bench.embedded import ROWS, Order, typed_rows
from bench.result import Result, in_turns, seconds
from bench.spark import agent_latency, query_latency, session
from penstock.app.declaring.plan import plan
from penstock.app.running.positions import AppRun
from penstock.app.running.query import Query, QueryLimits
from penstock.app.running.streams import make_streams
from penstock.log.kafka.messages import Headers, encode
from penstock.log.writing.compose import Composer
from penstock.spark.backend import SparkBackend
from penstock.spark.session import close_session
from penstock.testing.brokers import Brokers, fetch

Message = tuple[bytes | None, bytes | None, Headers]
PARTITIONS = 2
PEER = Path(__file__).with_name("peers") / "spark_kafka"


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
                    # One partition after the other, which fills librdkafka's batches best.
                    _produce(producer, topic, value, key, row * PARTITIONS // ROWS, headers)
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
    count = 20 if quick else 100
    with Brokers(1, folder / "kafka") as brokers:
        with penstock.open(f"{brokers.url}/bench", cache=str(folder)) as log:
            found = {
                "table readable, through an agent": agent_latency(session(), log, count),
            }
        with penstock.open(f"{brokers.url}/copied", cache=str(folder)) as log:
            found["derived event readable"] = _derived_latency(log, count)
    return [
        Result(
            what=f"Kafka: event sent → {what}, median",
            measured=f"{median:.0f} ms (p95 {p95:.0f} ms)",
            beside="400 ms wanted",
            ratio=median / 400,
            at_most=1.0,
        )
        for what, (median, p95) in found.items()
    ]


def _derived_latency(log: penstock.Log, count: int) -> tuple[float, float]:
    """Whoever waits for the derived event reads on from the last one."""
    app = copier()
    make_streams(log, plan(app))
    query = _query(log, app, 1000)
    at = dict.fromkeys(log.offsets("copies"), 0)

    def is_there(key: str) -> bool:
        del key  # one at a time
        log.wait({"copies": at}, 0.05)
        seen = 0
        for partition, start in list(at.items()):
            for batch in log.read("copies", partition, start):
                seen += len(batch)
                at[partition] = batch.next_offset
        return seen > 0

    return query_latency(log, query, count, is_there)


def copying(folder: Path, quick: bool) -> list[Result]:
    """Log → Spark → log through a derived stream, on both engines, beside Spark's own."""
    count, rows = (12, 200_000) if quick else (80, 1_000_000)
    data = [typed_rows(seed=n) for n in range(4)]
    jars = fetch(PEER / "pom.xml", "spark-kafka")
    rates: dict[str, float] = {}
    with Brokers(1, folder / "kafka") as brokers:
        for name, url in (("embedded", str(folder / "log.db")), ("kafka", f"{brokers.url}/bench")):
            with penstock.open(url) as log:
                app = copier()
                make_streams(log, plan(app))
                with penstock.Producer(log) as producer:
                    for batch in itertools.islice(itertools.cycle(data), count):
                        producer.append("orders", batch)
                rates[name] = _steady(_copied(log, app, rows))
        close_session(session())
        command = [
            sys.executable, str(PEER / "copy_topic.py"), str(jars), brokers.addresses[0],
            "bench.default.orders", _topic(brokers.addresses[0]), str(folder / "cp"), str(rows),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1200)
        rates["spark"] = _steady(msgspec.json.decode(done.stdout.splitlines()[-1]))
    beside = f"{rates['spark']:,.0f} events/s: Spark's own Kafka source and sink, at-least-once"
    return [
        Result(
            what=f"{name}: log → Spark → log, {count * ROWS:,} typed events, exactly-once",
            measured=f"{rates[key]:,.0f} events/s",
            beside=beside,
            ratio=rates[key] / rates["spark"],
            at_least=wanted,
        )
        for name, key, wanted in (("Kafka", "kafka", 0.85), ("Embedded", "embedded", 4.0))
    ]


def copier() -> penstock.App:
    app = penstock.App("copier")
    orders = app.stream("orders", Order, key="user", time="at", partitions=PARTITIONS)

    @app.derive(orders, key="user", record=Order)
    def copies(orders: DataFrame) -> DataFrame:
        return orders.where("amount >= 0")

    return app


def _query(log: penstock.Log, app: penstock.App, rows: int) -> Query:
    backend = SparkBackend(session(), Path(), limits=QueryLimits(batch_rows_max=rows, tasks=2))
    query = backend.frames(log, AppRun(app.name, "bench"), plan(app).definitions[0])
    assert isinstance(query, Query)
    return query


def _copied(log: penstock.Log, app: penstock.App, rows: int) -> list[tuple[int, float]]:
    """Rows and seconds of each batch."""
    query = _query(log, app, rows)
    query.start()
    found = []
    while (step := query.step()) is not None:
        found.append((step.rows_in, step.took_s))
    query.close()
    return found


def _steady(steps: Sequence[Sequence[float]]) -> float:
    """Events a second over all batches but the first two, which warm everything up."""
    kept = list(steps[2:] or steps)
    return sum(rows for rows, _ in kept) / sum(took for _, took in kept)


BENCHMARKS: dict[str, Callable[[Path, bool], list[Result]]] = {
    "kafka": on_kafka,
    "kafka-latency": latency_on_kafka,
    "kafka-copy": copying,
}
