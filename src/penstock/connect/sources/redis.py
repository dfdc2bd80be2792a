"""Redis streams as sources: alone, or through a consumer group.

    RedisStreamSource("orders", "redis://127.0.0.1/0", "orders")

An id of a Redis stream, `ms-seq`, is one number here: `ms << 20 | seq`. A Redis that is away is
asked again, less and less often; the connector lives on meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import Literal, cast
from urllib.parse import urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.connect.source import Item, Source
from penstock.errors import ConnectorError, UsageError
from penstock.patience import Patience

Id = tuple[int, int]
Fields = Mapping[bytes, bytes]
Entries = Sequence[tuple[bytes, Fields]]
OnGone = Literal["fail", "skip"]

HOPELESS = (
    redis.AuthenticationError, redis.exceptions.AuthorizationError,
    redis.exceptions.NoPermissionError,
)  # fmt: skip
HOW = (
    "write redis://HOST:PORT/DATABASE, where the database is a number; in a password, : / @ and % "
    "are written as %3A, %2F, %40 and %25"
)
BATCH_ROWS = 1000
IDLE_S = 0.02
CONNECT_TIMEOUT_S = 2.0
TIMEOUT_S = 5.0
SEQ_BITS = 20
SEQ_MAX = (1 << SEQ_BITS) - 1


def server_of(url: str) -> tuple[str, str]:
    """The host of a Redis, and behind it its port and database.

    Raises `UsageError` for an address that cannot be read. It does not say more: the part that is
    wrong may be the password.
    """
    try:
        found = urlsplit(url)
        host, port, name = found.hostname or "", found.port or 6379, found.path.strip("/") or "0"
    except ValueError:
        raise UsageError(f"the address of Redis cannot be read: {HOW}") from None
    if found.scheme == "unix":
        return "", f"{port}/{name}"
    if found.scheme not in ("redis", "rediss") or not name.isdigit():
        raise UsageError(f"the address of Redis has a part that is none: {HOW}")
    return host, f"{port}/{name}"


def client_of(url: str, timeout_s: float = TIMEOUT_S) -> redis.Redis:
    """A client that connects when it is first used, waits so long at most, and tries once."""
    server_of(url)
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
        self._patience = Patience("Redis", self.tell)

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
        except (redis.ConnectionError, redis.TimeoutError) as error:
            self._patience.failed(error)
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
    group's entries. Do not claim entries for them (XCLAIM, XAUTOCLAIM): those that are older than
    what is safe are taken for safe, and the consumer they are claimed from may have sent them.
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
