"""Writes the app's counts to a Kafka topic.

python examples/words/kafka_producer.py localhost:9092 counts
"""

from __future__ import annotations

import sys

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from descriptions import Counts


def check(error: KafkaError | None, message: Message) -> None:  # noqa: ARG001  as Kafka calls it
    """Raise if Kafka did not accept a count: after a restart, it is written again."""
    if error is not None:
        raise KafkaException(error)


def main(servers: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    with Counts.from_arguments().in_script() as counts:
        for count in counts:
            producer.produce(topic, str(count.count), key=count.word, on_delivery=check)
            producer.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
