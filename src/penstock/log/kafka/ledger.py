"""The ledger: progress, and where each producer is, in one compacted topic.

What a commit saves here is written in the very transaction that writes its events.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec

from penstock.log.api import Committed
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.view import View

PARTITIONS = 4
TOPIC = "_penstock.progress"
_PRODUCER, _PROGRESS = "producer/", "progress/"


class ProducerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a producer is: who holds it, and its latest commit.

    `committed_epoch` says by which holder; `pieces` are what that commit took from what was
    staged; `via` the streams whose ids it has compared: their sessions wrote for it.
    """

    epoch: int = 0
    committed: Committed | None = None
    ephemeral: bool = False
    time_us: int = 0
    committed_epoch: int = 0
    pieces: tuple[int, ...] = ()
    via: tuple[str, ...] = ()

    @property
    def sequence(self) -> int | None:
        return None if self.committed is None else self.committed.sequence

    def is_forgettable(self, before_us: int) -> bool:
        """Whether it is ephemeral and was not used since then."""
        return self.ephemeral and self.time_us < before_us


_STATE = msgspec.msgpack.Decoder(ProducerState)


class Line(msgspec.Struct, frozen=True):
    """A line of the ledger: what to send, and where."""

    partition: int
    key: bytes
    value: bytes | None


class Ledger:
    """Reads the ledger; every answer is as of the question. For any thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.topic = cluster.address.own(TOPIC)
        self._view = View(cluster, self.topic, self._apply)
        self._values: dict[str, bytes] = {}
        self.close = self._view.close

    def _apply(self, key: str, value: bytes | None, offset: int) -> None:
        del offset
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value

    # Producers

    def producer(self, name: str, *, wait: bool = True) -> ProducerState | None:
        """Where a producer is; without `wait`, before what is under way."""
        key = f"{_PRODUCER}{name}"
        self._view.catch_up(_partition_of(key), wait=wait)
        with self._view.lock:
            packed = self._values.get(key)
        return None if packed is None else _STATE.decode(packed)

    def unused_epoch(self, name: str) -> int:
        """An epoch that a producer never had, also not before it was forgotten.

        Every opening of a producer writes its line. So there were never more than there are
        offsets before the place up to which its part of the ledger was read.
        """
        return self._view.reached(_partition_of(f"{_PRODUCER}{name}")) + 1

    def producers(self) -> Iterator[tuple[str, ProducerState]]:
        self._view.catch_up(*range(PARTITIONS))
        with self._view.lock:
            found = [(k, v) for k, v in self._values.items() if k.startswith(_PRODUCER)]
        for key, packed in found:
            yield key.removeprefix(_PRODUCER), _STATE.decode(packed)

    # Progress

    def progress(self, key: str) -> bytes | None:
        key = f"{_PROGRESS}{key}"
        self._view.catch_up(_partition_of(key))
        with self._view.lock:
            return self._values.get(key)

    def progress_items(self, prefix: str) -> dict[str, bytes]:
        prefix = f"{_PROGRESS}{prefix}"
        self._view.catch_up(*range(PARTITIONS))
        with self._view.lock:
            found = {k: v for k, v in self._values.items() if k.startswith(prefix)}
        return {key.removeprefix(_PROGRESS): found[key] for key in sorted(found)}


def producer_line(name: str, state: ProducerState | None) -> Line:
    return _line(f"{_PRODUCER}{name}", None if state is None else msgspec.msgpack.encode(state))


def progress_line(key: str, value: bytes | None) -> Line:
    return _line(f"{_PROGRESS}{key}", value)


def _line(key: str, value: bytes | None) -> Line:
    return Line(_partition_of(key), key.encode(), value)


def _partition_of(key: str) -> int:
    return zlib.crc32(key.encode()) % PARTITIONS
