"""Sinks into Redis: a hash for each key, messages on a channel, or entries of a stream.

Messages are applied in one MULTI/EXEC together with the mark, which is watched. Everything is only
as durable as that Redis is: fully so with `appendfsync always`. A single Redis, not a cluster:
several keys change together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import redis
from redis.client import Pipeline

from penstock.connect.hosts.targets import SinkMessage, SinkTarget, check_mark
from penstock.connect.protocol.marks import Mark
from penstock.connect.systems.redis import make_client, refuse_hopeless
from penstock.errors import MarkMovedError, UsageError

TIMEOUT_S = 20.0
STEP_BYTES = 64 << 20
"""Bytes sent to Redis in one step, during which it serves nobody else."""


class _RedisSink(SinkTarget):
    """What all targets in Redis share: the mark, moved together with the data."""

    page_bytes = STEP_BYTES

    def __init__(self, url: str, worker: str, target: str) -> None:
        self._url = url
        own = f"{target}:{worker}"
        self._mark = f"penstock:committed:{own}"
        self._earlier = f"penstock:waiting:{own}", f"penstock:opened:{own}"
        self._client: redis.Redis | None = None

    # What a target does

    def _check_target(self, client: redis.Redis) -> None:
        """Raise if the target would refuse the commands: MULTI does not roll back."""

    def _add(self, together: Pipeline, messages: Iterable[SinkMessage]) -> None:
        raise NotImplementedError

    # What they have in common

    def check_server(self) -> None:
        """Raise `UsageError` if this Redis is unusable, its client's error if it is unavailable."""
        with make_client(self._url, TIMEOUT_S) as client, refuse_hopeless():
            client.ping()
            self._check_target(client)

    def applied(self) -> Mark:
        client = self._open()
        with refuse_hopeless():
            self._check_target(client)
            client.delete(*self._earlier)
            return _read_mark(client, self._mark)

    def apply(self, messages: Iterable[SinkMessage], after: Mark, mark: Mark) -> None:
        client = self._open()
        with refuse_hopeless(), client.pipeline() as together:
            together.watch(self._mark)
            check_mark(_read_mark(together, self._mark), after)
            self._check_target(together)
            together.multi()
            self._add(together, messages)
            together.set(self._mark, str(mark))
            try:
                together.execute()
            except redis.WatchError as error:
                raise MarkMovedError(f"{self._mark} was changed by another process") from error

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _open(self) -> redis.Redis:
        if self._client is None:
            self._client = make_client(self._url, TIMEOUT_S)
        return self._client


class RedisHashSink(_RedisSink):
    """A hash `prefix:KEY` for each key, with the fields of its latest message; no hash if that is
    empty.

    A message must be a JSON object and have a key. Strings are stored unchanged and all other
    values as JSON; nulls are left out, and a hash without fields does not exist.
    """

    def __init__(self, url: str, worker: str, prefix: str) -> None:
        super().__init__(url, worker, prefix)
        self._prefix = prefix.encode()

    def check(self, messages: Sequence[SinkMessage]) -> None:
        for message in messages:
            if message.key is None:
                raise ValueError("the message has no key, which is needed to name the hash")
            if message.data:
                parse_fields(message.data)

    def _add(self, together: Pipeline, messages: Iterable[SinkMessage]) -> None:
        latest = {message.key or b"": message.data for message in messages}
        for key, data in latest.items():
            name = self._prefix + b":" + key
            together.delete(name)
            fields = parse_fields(data) if data else {}
            if fields:
                together.hset(name, mapping=cast("Mapping[Any, Any]", fields))


class RedisPublishSink(_RedisSink):
    """Publishes each message's data to a channel or adds it to a stream, once and in order.

    A message reaches only those who are subscribed when it is applied. An entry of the stream has
    the single field `data`; beyond `entries_max` entries the oldest are trimmed.
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
            raise UsageError("specify either a channel or a stream")
        self._channel = channel
        self._stream = stream
        self._entries_max = entries_max

    def _check_target(self, client: redis.Redis) -> None:
        if self._stream and client.type(self._stream) not in (b"stream", b"none"):
            raise UsageError(f"key {self._stream} in Redis is not a stream")

    def _add(self, together: Pipeline, messages: Iterable[SinkMessage]) -> None:
        for message in messages:
            if self._stream:
                together.xadd(self._stream, {"data": message.data}, maxlen=self._entries_max)
            else:
                together.publish(self._channel, message.data)


def _read_mark(client: redis.Redis, key: str) -> Mark:
    found = cast("bytes | None", client.get(key))
    return Mark() if found is None else Mark.parse(found.decode())


def parse_fields(data: bytes) -> dict[str, bytes]:
    """The fields of a JSON object as Redis stores them."""
    try:
        found = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ValueError(f"the message is not a JSON object: {error}") from error
    return {name: _parse_value(bytes(raw)) for name, raw in found.items() if bytes(raw) != b"null"}


def _parse_value(raw: bytes) -> bytes:
    return msgspec.json.decode(raw, type=str).encode() if raw.startswith(b'"') else raw
