"""What is in Redis as a source: a stream, a stream through a consumer group, or a channel.

    RedisStreamSource("orders", "redis://127.0.0.1/0", "orders")

An id of a Redis stream, `ms-seq`, is one number here: `ms << 20 | seq`. A Redis that is away is
asked again, less and less often; the connector lives on meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import Literal, cast

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.connect.source import Item, Source
from penstock.errors import ConnectorError

Id = tuple[int, int]
Fields = Mapping[bytes, bytes]
Entries = Sequence[tuple[bytes, Fields]]
OnGone = Literal["fail", "skip"]

HOPELESS = (redis.AuthenticationError, redis.exceptions.AuthorizationError)
BATCH_ROWS = 1000
IDLE_S = 0.02
BACKOFF_S = 0.05
BACKOFF_S_MAX = 5.0
CONNECT_TIMEOUT_S = 2.0
TIMEOUT_S = 5.0
TICK_S = 0.2
SEQ_BITS = 20
SEQ_MAX = (1 << SEQ_BITS) - 1
BUFFER_BYTES_MAX = 32 << 20
MESSAGE_BYTES = 200
"""About what a waiting message takes beside its data."""


def client_of(url: str, timeout_s: float = TIMEOUT_S) -> redis.Redis:
    """A client that connects when it is first used, waits so long at most, and tries once."""
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_connect_timeout=min(CONNECT_TIMEOUT_S, timeout_s),
        socket_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=30,
    )


def id_of(text: bytes) -> Id:
    ms, _, seq = text.partition(b"-")
    return int(ms), int(seq)


def number_of(text: bytes) -> int:
    """The number of an entry. Raises `ConnectorError` for an id that does not fit into one."""
    ms, seq = id_of(text)
    if ms >= 1 << 64 - SEQ_BITS or seq > SEQ_MAX:
        raise ConnectorError(
            f"the id {text.decode()} does not fit into a number: its time has {64 - SEQ_BITS} bits "
            f"at most and its counter {SEQ_BITS}; let Redis choose the ids (XADD key *)"
        )
    return ms << SEQ_BITS | seq


def id_text(number: int | None) -> str:
    return "0-0" if number is None else f"{number >> SEQ_BITS}-{number & SEQ_MAX}"


def data_of(fields: Fields) -> bytes:
    """The field `data` where there is no other, else all as a JSON object of texts.

    Bytes that are no UTF-8 are written as `\\xNN` in those texts.
    """
    if len(fields) == 1 and b"data" in fields:
        return fields[b"data"]
    return msgspec.json.encode({_text(name): _text(value) for name, value in fields.items()})


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")


def gone(what: str, key: str) -> ConnectorError:
    return ConnectorError(
        f'{what} of {key} is gone from Redis, and was not read; on_gone="skip" goes on without it'
    )


class Patience:
    """When a server may be asked again: soon if all is well, later each time it is away."""

    def __init__(self) -> None:
        self._wait_s = BACKOFF_S
        self._at = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._at

    def answered(self, pause_s: float) -> None:
        self._wait_s = BACKOFF_S
        self._at = time.monotonic() + pause_s

    def failed(self) -> float:
        """How long to wait now."""
        wait_s, self._wait_s = self._wait_s, min(self._wait_s * 2, BACKOFF_S_MAX)
        self._at = time.monotonic() + wait_s
        return wait_s


class _EntrySource(Source):
    """What both ways to read a Redis stream share: batches, pauses, and a Redis that is away."""

    def __init__(self, name: str, url: str, key: str, on_gone: OnGone) -> None:
        super().__init__(name)
        self._url = url
        self._key = key
        self._on_gone = on_gone
        self._client: redis.Redis | None = None
        self._ready: deque[Item] = deque()
        self._last: int | None = None
        """The last entry that came from Redis."""
        self._patience = Patience()

    def handle_open(self) -> None:
        self._client = client_of(self._url)

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
        """Add to what is ready; how many entries came."""
        raise NotImplementedError

    def _ask(self) -> None:
        assert self._client is not None  # noqa: S101  handle_open comes first
        try:
            found = self._fetch(self._client)
        except HOPELESS:
            raise
        except (redis.ConnectionError, redis.TimeoutError):
            self._patience.failed()
        else:
            self._patience.answered(0.0 if found == BATCH_ROWS else IDLE_S)

    def _take(self, entries: Entries) -> None:
        for text, fields in entries:
            self._last = number_of(text)
            self._ready.append(Item(data_of(fields), self._last))


class RedisStreamSource(_EntrySource):
    """Every entry of a Redis stream once, in order; nothing is changed in Redis.

    Fails if entries were trimmed or deleted before they were read, as far as Redis tells (from
    version 7 on), unless `on_gone` is "skip". It fails too where it cannot know: if the last
    entry it has read was trimmed while it did not run. At the beginning it reads what is there.
    """

    def __init__(self, name: str, url: str, key: str, *, on_gone: OnGone = "fail") -> None:
        super().__init__(name, url, key, on_gone)
        self._index: int | None = None
        """How many entries had been added up to the last that was read, where that is known."""
        self._forgiven: Id = (0, 0)
        """Entries up to this one may be gone."""

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
        if isinstance(info, redis.RedisError):  # there is no such stream yet
            return 0
        entries = cast(Entries, found)
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
                raise gone(f"an entry behind {id_text(self._last)}", self._key)
            self._forgiven, self._index = deleted, None

    def _has_lost(self, mine: Id, deleted: Id, info: Mapping[str, object]) -> bool:
        """Whether entries behind the last one are not there any more.

        Trimming takes from the front, and Redis remembers it only by the number of entries.
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
    """Entries of a Redis stream through a consumer group, which is made if it is not there.

    An entry is acknowledged (XACK) soon after it is safe in the log. After a reset, delivered
    entries that are safe are acknowledged, and the others come again first, in order. Several
    sources, each with a stream and a `consumer` of its own (its name, if none is given), share a
    group's entries; entries that somebody claims from another consumer may come twice.
    """

    def __init__(
        self,
        name: str,
        url: str,
        key: str,
        group: str,
        *,
        consumer: str = "",
        on_gone: OnGone = "fail",
    ) -> None:
        super().__init__(name, url, key, on_gone)
        self._group = group
        self._consumer = consumer or name
        self._has_group = False
        self._again: int | None = 0
        """Delivered entries behind this one are asked for again; `None`: new ones are."""
        self._open: deque[int] = deque()
        """Entries that are not acknowledged."""
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
            if self._again is None:  # what Redis has delivered and did not get here
                self._again = self._last or 0
            raise
        except redis.ResponseError as error:
            self._has_group = False
            if str(error).startswith("NOGROUP"):
                return 0
            raise
        entries = cast("list[tuple[bytes, Entries]]", found)[0][1] if found else ()
        return self._sort(entries)

    def _sort(self, entries: Entries) -> int:
        is_again = self._again is not None
        if is_again:
            self._again = number_of(entries[-1][0]) if entries else None
        seen = -1 if self._last is None else self._last
        self._open.extend(number_of(text) for text, _ in entries)
        fresh = [(text, fields) for text, fields in entries if number_of(text) > seen]
        lost = [text for text, fields in fresh if not fields]
        if lost and self._on_gone == "fail":
            raise gone(f"the entry {lost[0].decode()}", self._key)
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


class RedisSubscribeSource(Source):
    """Messages of Redis channels, at most once.

    Redis keeps no message: what is published while nobody listens is lost, which may have
    happened between any two of `connections`. What arrives waits in memory until it is safe in
    the log; past `buffer_bytes_max` the oldest that was not sent is lost, and counted in
    `dropped`. What waits is lost with the process.
    """

    def __init__(
        self, name: str, url: str, *channels: str, buffer_bytes_max: int = BUFFER_BYTES_MAX
    ) -> None:
        super().__init__(name)
        self._url = url
        self._channels = channels
        self._room = buffer_bytes_max
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._sent: deque[Item] = deque()
        self._next = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, name=f"redis-{name}", daemon=True)
        self._failure: redis.RedisError | None = None
        self.dropped = 0
        self.connections = 0

    def handle_open(self) -> None:
        self._thread.start()

    def handle_close(self) -> None:
        self._stopping.set()
        self._thread.join(CONNECT_TIMEOUT_S + TIMEOUT_S)

    def handle_reset(self, point_of_ref: int | None) -> None:
        with self._lock:
            self._forget(point_of_ref)
            self._waiting.extendleft(item.data for item in reversed(self._sent))
            self._sent.clear()
        self._next = 0 if point_of_ref is None else point_of_ref + 1

    def handle_next(self) -> Item | None:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            if not self._waiting:
                return None
            item = Item(self._waiting.popleft(), self._next)
            self._sent.append(item)
        self._next += 1
        return item

    def handle_progress(self, stream: str, point_of_ref: int) -> None:  # noqa: ARG002  its own
        with self._lock:
            self._forget(point_of_ref)

    def _forget(self, point_of_ref: int | None) -> None:
        while point_of_ref is not None and self._sent and self._sent[0][1] <= point_of_ref:
            self._room += len(self._sent.popleft().data) + MESSAGE_BYTES

    def _listen(self) -> None:
        patience = Patience()
        while not self._stopping.is_set():
            try:
                with client_of(self._url) as client, client.pubsub() as there:
                    there.subscribe(*self._channels)
                    while not self._stopping.is_set():
                        self._heard(there.get_message(timeout=TICK_S))
                        patience.answered(0.0)
            except HOPELESS as error:
                self._failure = error
                return
            except (redis.ConnectionError, redis.TimeoutError):
                self._stopping.wait(patience.failed())
            except redis.RedisError as error:
                self._failure = error
                return

    def _heard(self, message: Mapping[str, object] | None) -> None:
        if message is None:
            return
        if message["type"] == "subscribe":
            self.connections += 1
        elif message["type"] == "message":
            data = cast(bytes, message["data"])
            with self._lock:
                self._waiting.append(data)
                self._room -= len(data) + MESSAGE_BYTES
                while self._room < 0 and self._waiting:
                    self._room += len(self._waiting.popleft()) + MESSAGE_BYTES
                    self.dropped += 1
