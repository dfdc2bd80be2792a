"""Feeds the app from a Kafka topic: each message once, whichever process is killed.

python examples/words/kafka_consumer.py localhost:9092 texts
"""

from __future__ import annotations

import sys

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition
from descriptions import Text, Texts


def main(servers: str, topic: str) -> None:
    # What the app has stored says where to continue, so the group's own positions are not used.
    settings = {"group.id": "words", "auto.offset.reset": "error"}
    consumer = Consumer({"bootstrap.servers": servers, **settings})
    partitions = consumer.list_topics(topic, 10).topics[topic].partitions
    with Texts.from_arguments().in_script() as out:
        places = []
        for partition in partitions:
            safe = out.point_of_ref(partition)
            offset = OFFSET_BEGINNING if safe is None else safe + 1
            places.append(TopicPartition(topic, partition, offset))
        consumer.assign(places)
        while True:
            message = consumer.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is not None and not error.retriable():
                raise KafkaException(error)
            if error is None:
                text = Text((message.value() or b"").decode())
                out.write(text, partition=message.partition(), sequence=message.offset())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
