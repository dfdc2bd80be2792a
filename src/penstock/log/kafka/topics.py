"""How the topics of a log are set up: what a stream's declaration means to Kafka."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.log.kafka import ledger, staging
from penstock.log.kafka.client import KafkaOptions
from penstock.log.objects import StreamSpec

MESSAGE_BYTES = 8 << 20
PIN_MS_MAX = 24 * 3600 * 1000
"""For so long compaction leaves a table's changes alone, so that a pinned moment can be read."""


def topic_settings(spec: StreamSpec) -> dict[str, str]:
    """Kafka's settings for a stream's topic."""
    copies = spec.replication or 1
    insync = {"write": 1, "majority": copies // 2 + 1, "all": copies}[spec.acks]
    # An entry of actions is only known from all of them.
    is_compacted = spec.table and spec.entries == "value"
    found = {
        "cleanup.policy": "compact" if is_compacted else "delete",
        "min.insync.replicas": str(insync),
        "retention.ms": str(spec.retention_ms or -1),
        "retention.bytes": str(spec.retention_bytes or -1),
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(MESSAGE_BYTES),
    }
    if is_compacted:
        found["min.compaction.lag.ms"] = str(PIN_MS_MAX)
        found["delete.retention.ms"] = str(PIN_MS_MAX)
    if spec.retention_bytes is not None:
        # Whole segments are removed, so they must be small beside what is to be kept.
        found["segment.bytes"] = str(max(1 << 20, min(1 << 30, spec.retention_bytes // 4)))
    return found


def own_topics(catalogue: str, options: KafkaOptions) -> dict[str, tuple[int, Mapping[str, str]]]:
    """The log's own topics, each with its number of partitions and settings."""
    compacted = {
        "cleanup.policy": "compact",
        "max.message.bytes": str(MESSAGE_BYTES),
        # A process that has not looked for so long must still see what was deleted.
        "delete.retention.ms": str(7 * 24 * 3600 * 1000),
    }
    staged = {
        "cleanup.policy": "delete",
        "retention.ms": str(options.staged_retention_ms),
        "segment.ms": str(max(60_000, options.staged_retention_ms // 4)),
        "max.message.bytes": str(32 << 20),
    }
    return {
        catalogue: (1, compacted),
        ledger.TOPIC: (ledger.PARTITIONS, compacted),
        staging.TOPIC: (staging.PARTITIONS, staged),
    }
