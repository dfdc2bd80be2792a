"""Redis as a sink: a real one, killed and started again."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.connect.hosts.earlier import TRANSACTIONS
from penstock.connect.hosts.targets import SinkMessage, SinkTarget
from penstock.connect.protocol.marks import Mark
from penstock.connect.push.worker import DialOptions, SinkWorker
from penstock.connect.sinks.redis import RedisHashSink, RedisPublishSink
from penstock.errors import ConnectorError, DamagedError, SinkGoneError, UsageError
from penstock.testing.processes import wait_until
from penstock.testing.servers import RedisServer
from tests.connect.hosting import (
    Make,
    hosted,
    refused,
    start_redis,
    wait_applied,
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


@pytest.mark.parametrize("data", ["one", ""])
def test_a_large_transaction_is_applied_in_steps(
    server: RedisServer, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    data: str,
) -> None:  # fmt: skip
    """Redis serves nobody else during one; each step moves the mark."""
    monkeypatch.setattr(RedisPublishSink, "page_bytes", 10)
    with hosted(entries(server), tmp_path) as address, worker(address, 1) as sink:
        sink.send([row(None, data)] * 12)
        assert sink.vote("t1", 0)
        sink.resolve("t1", True)
        wait_applied(sink)
    assert out(client) == [data] * 12
    assert client.get("penstock:committed:out:w") == f"{12 * len(data)}.12".encode()


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
        wait_applied(sink)
        ada = {b"name": "Ada é".encode(), b"n": b"7", b"tags": b'["a", 1]'}
        assert hash_of(client, "h:ada") == ada
        sink.send([row("bob", '{"name": "Robert"}'), row("cyd", "{}")])
        assert sink.vote("t2", sink.sent - 20)
        sink.resolve("t2", False)
        assert hash_of(client, "h:bob") == {b"name": b"Bob"}


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
                wait_applied(sink)
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
        wait_applied(sink)
    assert out(client) == ([f"{n}" for n in range(2000)] if commit else [])
    with hosted(entries(server), tmp_path) as address, worker(address, 3) as sink:
        sink.send([row(None, "next")])
        assert sink.vote("t2", sink.committed)
        sink.resolve("t2", True)
        wait_applied(sink)
    assert out(client)[-1:] == ["next"]


def test_an_earlier_versions_record_carries_over(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    """It counted bytes alone, in Redis and in its folder."""
    client.set("penstock:committed:out:w", 3)
    client.set("penstock:opened:out:w", 9)
    client.xadd("out", {"data": "one"})
    line = (
        b'{"worker":"w","standing":{"committed":{"1":3},"pending":null,"resolved":["t1",true],'
        b'"attempt":[1]}}\n'
    )
    (tmp_path / TRANSACTIONS).write_bytes(line)
    with hosted(entries(server), tmp_path) as address:
        with pytest.raises(ConnectorError, match="attempt 0 of worker w is older than 1"):
            worker(address, 0).__enter__()
        with worker(address, 2) as sink:
            assert sink.committed == 3
            sink.send([row(None, "two")])
            assert sink.vote("t2", 3)
            sink.resolve("t2", True)
            wait_applied(sink)
    assert out(client) == ["one", "two"]
    assert client.get("penstock:committed:out:w") == b"6.1"
    assert not client.exists("penstock:opened:out:w")
    assert not (tmp_path / TRANSACTIONS).exists(), "an earlier version must not go on with it"


def test_an_earlier_versions_vote_is_not_guessed_at(server: RedisServer, tmp_path: Path) -> None:
    for vote in (
        '{"transaction":"t2","start":3,"end":6}',
        '{"transaction":"t2","stretches":[[1,3,6]]}',
    ):
        committed = "3" if "start" in vote else '{"1":3}'
        line = f'{{"worker":"w","standing":{{"committed":{committed},"pending":{vote}}}}}\n'
        (tmp_path / TRANSACTIONS).write_text(line)
        with pytest.raises(UsageError, match=r"awaits the outcome of t2.*run the earlier"):
            with hosted(entries(server), tmp_path):
                pass
    (tmp_path / TRANSACTIONS).write_bytes(b'__import__("os")\n')
    with pytest.raises(DamagedError, match="line 1 is damaged"), hosted(entries(server), tmp_path):
        pass


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
        wait_applied(sink)
    assert out(client) == ["one", "two"]


def test_messages_are_published_when_they_are_committed(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    def make(name: str) -> SinkTarget:
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
            wait_applied(sink)
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
    with pytest.raises(UsageError, match="specify either a channel or a stream"):
        RedisPublishSink(server.url, "w")
    client.set("out", "x")
    told: list[str] = []
    with hosted(entries(server), tmp_path, told) as address:
        with refused(told, "key out in Redis is not a stream"):
            worker(address, 1).__enter__()


def test_a_target_that_became_something_else_keeps_what_was_decided(
    server: RedisServer, client: redis.Redis
) -> None:
    """Redis does not undo: nothing is applied, and the mark stays, until it is put right."""
    sink = entries(server)("w")
    assert sink.applied() == Mark()
    client.set("out", "x")
    with pytest.raises(UsageError, match="key out in Redis is not a stream"):
        sink.apply([SinkMessage(None, 0, b"one")], Mark(), Mark(3, 1))
    client.delete("out")
    assert sink.applied() == Mark()
    sink.apply([SinkMessage(None, 0, b"one")], Mark(), Mark(3, 1))
    assert out(client) == ["one"]
    sink.close()


def test_redis_is_down(server: RedisServer, client: redis.Redis, tmp_path: Path) -> None:
    """Votes and outcomes do not need it; what is decided is applied when it is back."""
    told: list[str] = []
    with hosted(entries(server), tmp_path, told) as address:
        with worker(address, 1, 30) as sink:
            sink.send([row(None, "one")])
            server.kill()
            assert sink.vote("t1", 0)
            sink.resolve("t1", True)
            wait_until(
                lambda: any("not available" in line for line in told), 30, "its being noticed"
            )
            with refused(told, "the target cannot be used"):
                SinkWorker(address, "other", (1,), DialOptions(timeout_s=30)).__enter__()
            start_redis(server, client)
            wait_applied(sink)
    assert out(client) == ["one"]


def test_redis_stands_still(
    server: RedisServer, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and does not answer; later it does what it was told before."""
    monkeypatch.setattr("penstock.connect.sinks.redis.TIMEOUT_S", 1.0)
    process = server._process
    assert process is not None
    told: list[str] = []
    with hosted(entries(server), tmp_path, told) as address, worker(address, 1, 30) as sink:
        sink.send([row(None, "one")])
        process.send_signal(signal.SIGSTOP)
        try:
            assert sink.vote("t1", 0)
            sink.resolve("t1", True)
            wait_until(
                lambda: any("not available" in line for line in told), 30, "its being noticed"
            )
        finally:
            process.send_signal(signal.SIGCONT)
        wait_applied(sink)
        sink.send([row(None, "two")])
        assert sink.vote("t2", 3)
        sink.resolve("t2", True)
        wait_applied(sink)
    assert out(client) == ["one", "two"]


def test_another_redis_is_gone_on_from(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    """It was restored from an older copy, or is another: the worker hears what it has."""
    told: list[str] = []
    with hosted(entries(server), tmp_path) as address, worker(address, 1) as sink:
        sink.send([row(None, "one")])
        assert sink.vote("t1", 0)
        sink.resolve("t1", True)
        wait_applied(sink)
    client.flushall()
    with hosted(entries(server), tmp_path, told) as address:
        with worker(address, 2) as sink, contextlib.suppress(SinkGoneError):
            wait_until(lambda: sink.ask() is None, 30, "its being sent away")
        assert any("is at 0.0, but the spool has 3.1 to 3.1" in line for line in told)
        with worker(address, 3) as sink:
            assert sink.committed == 0
