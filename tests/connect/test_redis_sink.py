"""Redis as a sink: a real one, killed and started again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.connect.dial import DialOptions, SinkWorker
from penstock.connect.sink import Sink
from penstock.connect.sinks.redis import RedisHashSink, RedisPublishSink
from penstock.connect.wire import Message
from penstock.errors import ConnectorError, UsageError
from penstock.testing.processes import wait_until
from penstock.testing.servers import RedisServer
from tests.connect.hosting import (
    Make,
    hosted,
    refused,
    start_redis,
)

pytestmark = pytest.mark.row("W9", engine="any")


def worker(address: str, attempt: int, timeout_s: float = 60.0) -> SinkWorker:
    return SinkWorker(address, "w", (attempt,), DialOptions(timeout_s=timeout_s))


def row(key: str | None, data: str) -> tuple[bytes | None, int, bytes]:
    return None if key is None else key.encode(), 0, data.encode()


def hashes(server: RedisServer) -> Make:
    return lambda name: RedisHashSink(server.url, name, "h")


def entries(server: RedisServer) -> Make:
    return lambda name: RedisPublishSink(server.url, name, stream="out")


def hash_of(client: redis.Redis, key: str) -> dict[bytes, bytes]:
    found: Any = client.hgetall(key)
    return dict(found)


def out(client: redis.Redis) -> list[str]:
    found: Any = client.xrange("out")
    return [fields[b"data"].decode() for _, fields in found]


def own_keys(client: redis.Redis, what: str = "pending") -> list[bytes]:
    found: Any = client.keys(f"penstock:{what}:*")
    return list(found)


def test_a_stretch_has_a_limit(
    server: RedisServer, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.connect.sinks.redis.STRETCH_BYTES_MAX", 1000)
    told: list[str] = []
    with hosted(entries(server), tmp_path, told) as address, worker(address, 1) as sink:
        sink.send([row(None, "x" * 100)] * 12)
        assert not sink.vote("t1", 0)
        sink.resolve("t1", False)
        assert any("send fewer at a time" in line for line in told), told
        for number in range(5):
            sink.sent = number * 300
            sink.send([row(None, "y" * 100)] * 3)
            assert sink.vote(f"n{number}", number * 300)
            sink.resolve(f"n{number}", True)
    assert out(client) == ["y" * 100] * 15


def test_hashes(server: RedisServer, client: redis.Redis, tmp_path: Path) -> None:
    with hosted(hashes(server), tmp_path) as address, worker(address, 1) as sink:
        sink.send([
            row("ada", '{"name": "Ada", "old": 1}'),
            row("ada", '{"name": "Ada \\u00e9", "n": 7, "x": null, "tags": ["a", 1]}'),
            row("bob", '{"name": "Bob"}'),
        ])  # fmt: skip
        assert sink.vote("t1", 0)
        assert not client.keys("h:*"), "not visible before it is committed"
        sink.resolve("t1", True)
        ada = {b"name": "Ada é".encode(), b"n": b"7", b"tags": b'["a", 1]'}
        assert hash_of(client, "h:ada") == ada
        sink.send([row("bob", '{"name": "Robert"}'), row("cyd", "{}")])
        assert sink.vote("t2", sink.sent - 20)
        sink.resolve("t2", False)
        assert hash_of(client, "h:bob") == {b"name": b"Bob"}
    assert not own_keys(client)


def test_a_transaction_of_nothing_but_deletes(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    """It has no bytes, so it ends where it starts; over several connections, as a query does it."""
    with hosted(hashes(server), tmp_path) as address:
        with worker(address, 1) as sink:
            sink.send([row("ada", '{"n":1}'), row("bob", '{"n":2}')])
            assert sink.vote("t1", 0)
            sink.resolve("t1", True)
        for attempt, (key, commit) in enumerate([("ada", False), ("bob", True)]):
            with worker(address, 10 * attempt + 2) as sink:
                sink.send([row(key, "")])
                assert sink.vote(key, sink.committed)
            with worker(address, 10 * attempt + 3) as sink:
                assert sink.uncommitted == (key,)
                sink.resolve(key, commit)
                sink.resolve(key, commit)
    assert hash_of(client, "h:ada") == {b"n": b"1"}
    assert not client.exists("h:bob")


@pytest.mark.parametrize("commit", [True, False])
def test_a_vote_outlives_the_sink_and_redis(
    server: RedisServer, client: redis.Redis, tmp_path: Path, commit: bool
) -> None:
    rows = [row(None, f"{n}") for n in range(2000)]
    with hosted(entries(server), tmp_path) as address, worker(address, 1) as sink:
        sink.send(rows)
        assert sink.vote("t1", 0)
        sink.send([row(None, "later")])
    server.kill()
    start_redis(server, client)
    with hosted(entries(server), tmp_path) as address, worker(address, 2) as sink:
        assert (sink.committed, sink.uncommitted) == (0, ("t1",))
        assert out(client) == []
        sink.resolve("t1", commit)
    assert out(client) == ([f"{n}" for n in range(2000)] if commit else [])
    with hosted(entries(server), tmp_path) as address, worker(address, 3) as sink:
        sink.send([row(None, "next")])
        assert sink.vote("t2", sink.committed)
        sink.resolve("t2", True)
    assert out(client)[-1:] == ["next"]
    assert not own_keys(client)


def test_a_repeated_commit_changes_nothing(server: RedisServer, client: redis.Redis) -> None:
    def opened(committed: int, kept: int) -> RedisPublishSink:
        made = RedisPublishSink(server.url, "w", stream="out")
        made.open(committed, kept)
        return made

    sink = opened(0, 0)
    sink.append([Message(1, 0, 0, None, b"one"), Message(1, 3, 0, None, b"two")])
    sink.flush()
    sink.append([Message(1, 6, 0, None, b"next")])
    sink.commit(0, 6)
    sink.commit(0, 6)
    sink.close()
    sink = opened(0, 6)  # the host did not get to save it
    sink.commit(0, 6)
    assert out(client) == ["one", "two"]
    with pytest.raises(ConnectorError, match="up to 9 are not in Redis, and 6 are committed"):
        sink.commit(6, 9)
    sink.append([Message(1, 6, 0, None, b"xyz")])
    sink.flush()
    late = opened(6, 6)
    assert not own_keys(client), "what was not voted for is gone"
    late.abort(6)
    late.abort(6)
    with pytest.raises(ConnectorError, match="Redis has 6 bytes of worker w, and 3 were"):
        opened(3, 3)
    for one in (sink, late):
        one.close()


def test_what_is_sent_between_vote_and_outcome_belongs_to_the_next(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    with hosted(entries(server), tmp_path) as address, worker(address, 1) as sink:
        sink.send([row(None, "one")])
        assert sink.vote("t1", 0)
        sink.send([row(None, "two")])
        sink.resolve("t1", True)
        assert sink.vote("t2", 3)
        sink.resolve("t2", True)
    assert out(client) == ["one", "two"]


def test_messages_are_published_when_they_are_committed(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    def make(name: str) -> Sink:
        return RedisPublishSink(server.url, name, channel="c")

    listening: Any = client
    with listening.pubsub(ignore_subscribe_messages=True) as there:
        there.subscribe("c")
        with hosted(make, tmp_path) as address, worker(address, 1) as sink:
            sink.send([row(None, "no")])
            assert sink.vote("t1", 0)
            sink.resolve("t1", False)
        with hosted(make, tmp_path) as address, worker(address, 2) as sink:
            sink.send([row(None, "one"), row(None, "two")])
            assert sink.vote("t2", 0)
            sink.resolve("t2", True)
        heard: list[bytes] = []

        def listen() -> bool:
            message: Any = there.get_message(timeout=0.1)
            heard.extend([message["data"]] if message else [])
            return len(heard) >= 2

        wait_until(listen, 30, "two messages")
    assert heard == [b"one", b"two"]


@pytest.mark.parametrize("data", ["no json", "[1]", '{"a": 1'])
def test_what_cannot_be_applied_is_voted_against(
    server: RedisServer, client: redis.Redis, tmp_path: Path, data: str
) -> None:
    with hosted(hashes(server), tmp_path) as address, worker(address, 1) as sink:
        for n, bad in enumerate([row("k", data), row(None, '{"a": 1}')]):
            sink.send([row("good", '{"a": 1}'), bad])
            assert not sink.vote(f"t{n}", 0)
            sink.resolve(f"t{n}", False)
            sink.sent = 0
    assert not client.keys("h:*")


def test_a_stream_that_is_none_is_refused(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="either a channel or a stream"):
        RedisPublishSink(server.url, "w")
    client.set("out", "x")
    told: list[str] = []
    with hosted(entries(server), tmp_path, told) as address:
        with refused(told, "out is there in Redis, and is no stream"):
            worker(address, 1).__enter__()


def test_a_target_that_became_something_else_keeps_what_was_voted_for(
    server: RedisServer, client: redis.Redis
) -> None:
    """Redis does not undo: nothing is applied, and nothing is forgotten, until it is put right."""
    sink = entries(server)("w")
    sink.open(0, None)
    sink.append([Message(1, 0, 0, None, b"one")])
    sink.flush()
    client.set("out", "x")
    with pytest.raises(UsageError, match="out is there in Redis, and is no stream"):
        sink.commit(0, 3)
    client.delete("out")
    sink.open(0, 3)
    sink.commit(0, 3)
    assert out(client) == ["one"]
    sink.close()


def test_another_redis_is_noticed(server: RedisServer, client: redis.Redis) -> None:
    sink = entries(server)("w")
    sink.open(0, None)
    sink.append([Message(1, 0, 0, None, b"one")])
    sink.flush()
    with pytest.raises(ConnectorError, match="up to 5 are not in Redis, and 0 are committed"):
        sink.commit(0, 5)
    sink.commit(0, 3)
    with pytest.raises(ConnectorError, match="Redis has 3 bytes of worker w, and 5 were"):
        sink.open(5, None)
    client.flushall()
    with pytest.raises(ConnectorError, match="Redis has 0 bytes of worker w, and 3 were"):
        sink.open(3, None)
    sink.close()


def test_redis_is_down(server: RedisServer, client: redis.Redis, tmp_path: Path) -> None:
    told: list[str] = []
    with hosted(entries(server), tmp_path, told) as address:
        with worker(address, 1, 30) as sink:
            sink.send([row(None, "one")])
            server.kill()
            assert not sink.vote("t1", 0), "it cannot be durable"
            with refused(told, "could not abort t1"):
                sink.resolve("t1", False)
        with refused(told, "the target cannot be used"):
            worker(address, 2, 30).__enter__()
        start_redis(server, client)
        with worker(address, 3, 30) as sink:
            assert (sink.committed, sink.uncommitted) == (0, ())
            sink.send([row(None, "one")])
            assert sink.vote("t2", 0)
            server.kill()
            with refused(told, "could not commit t2"):
                sink.resolve("t2", True)
        start_redis(server, client)
        with worker(address, 4, 30) as sink:
            assert sink.uncommitted == ("t2",)
            sink.resolve("t2", True)
    assert out(client) == ["one"]


def test_redis_stands_still(
    server: RedisServer, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and does not answer; later it does what it was told before."""
    monkeypatch.setattr("penstock.connect.sinks.redis.TIMEOUT_S", 1.0)
    process = server._process
    assert process is not None
    with hosted(entries(server), tmp_path) as address:
        with worker(address, 1, 30) as sink:
            sink.send([row(None, "old")])
            process.send_signal(signal.SIGSTOP)
            try:
                assert not sink.vote("t1", 0)
            finally:
                process.send_signal(signal.SIGCONT)
        with worker(address, 2, 30) as sink:
            sink.send([row(None, "new")])
            assert sink.vote("t2", 0)
            sink.resolve("t2", True)
    assert out(client) == ["new"]


def test_a_zombie_cannot_replace_what_was_voted_for(
    server: RedisServer, client: redis.Redis
) -> None:
    zombie, sink = entries(server)("w"), entries(server)("w")
    zombie.open(0, None)
    zombie.append([Message(1, 0, 0, None, b"old")])
    sink.open(0, None)
    sink.append([Message(1, 0, 0, None, b"new")])
    sink.flush()
    with pytest.raises(ConnectorError, match="was opened again by somebody else"):
        zombie.flush()
    sink.commit(0, 3)
    assert out(client) == ["new"]
    zombie.close()
    sink.close()
