"""The health of a cluster: its brokers, and the leaders and replicas of streams' partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from confluent_kafka.admin import ClusterMetadata

from penstock.log.kafka.client import Cluster
from penstock.log.kafka.objects import KafkaStream


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """A broker that is up. `leads` counts partitions of this log's streams."""

    id: int
    address: str
    rack: str
    is_controller: bool
    leads: int = 0
    holds: int = 0


class PartitionHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A partition of a stream: its leader, its replicas, and those that are in sync."""

    stream: str
    topic: str
    partition: int
    leader: int | None
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    racks: tuple[str, ...]

    @property
    def is_behind(self) -> bool:
        """Whether fewer replicas are in sync than there should be."""
        return len(self.in_sync) < len(self.replicas)

    @property
    def is_in_one_rack(self) -> bool:
        return len(self.replicas) > 1 and len(set(self.racks)) == 1


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the whole cluster, as of now."""

    cluster: str
    brokers: tuple[Broker, ...]
    partitions: tuple[PartitionHealth, ...]


def health(cluster: Cluster, streams: Sequence[KafkaStream]) -> Health:
    """Query the cluster. Raises `LogUnreachableError` if it does not answer."""
    told = cluster.metadata("describing the cluster")
    racks = _racks(cluster)
    partitions = _partitions(told, streams, racks)
    brokers = [
        Broker(
            id=number,
            address=f"{node.host}:{node.port}",
            rack=racks.get(number, ""),
            is_controller=number == told.controller_id,
            leads=sum(p.leader == number for p in partitions),
            holds=sum(number in p.replicas for p in partitions),
        )
        for number, node in sorted(told.brokers.items())
    ]
    return Health(
        cluster=told.cluster_id or "", brokers=tuple(brokers), partitions=tuple(partitions)
    )


def _racks(cluster: Cluster) -> dict[int, str]:
    def ask(left: float) -> dict[int, str]:
        told = cluster.admin.describe_cluster(request_timeout=left).result(left + 1)
        return {node.id: node.rack or "" for node in told.nodes}

    return cluster.ask("looking for racks", ask)


def _partitions(
    told: ClusterMetadata, streams: Sequence[KafkaStream], racks: Mapping[int, str]
) -> list[PartitionHealth]:
    found = []
    for stream in streams:
        topic = told.topics.get(stream.topic)
        for number, part in sorted(topic.partitions.items()) if topic else ():
            found.append(
                PartitionHealth(
                    stream=str(stream.name),
                    topic=stream.topic,
                    partition=number,
                    leader=None if part.leader < 0 else part.leader,
                    replicas=tuple(part.replicas),
                    in_sync=tuple(sorted(part.isrs)),
                    racks=tuple(racks.get(replica, "") for replica in part.replicas),
                )
            )
    return found
