"""Redis streams as sources, read directly or through a consumer group.

    RedisStreamSource("orders", "redis://127.0.0.1/0", "orders")

An id of a Redis stream, `ms-seq`, becomes one number: `ms << 20 | seq`. An unavailable Redis is
retried, less and less often; the connector keeps running meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import Literal, cast

import msgspec
import redis

from penstock.connect.clients.source import Item, Source
from penstock.connect.systems.redis import HOPELESS, make_client
from penstock.errors import ConnectorError
from penstock.patience import Patience

Id = tuple[int, int]
Fields = Mapping[bytes, bytes]
StreamEntries = Sequence[tuple[bytes, Fields]]
RedisOnGone = Literal["fail", "skip"]

BATCH_ROWS = 1000
IDLE_S = 0.02
SEQ_BITS = 20
SEQ_MAX = (1 << SEQ_BITS) - 1


def id_of(text: bytes) -> Id:
    ms, _, seq = text.partition(b"-")
    return int(ms), int(seq)


def number_of(text: bytes) -> int:
    """The number of an entry. Raises `ConnectorError` if its id does not fit into 64 bits."""
    ms, seq = id_of(text)
    if ms >= 1 << 64 - SEQ_BITS or seq > SEQ_MAX:
        raise ConnectorError(
            f"id {text.decode()} does not fit into a 64-bit number: its time can have at most "
            f"{64 - SEQ_BITS} bits and its counter {SEQ_BITS}; let Redis choose ids (XADD key *)"
        )
    return ms << SEQ_BITS | seq


def id_text(number: int | None) -> str:
    return "0-0" if number is None else f"{number >> SEQ_BITS}-{number & SEQ_MAX}"


def data_of(fields: Fields) -> bytes:
    """The field `data` if it is the only one, otherwise all fields as a JSON object of strings.

    Bytes that are not UTF-8 are written as `\\xNN` in those strings.
    """
    if len(fields) == 1 and b"data" in fields:
        return fields[b"data"]
    return msgspec.json.encode({_text(name): _text(value) for name, value in fields.items()})


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")


def explain_gone(what: str, key: str) -> ConnectorError:
    return ConnectorError(
        f"{what} of {key} was removed from Redis before it was read: to continue without it, set "
        'on_gone="skip"'
    )


class _EntrySource(Source):
    """What both ways to read a Redis stream share: batches, pauses, and retrying."""

    def __init__(self, name: str, url: str, key: str, on_gone: RedisOnGone) -> None:
        super().__init__(name)
        self._url = url
        self._key = key
        self._on_gone = on_gone
        self._client: redis.Redis | None = None
        self._ready: deque[Item] = deque()
        self._last: int | None = None
        """The last entry received from Redis."""
        self._patience = Patience("Redis", self.tell)

    def handle_open(self) -> None:
        self._client = make_client(self._url)

    def handle_close(self) -> None:
        if self._client is not None:
            self._client.close()

    def handle_reset(self, point_of_ref: int | None) -> None:
        self._ready.clear()
        self._last = point_of_ref

    def handle_next(self) -> Item | None:
        if not self._ready and self._patience.is_due:
            self._ask()
        return self._ready.popleft() if self._ready else None

    def _fetch(self, client: redis.Redis) -> int:
        """Add to what is ready; return the number of entries received."""
        raise NotImplementedError

    def _ask(self) -> None:
        assert self._client is not None  # noqa: S101  handle_open comes first
        try:
            found = self._fetch(self._client)
        except HOPELESS:
            raise
        except (redis.ConnectionError, redis.TimeoutError) as error:
            self._patience.note_failure(error)
        else:
            self._patience.note_answer(0.0 if found == BATCH_ROWS else IDLE_S)

    def _take(self, entries: StreamEntries) -> None:
        for text, fields in entries:
            self._last = number_of(text)
            self._ready.append(Item(data_of(fields), self._last))


class RedisStreamSource(_EntrySource):
    """Every entry of a Redis stream once, in order; nothing is changed in Redis.

    Fails if entries were trimmed or deleted before they were read, as far as Redis reports this
    (from version 7 on), unless `on_gone` is "skip". It also fails if it cannot know: when the last
    entry it has read was trimmed while it was not running. On its first run it reads what exists.
    """

    def __init__(self, name: str, url: str, key: str, *, on_gone: RedisOnGone = "fail") -> None:
        super().__init__(name, url, key, on_gone)
        self._index: int | None = None
        """How many entries had been added up to the last one read, if known."""
        self._forgiven: Id = (0, 0)
        """Entries up to this one may have been removed."""

    def handle_reset(self, point_of_ref: int | None) -> None:
        super().handle_reset(point_of_ref)
        self._index = None

    def _fetch(self, client: redis.Redis) -> int:
        together = client.pipeline(transaction=True)
        together.xrange(self._key, min="(" + id_text(self._last), count=BATCH_ROWS)
        together.xinfo_stream(self._key)
        found, info = together.execute(raise_on_error=False)
        if isinstance(found, redis.RedisError):
            raise found
        if isinstance(info, redis.RedisError):  # the stream does not exist yet
            return 0
        entries = cast(StreamEntries, found)
        self._check(info)
        if len(entries) < BATCH_ROWS:
            self._index = info.get("entries-added")
        elif self._index is not None:
            self._index += len(entries)
        self._take(entries)
        return len(entries)

    def _check(self, info: Mapping[str, object]) -> None:
        if "max-deleted-entry-id" not in info:
            return
        deleted = id_of(cast(bytes, info["max-deleted-entry-id"]))
        if self._last is None:
            self._forgiven = deleted
        elif self._has_lost((self._last >> SEQ_BITS, self._last & SEQ_MAX), deleted, info):
            if self._on_gone == "fail":
                raise explain_gone(f"an entry after {id_text(self._last)}", self._key)
            self._forgiven, self._index = deleted, None

    def _has_lost(self, mine: Id, deleted: Id, info: Mapping[str, object]) -> bool:
        """Whether entries after the last one read no longer exist.

        Trimming removes from the front, and Redis records it only in its count of entries.
        """
        if id_of(cast(bytes, info["last-generated-id"])) <= mine:
            return False
        first = cast("tuple[bytes, Fields] | None", info["first-entry"])
        if first is not None and id_of(first[0]) <= mine:
            return deleted > max(mine, self._forgiven)
        if self._index is not None:
            added = cast(int, info["entries-added"]) - self._index
            return added > cast(int, info["length"])
        return first is None or deleted != mine


class RedisGroupSource(_EntrySource):
    """Entries of a Redis stream read through a consumer group, created if it does not exist.

    An entry is acknowledged (XACK) soon after it is safe in the log. After a reset, delivered
    entries that are safe are acknowledged, and the others are read again first, in order. Several
    sources, each with its own stream and `consumer` (by default its name), share the entries of a
    group. Do not claim entries for them (XCLAIM, XAUTOCLAIM): entries older than the last safe one
    are assumed to be safe, and the consumer they are claimed from may have sent them.
    """

    def __init__(
        self,
        name: str,
        url: str,
        key: str,
        group: str,
        *,
        consumer: str = "",
        on_gone: RedisOnGone = "fail",
    ) -> None:
        super().__init__(name, url, key, on_gone)
        self._group = group
        self._consumer = consumer or name
        self._has_group = False
        self._again: int | None = 0
        """Delivered entries after this one are read again; if `None`, new entries are read."""
        self._open: deque[int] = deque()
        """Entries not acknowledged yet."""
        self._safe = -1

    def handle_reset(self, point_of_ref: int | None) -> None:
        super().handle_reset(point_of_ref)
        self._open.clear()
        self._again = 0
        self._safe = -1 if point_of_ref is None else point_of_ref

    def handle_progress(self, stream: str, point_of_ref: int) -> None:  # noqa: ARG002  its own
        self._safe = point_of_ref

    def handle_close(self) -> None:
        if self._client is not None:
            with contextlib.suppress(redis.RedisError):  # the next start acknowledges them
                self._acknowledge(self._client)
        super().handle_close()

    def _acknowledge(self, client: redis.Redis) -> None:
        while self._open and self._open[0] <= self._safe:
            done = list(takewhile(lambda n: n <= self._safe, islice(self._open, BATCH_ROWS)))
            client.xack(self._key, self._group, *map(id_text, done))
            for _ in done:
                self._open.popleft()

    def _fetch(self, client: redis.Redis) -> int:
        try:
            self._acknowledge(client)
            self._ensure_group(client)
            since = ">" if self._again is None else id_text(self._again)
            found = client.xreadgroup(
                self._group, self._consumer, {self._key: since}, count=BATCH_ROWS
            )
        except (redis.ConnectionError, redis.TimeoutError):
            if self._again is None:  # delivered by Redis, but not received here
                self._again = self._last or 0
            raise
        except redis.ResponseError as error:
            self._has_group = False
            if str(error).startswith("NOGROUP"):
                return 0
            raise
        entries = cast("list[tuple[bytes, StreamEntries]]", found)[0][1] if found else ()
        return self._sort(entries)

    def _sort(self, entries: StreamEntries) -> int:
        is_again = self._again is not None
        if is_again:
            self._again = number_of(entries[-1][0]) if entries else None
        seen = -1 if self._last is None else self._last
        self._open.extend(number_of(text) for text, _ in entries)
        fresh = [(text, fields) for text, fields in entries if number_of(text) > seen]
        lost = [text for text, fields in fresh if not fields]
        if lost and self._on_gone == "fail":
            raise explain_gone(f"entry {lost[0].decode()}", self._key)
        self._take([(text, fields) for text, fields in fresh if fields])
        return BATCH_ROWS if is_again else len(entries)

    def _ensure_group(self, client: redis.Redis) -> None:
        if self._has_group:
            return
        try:
            client.xgroup_create(self._key, self._group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self._has_group = True
