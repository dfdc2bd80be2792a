"""Upkeep of a log on Kafka: timely retention, and removing what was never committed.

Kafka removes old events by itself, in whole segments and at its own pace. A round of upkeep
removes them at once, and maintains Penstock's own data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from confluent_kafka import TopicPartition

from penstock.log.api import Holder, Upkeep
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.ledger import Ledger, ProducerState
from penstock.log.kafka.messages import offset_of
from penstock.log.kafka.objects import KafkaStream
from penstock.log.kafka.producers import Producers
from penstock.log.kafka.staging import PARTITIONS, StagedPlace, Staging, Tag
from penstock.log.kafka.store import Store
from penstock.log.writing.fate import NewCommit, judge
from penstock.records.event import now_us

PRODUCER_KEPT_US = 7 * 24 * 3600 * 1_000_000


class KafkaHousekeeper:
    """Carries out rounds of upkeep, alongside readers, writers and other housekeepers."""

    def __init__(
        self, cluster: Cluster, producers: Producers, ledger: Ledger, staging: Staging, store: Store
    ) -> None:
        self._cluster = cluster
        self._producers = producers
        self._ledger = ledger
        self._staging = staging
        self._store = store

    def round(self, streams: Sequence[KafkaStream]) -> Upkeep:
        expired = sum(self._expire(stream) for stream in streams)
        self._store.forget_others(streams)
        self._store.remove_unused()
        # Pieces staged after this belong to holders that may not be in the ledger yet.
        ends = self._cluster.ends(self._staging_partitions(), committed=True)
        producers = dict(self._ledger.producers())
        return Upkeep(
            batches_expired=expired,
            pieces_swept=self._sweep(producers, ends),
            producers_forgotten=self._forget(producers),
        )

    # Retention

    def _expire(self, stream: KafkaStream) -> int:
        """Remove events past the stream's retention; return the number of partitions affected."""
        if stream.spec.retention_ms is None or stream.spec.table:
            return 0
        places = [(stream.topic, partition) for partition in range(stream.partitions)]
        firsts = self._cluster.firsts(places)
        ends = self._cluster.ends(places, committed=True)
        before_ms = now_us() // 1000 - stream.spec.retention_ms
        due = []
        for place in places:
            found = self._cluster.offset_at(*place, before_ms)
            until = ends[place] if found is None else min(found, ends[place])
            if until > firsts[place]:
                due.append(TopicPartition(*place, until))
        removed = self._remove(due)
        if stream.spec.ids == "producer":
            self._store.forget_ids(stream, before_ms * 1000)
        return removed

    def _remove(self, before: Sequence[TopicPartition]) -> int:
        if before:
            asked = self._cluster.admin.delete_records(list(before))
            self._cluster.collect("removing old events", asked)
        return len(before)

    # Staged events

    def _staging_partitions(self) -> list[tuple[str, int]]:
        return [(self._staging.topic, partition) for partition in range(PARTITIONS)]

    def _sweep(
        self, producers: dict[str, ProducerState], ends: Mapping[tuple[str, int], int]
    ) -> int:
        """Remove staged pieces up to the first that may still be committed."""
        places = self._staging_partitions()
        firsts = self._cluster.firsts(places)
        committed = {number for state in producers.values() for number in state.pieces}
        swept, due = 0, []
        for place in places:
            until = firsts[place]
            if ends[place] <= until:
                continue
            for message in self._staging.messages(place[1], until, ends[place]):
                key, offset = message.key(), offset_of(message)
                tag = None if key is None else msgspec.json.decode(key, type=Tag)
                if tag is not None and _is_live(tag, producers.get(tag.producer)):
                    break
                swept += StagedPlace(place[1], offset).number() not in committed
                until = offset + 1
            if until > firsts[place]:
                due.append(TopicPartition(*place, until))
        self._remove(due)
        return swept

    # Producers

    def _forget(self, producers: dict[str, ProducerState]) -> int:
        """Forget ephemeral producers that have not committed for a long time."""
        before_us = now_us() - PRODUCER_KEPT_US
        old = [name for name, state in producers.items() if state.is_forgettable(before_us)]
        return sum(self._producers.forget(name, before_us) for name in old)


def _is_live(tag: Tag, state: ProducerState | None) -> bool:
    """Whether the commit that a piece was staged for can still be made."""
    if state is None:
        return False
    return isinstance(
        judge(state.standing, Holder(tag.producer, tag.epoch), tag.sequence), NewCommit
    )
