"""What librdkafka's errors mean: which are worth another try."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.errors import LimitError, LogAccessError, LogError, PenstockError
from penstock.log.kafka.client import Address, Cluster, KafkaOptions


@pytest.fixture
def cluster() -> Cluster:
    """One that nobody asks anything."""
    return Cluster(Address.parse("kafka://127.0.0.1:1"), KafkaOptions(), {})


@pytest.mark.parametrize(
    "code",
    [
        # seen when brokers are killed under load
        KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, KafkaError.UNKNOWN_PRODUCER_ID,
        KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError._MSG_TIMED_OUT,
        # nobody has seen this one
        KafkaError.UNKNOWN,
    ],
)  # fmt: skip
def test_a_transaction_that_was_undone_may_be_made_again(cluster: Cluster, code: int) -> None:
    for error in (KafkaError(code), KafkaException(KafkaError(code))):
        told = cluster.translate_abort(error, "writing")
        assert isinstance(told, PenstockError)
        assert told.retriable
        assert "writing" in str(told)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.INVALID_RECORD, LogError), (KafkaError.POLICY_VIOLATION, LogError),
        (KafkaError.MSG_SIZE_TOO_LARGE, LimitError),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, LogAccessError),
    ],
)  # fmt: skip
def test_what_kafka_will_never_take_is_given_up(
    cluster: Cluster, code: int, kind: type[PenstockError]
) -> None:
    told = cluster.translate_abort(KafkaError(code), "writing")
    assert type(told) is kind
    assert not told.retriable
