"""Reading a stream with asyncio, by the asyncio client of librdkafka's binding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence

from confluent_kafka import KafkaError, Message, TopicPartition
from confluent_kafka.aio import AIOConsumer

from penstock.errors import DamagedError, OffsetGoneError
from penstock.log.batch import Batch
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.messages import decode, offset_of
from penstock.log.objects import Stream
from penstock.log.read import ReadOptions

POLL_S = 0.1
MESSAGES = 1000
WORKERS = 2


async def follow(
    cluster: Cluster, stream: Stream, starts: dict[int, int], ends: dict[int, int],
    options: ReadOptions,
) -> AsyncGenerator[Batch, None]:  # fmt: skip
    """Batches of the partitions from `starts`: up to `ends`, or with `follow` on and on."""
    topic = cluster.address.topic(stream.name)
    left = {p for p, start in starts.items() if options.follow or start < ends[p]}
    if not left:
        return
    consumer = AIOConsumer(cluster.consumer_settings(**{"fetch.wait.max.ms": 20}), WORKERS)
    try:
        await consumer.assign([TopicPartition(topic, p, starts[p]) for p in sorted(left)])
        while left and not (options.stop is not None and options.stop.is_set()):
            for messages in _by_partition(await consumer.consume(MESSAGES, POLL_S)):
                partition = int(messages[0].partition() or 0)
                good, is_over = _before(messages, None if options.follow else ends[partition])
                for found in decode(stream, good) if good else ():
                    if not isinstance(found, DamagedError):
                        yield found
                    elif options.on_damage is None:
                        raise found
                    else:
                        options.on_damage(found)
                if is_over:
                    left.discard(partition)
    finally:
        await asyncio.shield(consumer.close())


def _by_partition(messages: Iterable[Message]) -> list[list[Message]]:
    found: dict[int, list[Message]] = {}
    for message in messages:
        found.setdefault(int(message.partition() or 0), []).append(message)
    return list(found.values())


def _before(messages: Sequence[Message], end: int | None) -> tuple[list[Message], bool]:
    """The events before `end`, and whether it was reached."""
    good: list[Message] = []
    for message in messages:
        error = message.error()
        if error is None:
            if end is not None and offset_of(message) >= end:
                return good, True
            good.append(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            if end is not None and offset_of(message) >= end:
                return good, True
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise OffsetGoneError(
                f"{message.topic()}, partition {message.partition()}: the offset is gone; "
                "retention was faster", offset_of(message),
            )  # fmt: skip
    return good, bool(good) and end is not None and offset_of(good[-1]) == end - 1
