"""The topics of a log: Kafka's settings for a stream's declaration, and applying them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from penstock.log.declaring.changes import Resolved
from penstock.log.declaring.names import SYSTEM
from penstock.log.declaring.objects import Change, GrowStream, Stream, StreamSpec
from penstock.log.kafka import ledger, objects, staging
from penstock.log.kafka.client import Cluster, KafkaOptions
from penstock.log.kafka.objects import Configuration, Draft, Duty, KafkaStream, Removal
from penstock.log.kafka.session import TakenError
from penstock.records.event import now_us

_THERE = (KafkaError.TOPIC_ALREADY_EXISTS,)
_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART,)
MESSAGE_BYTES = 8 << 20
PIN_MS_MAX = 24 * 3600 * 1000
"""How long compaction spares a table's changes, so that a pinned moment can be read."""


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
        # Whole segments are removed, so they must be small compared with what is to be kept.
        found["segment.bytes"] = str(max(1 << 20, min(1 << 30, spec.retention_bytes // 4)))
    return found


def own_topics(options: KafkaOptions) -> dict[str, tuple[int, Mapping[str, str]]]:
    """The log's own topics, each with its number of partitions and settings."""
    compacted = {
        "cleanup.policy": "compact",
        "max.message.bytes": str(MESSAGE_BYTES),
        # A process that has not read for that long must still see what was deleted.
        "delete.retention.ms": str(7 * 24 * 3600 * 1000),
    }
    # Written with every commit: obsolete lines must go soon, or reading it takes long.
    busy = {
        **compacted,
        "segment.bytes": str(16 << 20),
        "segment.ms": str(3600 * 1000),
        "min.cleanable.dirty.ratio": "0.2",
    }
    staged = {
        "cleanup.policy": "delete",
        "retention.ms": str(options.staged_retention_ms),
        "segment.ms": str(max(60_000, options.staged_retention_ms // 4)),
        "max.message.bytes": str(32 << 20),
    }
    return {
        objects.TOPIC: (1, compacted),
        ledger.TOPIC: (ledger.PARTITIONS, busy),
        ledger.GROUPS_TOPIC: (ledger.GROUPS_PARTITIONS, busy),
        staging.TOPIC: (staging.PARTITIONS, staged),
    }


class Topics:
    """Creates, changes and removes the topics of streams."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def make_own(self, settings: Mapping[str, tuple[int, Mapping[str, str]]], copies: int) -> None:
        """Create those of the log's own topics that do not exist yet."""
        new = [
            NewTopic(
                self._cluster.address.own(name),
                partitions,
                copies,
                config={"min.insync.replicas": str(copies // 2 + 1), **config},
            )
            for name, (partitions, config) in settings.items()
        ]
        self._cluster.collect(
            "creating the log's own topics", self._cluster.admin.create_topics(new), _THERE
        )

    def check(self, draft: Draft) -> dict[str, Duty]:
        """What remains to be done to topics once a change is written; changes nothing itself.

        Raises if the change is not possible, also for Kafka's own reasons.
        """
        ids = self.ids(draft.gone)
        self._check_up_to_date(draft, ids)
        since_us = now_us()
        settings = {topic: _differing(resolved) for topic, resolved in draft.changed.items()}
        for topic, resolved in draft.new.items():
            if topic in draft.there:
                self._check_unused(topic, draft.there[topic], resolved)
                settings[topic] = tuple(topic_settings(cast(StreamSpec, resolved.spec)))
        duties: dict[str, Duty] = {}
        for topic, names in settings.items():
            if names:
                spec = cast(StreamSpec, (draft.new.get(topic) or draft.changed[topic]).spec)
                self._configure(topic, spec, names, check_only=True)
                duties[topic] = Configuration(names, since_us)
        self._create(_missing(draft), validate_only=True)
        return {**duties, **{topic: Removal(id_, since_us) for topic, id_ in ids.items()}}

    def make(self, draft: Draft) -> None:
        """Create topics of new streams, and add partitions, before the catalogue says so."""
        if new := _missing(draft):
            self._create(new, validate_only=False)
            failpoint("objects.changed")
        for topic, resolved in draft.changed.items():
            if resolved.partitions > draft.there.get(topic, 0):
                asked = [NewPartitions(topic, resolved.partitions)]
                made = self._cluster.admin.create_partitions(asked)
                self._cluster.collect(f"adding partitions to {topic}", made)
                failpoint("objects.changed")

    def _create(self, new: list[NewTopic], *, validate_only: bool) -> None:
        if not new:
            return
        asked = self._cluster.admin.create_topics(new, validate_only=validate_only)
        made = self._cluster.collect(f"creating topic {new[0].topic}", asked, _THERE)
        if len(made) < len(new):
            raise TakenError  # another process was faster: look again

    def _check_up_to_date(self, draft: Draft, ids: Mapping[str, str]) -> None:
        """Look again later if a broker shows what was just removed, or not what was just created.

        Brokers hear of the controller's decisions a moment after they were made.
        """
        shown = [topic for topic in draft.new if topic in draft.there]
        hidden = [topic for topic in draft.gone if topic not in ids]
        if self._existing([*shown, *hidden]) != set(shown):
            raise TakenError

    def _existing(self, topics: Sequence[str]) -> set[str]:
        """Those of these topics that exist, as the controller knows."""
        if not topics:
            return set()
        asked = self._cluster.admin.create_topics(
            [NewTopic(topic) for topic in topics], validate_only=True
        )
        free = self._cluster.collect(f"looking at {topics[0]}", asked, _THERE)
        return {topic for topic in topics if topic not in free}

    def _check_unused(self, topic: str, partitions: int, resolved: Resolved) -> None:
        """Raise unless an existing topic can only be the leftover of a process that died."""
        if partitions != resolved.partitions:
            raise ObjectExistsError(
                f"topic {topic} already exists, with {partitions} partitions instead of "
                f"{resolved.partitions}: adopt it (`penstock stream adopt {resolved.name}`), or "
                "choose another name"
            )
        places = [(topic, p) for p in range(partitions)]
        if any(self._cluster.ends(places, committed=False).values()):
            raise ObjectExistsError(
                f"topic {topic} already exists and contains messages: adopt it "
                f"(`penstock stream adopt {resolved.name}`), or choose another name"
            )

    def _configure(
        self, topic: str, spec: StreamSpec, names: Sequence[str], *, check_only: bool = False
    ) -> None:
        wanted = topic_settings(spec)
        entries = [
            ConfigEntry(name, wanted[name], incremental_operation=AlterConfigOpType.SET)
            if name in wanted
            else ConfigEntry(name, None, incremental_operation=AlterConfigOpType.DELETE)
            for name in names
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        asked = self._cluster.admin.incremental_alter_configs([resource], validate_only=check_only)
        self._cluster.collect(f"changing topic {topic}", asked)

    def ids(self, topics: Sequence[str]) -> dict[str, str]:
        """Kafka's own ids of topics; a topic that is removed and recreated has a new id."""
        if not topics:
            return {}
        asked = self._cluster.admin.describe_topics(TopicCollection(list(topics)))
        found = self._cluster.collect(f"looking at {topics[0]}", asked, _MISSING)
        return {topic: str(about.topic_id) for topic, about in found.items()}

    def carry_out(self, topic: str, duty: Duty, stream: KafkaStream | None) -> None:
        """Do what remains to be done to a topic; `stream` is the one it holds, if any."""
        if isinstance(duty, Configuration):
            if stream is not None:
                self._configure(topic, stream.spec, duty.settings)
        elif stream is None:
            found = self.ids([topic])
            if not found and self._existing([topic]):
                raise TakenError  # look again when this broker knows it too
            if found.get(topic) == duty.topic_id:
                asked = self._cluster.admin.delete_topics([topic])
                self._cluster.collect(f"removing topic {topic}", asked, _MISSING)
        failpoint("objects.changed")

    def find_overlooked(
        self, streams: Iterable[KafkaStream], there: Mapping[str, int]
    ) -> list[Change]:
        """Partitions added to topics that their streams do not know, although they have messages.

        A process died after adding partitions, or someone used Kafka's own tools; and others
        write there.
        """
        found: list[Change] = []
        for stream in streams:
            more = [(stream.topic, p) for p in range(stream.partitions, there.get(stream.topic, 0))]
            is_one = stream.spec.ids == "producer" or stream.name.namespace == SYSTEM
            if more and not is_one and any(self._cluster.ends(more, committed=False).values()):
                found.append(GrowStream(str(stream.name), there[stream.topic]))
        return found


def _missing(draft: Draft) -> list[NewTopic]:
    """The topics to be created."""
    found = []
    for topic, resolved in draft.new.items():
        spec = cast(StreamSpec, resolved.spec)
        if topic not in draft.there:
            settings = topic_settings(spec)
            found.append(
                NewTopic(topic, resolved.partitions, spec.replication or 1, config=settings)
            )
    return found


def _differing(resolved: Resolved) -> tuple[str, ...]:
    """The topic settings that a change of its stream affects."""
    spec, before = cast(StreamSpec, resolved.spec), cast(Stream, resolved.before)
    if spec.replication != before.spec.replication:
        raise UsageError(
            f"stream {before.name}: replication cannot change from {before.spec.replication} to "
            f"{spec.replication} here: move its replicas with Kafka's own tools "
            "(kafka-reassign-partitions)"
        )
    had, wanted = topic_settings(before.spec), topic_settings(spec)
    return tuple(name for name in {**had, **wanted} if had.get(name) != wanted.get(name))
