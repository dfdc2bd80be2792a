"""Sinks into Redis: a hash for each key, messages of a channel, or entries of a stream.

A stretch waits in one list while it is voted for, and is applied in one MULTI/EXEC together with
the record that it was. Everything is as durable as that Redis is: with `appendfsync always`, it
is. One Redis, not a cluster: what changes together lies in several keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import redis
from redis.client import Pipeline

from penstock.connect.sources.redis import HOPELESS, client_of
from penstock.connect.wire import Message
from penstock.errors import ConnectorError, UsageError

TIMEOUT_S = 20.0
PUSH_ROWS = 500
STRETCH_BYTES_MAX = 256 << 20
"""What Redis is given in one step, during which nobody else is served."""
Row = tuple[bytes | None, bytes | dict[str, bytes] | None]


class _RedisSink:
    """What is the same for every target in Redis: the stretch that waits, and the records.

    `open` counts up, and whatever an earlier connection still has under way fails by that.
    """

    def __init__(self, url: str, worker: str, target: str) -> None:
        self._url = url
        self._worker = worker
        self._own = f"{target}:{worker}"
        self._committed = f"penstock:committed:{self._own}"
        self._waiting = f"penstock:waiting:{self._own}"
        self._opened = f"penstock:opened:{self._own}"
        self._times = 0
        self._client: redis.Redis | None = None
        self._rows: list[bytes] = []
        self._held_bytes = 0
        self._at = 0

    # What a target does

    def _row(self, message: Message) -> Row:
        """What is kept of a message; raises `UsageError` for one that cannot be applied."""
        raise NotImplementedError

    def _check(self, client: redis.Redis) -> None:
        """Raises if the target would refuse what is applied: MULTI does not undo."""

    def _apply(self, together: Pipeline, rows: Sequence[Row]) -> None:
        raise NotImplementedError

    # The protocol

    def check(self) -> None:
        """Raises `UsageError` if this Redis cannot be used as it is, its own if it is away."""
        with client_of(self._url, TIMEOUT_S) as client, let_in():
            client.ping()
            self._check(client)

    def open(self, committed: int, kept: int | None) -> None:
        """Raises `ConnectorError` if this Redis has committed neither the one nor the other."""
        self.close()
        self._client = client_of(self._url, TIMEOUT_S)
        with let_in():
            self._check(self._client)
            self._open(self._client, committed, kept)

    def _open(self, client: redis.Redis, committed: int, kept: int | None) -> None:
        self._begin(committed if kept is None else kept)
        with client.pipeline() as together:
            watch(together, self._opened, self._waiting, self._committed)
            done, end = self._done(together), self._end(together)
            if done not in (committed, kept):
                raise ConnectorError(
                    f"Redis has {done} bytes of worker {self._worker}, and {committed} were "
                    "committed: it is another Redis, or it has lost some"
                )
            together.multi()
            together.incr(self._opened)
            if kept is None or (end is not None and end > kept):
                self._forget(together, end)
            self._times = int(together.execute()[0])

    def append(self, messages: Sequence[Message]) -> None:
        rows = [msgspec.msgpack.encode(self._row(message)) for message in messages]
        self._held_bytes += sum(map(len, rows))
        if self._held_bytes > STRETCH_BYTES_MAX:
            raise UsageError(
                f"the messages of one transaction take more than {STRETCH_BYTES_MAX:,} bytes, and "
                "Redis takes all of them in one step: send fewer at a time (the app's "
                "--batch-rows), or use more workers"
            )
        self._rows += rows
        self._at += sum(len(message.payload) for message in messages)

    def flush(self) -> None:
        with self._guarded() as together:
            end = self._end(together)
            together.multi()
            self._forget(together, end)
            for first in range(0, len(self._rows), PUSH_ROWS):
                together.rpush(self._list(self._at), *self._rows[first : first + PUSH_ROWS])
            together.set(self._waiting, self._at)
            together.execute()
        self._begin(self._at)

    def commit(self, start: int, end: int) -> None:  # noqa: ARG002  the end says it all
        """Applied once: the list goes in the same transaction, and without it nothing is done.

        A stretch of messages without data is no longer than none: that it was recorded before
        does not say that it was applied.
        """
        with self._guarded() as together:
            watch(together, self._list(end), self._waiting)
            done, waiting = self._done(together), self._end(together)
            if waiting != end:
                if done < end:
                    raise ConnectorError(
                        f"the bytes of worker {self._worker} up to {end} are not in Redis, and "
                        f"{done} are committed: it has lost some"
                    )
                return
            packed = cast("list[bytes]", together.lrange(self._list(end), 0, -1))
            self._check(together)
            together.multi()
            self._apply(together, [msgspec.msgpack.decode(row, type=Row) for row in packed])
            self._forget(together, end)
            together.set(self._committed, end)
            together.execute()

    def abort(self, start: int) -> None:
        with self._guarded() as together:
            end = self._end(together)
            together.multi()
            self._forget(together, end)
            together.execute()
        self._begin(start)

    def _begin(self, at: int) -> None:
        self._rows, self._held_bytes, self._at = [], 0, at

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    # Keys

    def _guarded(self) -> Pipeline:
        """A transaction that fails if the worker was, or is meanwhile, opened again."""
        assert self._client is not None  # noqa: S101  open comes first
        together = self._client.pipeline()
        watch(together, self._opened)
        if int(cast("bytes | None", together.get(self._opened)) or 0) != self._times:
            raise ConnectorError(f"worker {self._worker} was opened again by somebody else")
        return together

    def _list(self, end: int) -> str:
        return f"penstock:pending:{self._own}:{end}"

    def _done(self, together: Pipeline) -> int:
        return int(cast("bytes | None", together.get(self._committed)) or 0)

    def _end(self, together: Pipeline) -> int | None:
        """Where the stretch that waits ends, if there is one: there is one at most."""
        found = cast("bytes | None", together.get(self._waiting))
        return None if found is None else int(found)

    def _forget(self, together: Pipeline, end: int | None) -> None:
        if end is not None:
            together.delete(self._list(end), self._waiting)


class RedisHashSink(_RedisSink):
    """A hash `prefix:KEY` for each key, with the fields of its latest message; none if that is
    empty.

    A message is a JSON object and has a key. A text is stored as it is and everything else as
    JSON; a null is left out, and a hash without fields is not there.
    """

    def __init__(self, url: str, worker: str, prefix: str) -> None:
        super().__init__(url, worker, prefix)
        self._prefix = prefix.encode()

    def _row(self, message: Message) -> Row:
        if message.key is None:
            raise UsageError("a message without a key: it names the hash")
        return message.key, fields_of(message.payload) if message.payload else None

    def _apply(self, together: Pipeline, rows: Sequence[Row]) -> None:
        latest = {key or b"": fields for key, fields in rows}
        for key, fields in latest.items():
            name = self._prefix + b":" + key
            together.delete(name)
            if fields:
                together.hset(name, mapping=cast("Mapping[Any, Any]", fields))


class RedisPublishSink(_RedisSink):
    """The data of each message, published to a channel or added to a stream, once and in order.

    Subscribers hear a message when it is committed, and only those that listen then. An entry of
    the stream has the single field `data`; past `entries_max` the oldest are trimmed.
    """

    def __init__(
        self,
        url: str,
        worker: str,
        *,
        channel: str = "",
        stream: str = "",
        entries_max: int | None = None,
    ) -> None:
        super().__init__(url, worker, channel or stream)
        if bool(channel) == bool(stream):
            raise UsageError("either a channel or a stream")
        self._channel = channel
        self._stream = stream
        self._entries_max = entries_max

    def _row(self, message: Message) -> Row:
        return None, message.payload

    def _check(self, client: redis.Redis) -> None:
        if self._stream and client.type(self._stream) not in (b"stream", b"none"):
            raise UsageError(f"{self._stream} is there in Redis, and is no stream")

    def _apply(self, together: Pipeline, rows: Sequence[Row]) -> None:
        for _, data in rows:
            if self._stream:
                together.xadd(self._stream, {"data": cast(bytes, data)}, maxlen=self._entries_max)
            else:
                together.publish(self._channel, cast(bytes, data))


@contextmanager
def let_in() -> Iterator[None]:
    """What is done inside fails with `UsageError` where Redis does not let it."""
    try:
        yield
    except HOPELESS as error:
        raise UsageError(f"Redis refuses the connection: {error}") from error


def watch(together: Pipeline, *keys: str) -> None:
    together.watch(*keys)


def fields_of(payload: bytes) -> dict[str, bytes]:
    """The fields of a JSON object as Redis stores them."""
    try:
        found = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise UsageError(f"a message that is no JSON object: {error}") from error
    return {name: _value(bytes(raw)) for name, raw in found.items() if bytes(raw) != b"null"}


def _value(raw: bytes) -> bytes:
    return msgspec.json.decode(raw, type=str).encode() if raw.startswith(b'"') else raw
