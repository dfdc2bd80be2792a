"""Feeds the app with a topic of Kafka: each message once, whoever is killed.

python examples/words/kafka_consumer.py localhost:9092 texts
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, TopicPartition
from descriptions import Text, Texts


def main(servers: str, topic: str) -> None:
    # Where to go on is what the app has safe, so the group's own positions are not asked.
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "words"})
    partitions = consumer.list_topics(topic, 10).topics[topic].partitions
    with Texts.from_arguments().in_script() as out:
        places = []
        for partition in partitions:
            safe = out.point_of_ref(partition)
            places.append(TopicPartition(topic, partition, 0 if safe is None else safe + 1))
        consumer.assign(places)
        while True:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                text = Text((message.value() or b"").decode())
                out.write(text, partition=message.partition(), sequence=message.offset())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
