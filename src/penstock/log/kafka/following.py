"""Reading a stream with asyncio, by the asyncio client of librdkafka's binding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence

from confluent_kafka import Message, TopicPartition
from confluent_kafka.aio import AIOConsumer

from penstock.errors import DamagedError
from penstock.log.batch import Batch
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.messages import decode, offset_of
from penstock.log.kafka.objects import KafkaStream
from penstock.log.kafka.reading import is_end
from penstock.log.read import ReadOptions

POLL_S = 0.1
MESSAGES = 1000
WORKERS = 2


async def follow(
    cluster: Cluster, stream: KafkaStream, starts: dict[int, int], ends: dict[int, int],
    options: ReadOptions,
) -> AsyncGenerator[Batch, None]:  # fmt: skip
    """Batches of the partitions from `starts`: up to `ends`, or with `follow` on and on."""
    left = {p for p, start in starts.items() if options.follow or start < ends[p]}
    if not left:
        return
    consumer = AIOConsumer(cluster.consumer_settings(**{"fetch.wait.max.ms": 20}), WORKERS)
    try:
        await consumer.assign([TopicPartition(stream.topic, p, starts[p]) for p in sorted(left)])
        while left and not (options.stop is not None and options.stop.is_set()):
            for messages in _by_partition(await consumer.consume(MESSAGES, POLL_S)):
                partition = int(messages[0].partition() or 0)
                end = None if options.follow else ends[partition]
                batches, is_over = await asyncio.to_thread(_taken, cluster, stream, messages, end)
                for found in batches:
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


def _taken(
    cluster: Cluster, stream: KafkaStream, messages: Sequence[Message], end: int | None
) -> tuple[list[Batch | DamagedError], bool]:
    """The events before `end`, and whether it was reached."""
    good: list[Message] = []
    is_over = False
    for message in messages:
        if message.error() is not None:
            is_over = is_over or is_end(cluster, stream, message, end)
        elif end is not None and offset_of(message) >= end:
            is_over = True
        else:
            good.append(message)
            is_over = is_over or (end is not None and offset_of(message) == end - 1)
    return list(decode(stream, good)) if good else [], is_over
