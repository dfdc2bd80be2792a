"""The ledger: progress, and the state of each producer, in compacted topics.

A commit writes to it in the same transaction that writes its events. Every process reads the
ledger from its start. The progress of groups changes with every acknowledgement, and only the
coordinator of a group needs it: it has a separate topic, in which each group is in one partition.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec

from penstock.log.api import Committed
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.view import View
from penstock.log.writing.fate import ProducerStanding

PARTITIONS = 4
TOPIC = "_penstock.progress"
GROUPS_PARTITIONS = 8
GROUPS_TOPIC = "_penstock.groups"
_PRODUCER, _PROGRESS, _GROUPS = "producer/", "progress/", "group/"
_GROUP_DEPTH = 3
"""How many parts of a key identify a group: `group/STREAM/NAME/…`."""


class ProducerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a producer: who holds it, and its latest commit.

    `committed_epoch` says by which holder; `pieces` are the staged pieces that the commit used;
    `via` are the streams whose ids it has compared: their sessions wrote for it.
    """

    epoch: int = 0
    """0 before it was ever opened."""
    committed: Committed | None = None
    ephemeral: bool = False
    time_us: int = 0
    committed_epoch: int = 0
    pieces: tuple[int, ...] = ()
    via: tuple[str, ...] = ()

    @property
    def standing(self) -> ProducerStanding:
        return ProducerStanding(self.epoch or None, self.committed, self.committed_epoch or None)

    def is_forgettable(self, before_us: int) -> bool:
        """Whether it is ephemeral and has not been used since then."""
        return self.ephemeral and self.time_us < before_us


_STATE = msgspec.msgpack.Decoder(ProducerState)


class LedgerLine(msgspec.Struct, frozen=True):
    """A line of the ledger: what to send, and where. `topic` is its name without a log's prefix."""

    topic: str
    partition: int
    key: bytes
    value: bytes | None


class Ledger:
    """Reads the ledger; every answer is current as of the call. Thread-safe."""

    def __init__(self, cluster: Cluster) -> None:
        self._address = cluster.address
        self._view = View(cluster, self._address.own(TOPIC), self._apply)
        self._groups = View(cluster, self._address.own(GROUPS_TOPIC), self._apply_to_groups)
        self._values: dict[str, bytes] = {}
        self._group_values: dict[str, bytes] = {}

    def close(self) -> None:
        self._view.close()
        self._groups.close()

    def topic_of(self, line: LedgerLine) -> str:
        return self._address.own(line.topic)

    def _apply(self, key: str, value: bytes | None, offset: int) -> None:
        del offset
        _put(self._values, key, value)

    def _apply_to_groups(self, key: str, value: bytes | None, offset: int) -> None:
        del offset
        _put(self._group_values, key, value)

    # Producers

    def producer(self, name: str, *, wait: bool = True) -> ProducerState | None:
        """The state of a producer; without `wait`, before transactions in progress."""
        key = f"{_PRODUCER}{name}"
        self._view.catch_up(_partition_of(key), wait=wait)
        with self._view.lock:
            packed = self._values.get(key)
        return None if packed is None else _STATE.decode(packed)

    def unused_epoch(self, name: str) -> int:
        """An epoch that a producer never had, not even before it was forgotten.

        Every opening of a producer writes its line. So there cannot have been more openings than
        there are offsets in the part of its partition of the ledger that was read.
        """
        return self._view.position(_partition_of(f"{_PRODUCER}{name}")) + 1

    def producers(self) -> Iterator[tuple[str, ProducerState]]:
        self._view.catch_up(*range(PARTITIONS))
        with self._view.lock:
            found = [(k, v) for k, v in self._values.items() if k.startswith(_PRODUCER)]
        for key, packed in found:
            yield key.removeprefix(_PRODUCER), _STATE.decode(packed)

    # Progress

    def progress(self, key: str) -> bytes | None:
        if key.startswith(_GROUPS):
            return self.progress_items(key).get(key)
        key = f"{_PROGRESS}{key}"
        self._view.catch_up(_partition_of(key))
        with self._view.lock:
            return self._values.get(key)

    def progress_items(self, prefix: str) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        if prefix.startswith(_GROUPS) or _GROUPS.startswith(prefix):
            is_one = prefix.count("/") >= _GROUP_DEPTH
            partitions = [_group_partition(prefix)] if is_one else range(GROUPS_PARTITIONS)
            self._groups.catch_up(*partitions)
            with self._groups.lock:
                found = {k: v for k, v in self._group_values.items() if k.startswith(prefix)}
        if not prefix.startswith(_GROUPS):
            own = f"{_PROGRESS}{prefix}"
            self._view.catch_up(*range(PARTITIONS))
            with self._view.lock:
                lines = {k: v for k, v in self._values.items() if k.startswith(own)}
            found |= {key.removeprefix(_PROGRESS): value for key, value in lines.items()}
        return dict(sorted(found.items()))


def _put(values: dict[str, bytes], key: str, value: bytes | None) -> None:
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value


def producer_line(name: str, state: ProducerState | None) -> LedgerLine:
    return _line(f"{_PRODUCER}{name}", None if state is None else msgspec.msgpack.encode(state))


def progress_line(key: str, value: bytes | None) -> LedgerLine:
    if key.startswith(_GROUPS):
        return LedgerLine(GROUPS_TOPIC, _group_partition(key), key.encode(), value)
    return _line(f"{_PROGRESS}{key}", value)


def _line(key: str, value: bytes | None) -> LedgerLine:
    return LedgerLine(TOPIC, _partition_of(key), key.encode(), value)


def _group_partition(key: str) -> int:
    """The partition that contains everything about the group of a key."""
    group = "/".join(key.split("/")[:_GROUP_DEPTH])
    return zlib.crc32(group.encode()) % GROUPS_PARTITIONS


def _partition_of(key: str) -> int:
    return zlib.crc32(key.encode()) % PARTITIONS
