"""The topics of a log: what a stream's declaration means to Kafka, and bringing them to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from confluent_kafka import KafkaError, TopicCollection
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)

from penstock.errors import ObjectExistsError, UsageError
from penstock.failpoints import failpoint
from penstock.log.changes import Resolved
from penstock.log.kafka import ledger, objects, staging
from penstock.log.kafka.client import Cluster, KafkaOptions
from penstock.log.kafka.session import TakenError
from penstock.log.objects import CreateStream, Stream, StreamSpec

_THERE = (KafkaError.TOPIC_ALREADY_EXISTS,)
_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART,)
MESSAGE_BYTES = 8 << 20
PIN_MS_MAX = 24 * 3600 * 1000
"""For so long compaction leaves a table's changes alone, so that a pinned moment can be read."""


def topic_settings(spec: StreamSpec) -> dict[str, str]:
    """Kafka's settings for a stream's topic."""
    copies = spec.replication or 1
    insync = {"write": 1, "majority": copies // 2 + 1, "all": copies}[spec.acks]
    found = {
        "cleanup.policy": "compact" if spec.table else "delete",
        "min.insync.replicas": str(insync),
        "retention.ms": str(spec.retention_ms or -1),
        "retention.bytes": str(spec.retention_bytes or -1),
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(MESSAGE_BYTES),
    }
    if spec.table:
        found["min.compaction.lag.ms"] = str(PIN_MS_MAX)
        found["delete.retention.ms"] = str(PIN_MS_MAX)
    if spec.retention_bytes is not None:
        # Whole segments are removed, so they must be small beside what is to be kept.
        found["segment.bytes"] = str(max(1 << 20, min(1 << 30, spec.retention_bytes // 4)))
    return found


def own_topics(options: KafkaOptions) -> dict[str, tuple[int, Mapping[str, str]]]:
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
        objects.TOPIC: (1, compacted),
        ledger.TOPIC: (ledger.PARTITIONS, compacted),
        staging.TOPIC: (staging.PARTITIONS, staged),
    }


class Topics:
    """Makes, changes and removes the topics of streams."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def make_own(self, settings: Mapping[str, tuple[int, Mapping[str, str]]], copies: int) -> None:
        """The log's own topics, where they are not there yet."""
        new = [
            NewTopic(
                self._cluster.address.own(name), partitions, copies,
                config={"min.insync.replicas": str(copies // 2 + 1), **config},
            )
            for name, (partitions, config) in settings.items()
        ]  # fmt: skip
        self._cluster.done(
            "making the log's own topics", self._cluster.admin.create_topics(new), _THERE
        )

    def make(self, wanted: Mapping[str, Resolved]) -> None:
        """Topics of new streams. One that is there already must be empty and as wanted."""
        if not wanted:
            return
        there = self._cluster.topics()
        new = []
        for topic, resolved in wanted.items():
            spec = cast(StreamSpec, resolved.spec)
            if topic in there:
                self._check_unused(topic, there[topic], resolved)
                self._configure(topic, topic_settings(spec))
                continue
            new.append(
                NewTopic(
                    topic, resolved.partitions, spec.replication or 1, config=topic_settings(spec)
                )
            )
        if new:
            self._create(new, validate_only=True)
            self._create(new, validate_only=False)
            failpoint("objects.changed")

    def _create(self, new: list[NewTopic], *, validate_only: bool) -> None:
        asked = self._cluster.admin.create_topics(new, validate_only=validate_only)
        made = self._cluster.done(f"making the topic {new[0].topic}", asked, _THERE)
        if len(made) < len(new):
            raise TakenError  # somebody else was faster: look again

    def _check_unused(self, topic: str, partitions: int, resolved: Resolved) -> None:
        """Whether a topic of this name is what a process left that died while it made one."""
        if partitions != resolved.partitions:
            raise ObjectExistsError(
                f"the topic {topic} exists already, with {partitions} partitions instead of "
                f"{resolved.partitions}: adopt it (`penstock stream adopt {resolved.name}`), or "
                "choose another name"
            )
        places = [(topic, p) for p in range(partitions)]
        if any(self._cluster.ends(places, committed=False).values()):
            raise ObjectExistsError(
                f"the topic {topic} exists already and holds messages: adopt it "
                f"(`penstock stream adopt {resolved.name}`), or choose another name"
            )

    def change(self, wanted: Mapping[str, Resolved]) -> None:
        """Bring topics to what their streams are now; refuses before it changes anything."""
        for resolved in wanted.values():
            spec, before = cast(StreamSpec, resolved.spec), cast(Stream, resolved.before)
            if spec.replication != before.spec.replication:
                raise UsageError(
                    f"stream {before.name}: replication cannot change from "
                    f"{before.spec.replication} to {spec.replication} here: move its replicas with "
                    "Kafka's own tools (kafka-reassign-partitions)"
                )
        for topic, resolved in wanted.items():
            spec, before = cast(StreamSpec, resolved.spec), cast(Stream, resolved.before)
            there = self._cluster.topics().get(topic, 0)
            if resolved.partitions > there:
                self._grow(topic, resolved.partitions)
            if topic_settings(spec) != topic_settings(before.spec):
                self._configure(topic, topic_settings(spec))

    def _grow(self, topic: str, partitions: int) -> None:
        new = [NewPartitions(topic, partitions)]
        self._cluster.done(
            f"adding partitions to {topic}", self._cluster.admin.create_partitions(new)
        )

    def _configure(self, topic: str, settings: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        self._cluster.done(
            f"changing the topic {topic}", self._cluster.admin.incremental_alter_configs([resource])
        )

    def ids(self, topics: Sequence[str]) -> dict[str, str]:
        """Kafka's own ids of topics: another one after a topic was removed and made again."""
        if not topics:
            return {}
        asked = self._cluster.admin.describe_topics(TopicCollection(list(topics)))
        found = self._cluster.done(f"looking at {topics[0]}", asked, _MISSING)
        return {topic: str(about.topic_id) for topic, about in found.items()}

    def settle(self, draft: objects.Draft) -> None:
        """Remove what was dropped, and make anew what was dropped and created as one change."""
        dropped = draft.dropped()
        there = self.ids(list(dropped))
        for topic, number in dropped.items():
            if there.get(topic) == number:
                asked = self._cluster.admin.delete_topics([topic])
                self._cluster.done(f"removing the topic {topic}", asked, _MISSING)
            stream = draft.stream_of(topic)
            if stream is not None:
                change = CreateStream(stream.spec)
                wanted = Resolved(change, stream.name, None, stream.spec, stream.grown)
                self.make({topic: wanted})
            draft.forget(topic)
