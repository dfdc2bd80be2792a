"""Tables on Kafka: entries materialised from their changelog, now and at a pinned moment."""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.errors import LimitError, PinExpiredError
from penstock.log.api import Limits, Pin, TableEntry
from penstock.log.kafka.client import Cluster
from penstock.log.kafka.objects import KafkaStream
from penstock.log.kafka.reading import KafkaReader
from penstock.log.kafka.store import Store
from penstock.log.reading.table import check_table
from penstock.records.event import now_us

SNAPSHOT_ROWS = 4096
GIVEN_BACK_MAX = 10_000
Places = dict[int, int]


class Pinned(msgspec.Struct, frozen=True):
    """The contents of a pin's token: its id, and where each table ended when it was made."""

    name: str
    ends: dict[int, Places]
    made_us: int


class KafkaTables:
    """Reads entries, after bringing the local file up to date. Thread-safe."""

    def __init__(self, cluster: Cluster, reader: KafkaReader, limits: Limits, path: Path) -> None:
        self._cluster = cluster
        self._reader = reader
        self._limits = limits
        self.store = Store(path, reader.read)
        self._given_back: set[str] = set()

    def get(
        self, stream: KafkaStream, keys: Sequence[bytes], at: Pin | None, *, settled: bool = False
    ) -> list[TableEntry | None]:
        check_table(stream)
        homes = sorted({home for key in keys for home in stream.homes(key)})
        if at is None and settled:
            asked_us = now_us()
            ends = self._cluster.wait_for_ends([(stream.topic, home) for home in homes])
            wanted = {home: ends[stream.topic, home] for home in homes}
            with self.store.moment(stream, wanted, asked_us):
                return self.store.get(stream, keys, None)
        with self._caught_up(stream, self._unpack(at), homes) as (store, places):
            return store.get(stream, keys, places)

    def page(
        self, stream: KafkaStream, after: bytes | None, limit: int, at: Pin | None
    ) -> list[TableEntry]:
        check_table(stream)
        if not 1 <= limit <= self._limits.page_rows_max:
            raise LimitError(
                f"a page can have 1 to {self._limits.page_rows_max} entries (page_rows_max), "
                f"not {limit}"
            )
        with self._caught_up(stream, self._unpack(at)) as (store, places):
            return store.page(stream, after, limit, places)

    def snapshot(self, stream: KafkaStream) -> Iterator[list[TableEntry]]:
        check_table(stream)
        moment = self._now([stream])
        after: bytes | None = None
        while True:
            with self._caught_up(stream, moment) as (store, places):
                rows = store.page(stream, after, SNAPSHOT_ROWS, places)
            if not rows:
                return
            yield rows
            after = rows[-1].key

    def pin(self, streams: Sequence[KafkaStream], duration_s: float) -> Pin:
        """Record where each table ends now; Kafka keeps the data."""
        moment = self._now([stream for stream in streams if stream.spec.table])
        expires = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=duration_s)
        return Pin(msgspec.json.encode(moment).decode(), expires)

    def unpin(self, pin: Pin) -> None:
        if len(self._given_back) >= GIVEN_BACK_MAX:
            self._given_back.clear()
        self._given_back.add(pin.token)

    def _unpack(self, pin: Pin | None) -> Pinned | None:
        if pin is None:
            return None
        if pin.token in self._given_back or pin.expires <= dt.datetime.now(dt.UTC):
            raise PinExpiredError(
                f"the pin expired at {pin.expires.isoformat()} or was released: pin again"
            )
        return msgspec.json.decode(pin.token, type=Pinned)

    def _now(self, streams: Sequence[KafkaStream]) -> Pinned:
        """Where the partitions of these streams end now."""
        asked_us = now_us()
        names = {stream.topic: stream for stream in streams}
        places = [(name, p) for name, stream in names.items() for p in range(stream.partitions)]
        found: dict[int, Places] = {}
        for (name, partition), end in self._cluster.ends(places, committed=True).items():
            found.setdefault(names[name].id, {})[partition] = end
        return Pinned(secrets.token_hex(4), found, asked_us)

    @contextlib.contextmanager
    def _caught_up(
        self, stream: KafkaStream, at: Pinned | None, partitions: Sequence[int] | None = None
    ) -> Iterator[tuple[Store, Places | None]]:
        """A store as of `at`, or of now; and the places of `at`, if the store may have more."""
        chosen = range(stream.partitions) if partitions is None else partitions
        moment = self._now([stream]) if at is None else at
        ends = moment.ends.get(stream.id, {})
        wanted = {partition: ends.get(partition, 0) for partition in chosen}
        with self.store.moment(stream, wanted, moment.made_us):
            if at is None or all(self.store.floor(stream, p) <= wanted[p] for p in chosen):
                yield self.store, None if at is None else ends
                return
        # The file no longer has versions that old: rebuild them from what Kafka still has.
        older = Store(None, self._reader.read)
        try:
            with older.moment(stream, wanted, moment.made_us):
                yield older, ends
        finally:
            older.close()
