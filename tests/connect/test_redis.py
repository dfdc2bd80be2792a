"""Redis as a source and as a sink: a real one, killed and started again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.connect.dial import DialOptions, SinkWorker
from penstock.connect.sink import Sink
from penstock.connect.sinks.redis import RedisHashSink, RedisPublishSink
from penstock.connect.source import Item, Source
from penstock.connect.sources.redis import (
    RedisGroupSource,
    RedisStreamSource,
    RedisSubscribeSource,
    number_of,
)
from penstock.connect.wire import Message
from penstock.errors import ConnectorError, UsageError
from penstock.testing.processes import wait_until
from penstock.testing.servers import RedisServer
from tests.connect.hosting import Make, hosted, refused, running, stored, texts

pytestmark = pytest.mark.row("W9", engine="any")


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as found:
        yield found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("raw", content="bytes"))])
        yield opened


def start(server: RedisServer, client: redis.Redis) -> None:
    """Until it has loaded what it had."""
    server.start()

    def is_up() -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    wait_until(is_up, 30, "Redis")


def add(client: redis.Redis, numbers: Sequence[int], key: str = "s") -> None:
    with client.pipeline(transaction=False) as together:
        for n in numbers:
            together.xadd(key, {"data": f"{n}"})
        together.execute()


def numbered(numbers: Sequence[int]) -> list[str]:
    return [f"{n}" for n in numbers]


def come(log: Log, count: int) -> None:
    wait_until(lambda: stored(log) >= count, 60, f"{count} messages")


# Streams


def stream(server: RedisServer, **options: Any) -> RedisStreamSource:
    return RedisStreamSource("a", server.url, "s", **options)


def group(server: RedisServer, **options: Any) -> RedisGroupSource:
    return RedisGroupSource("a", server.url, "s", "g", **options)


def unacknowledged(client: redis.Redis) -> int:
    found: Any = client.xpending("s", "g")
    return int(found["pending"])


@pytest.mark.parametrize("make", [stream, group])
def test_a_stream_goes_on_where_the_log_has_it(
    make: Callable[[RedisServer], Source], server: RedisServer, client: redis.Redis, log: Log
) -> None:
    with running(log, make(server)):  # begins before there is a stream
        add(client, range(2500))
        come(log, 2500)
    add(client, range(2500, 2600))
    for until in (2600, 2700):
        with running(log, make(server)):
            come(log, until)
            add(client, range(until, until + 100))
            come(log, until + 100)
    assert texts(log) == numbered(range(2800))


@pytest.mark.parametrize("make", [stream, group])
def test_redis_is_killed_in_the_middle(
    make: Callable[[RedisServer], Source], server: RedisServer, client: redis.Redis, log: Log
) -> None:
    with running(log, make(server)) as connector:
        for n in range(3):
            add(client, range(n * 5000, (n + 1) * 5000))
            come(log, n * 5000 + 1)
            server.kill()
            connector.check()
            start(server, client)
        come(log, 15_000)
        assert connector.counts.connections == 1, "the connector never noticed"
    assert texts(log) == numbered(range(15_000))


def test_fields_are_a_json_object(server: RedisServer, client: redis.Redis, log: Log) -> None:
    client.xadd("s", {"data": b"\xff\x00"})
    client.xadd("s", {"user": "ada", "n": 1, "raw": b"\xff"})
    client.xadd("s", {"data": "x", "more": "y"})
    with running(log, stream(server)):
        come(log, 3)
    events: list[Any] = list(read_events(log, "raw"))
    assert [event.data for event in events] == [
        b"\xff\x00",
        rb'{"user":"ada","n":"1","raw":"\\xff"}',
        b'{"data":"x","more":"y"}',
    ]


@pytest.mark.parametrize("how", ["trimmed", "all trimmed", "deleted"])
def test_entries_that_are_gone_are_told(
    how: str, server: RedisServer, client: redis.Redis, log: Log
) -> None:
    add(client, range(10))
    with running(log, stream(server)):
        come(log, 10)
    add(client, range(10, 20))
    found: Any = client.xrange("s")
    match how:
        case "trimmed":
            client.xtrim("s", maxlen=5, approximate=False)
        case "all trimmed":
            client.xtrim("s", maxlen=0, approximate=False)
        case "deleted":
            client.xdel("s", found[14][0])
    with pytest.raises(
        ConnectorError, match=f"an entry behind {found[9][0].decode()} of s is gone"
    ):
        with running(log, stream(server)) as connector:
            connector.finish(30)
    with running(log, stream(server, on_gone="skip")):
        add(client, [20])
        wait_until(lambda: "20" in texts(log), 30, "the rest")
    left = {
        "trimmed": range(15, 20),
        "all trimmed": (),
        "deleted": (*range(10, 14), *range(15, 20)),
    }
    assert texts(log) == numbered([*range(10), *left[how], 20])


def test_what_was_read_may_go(server: RedisServer, client: redis.Redis, log: Log) -> None:
    """Trimming and deleting behind the reader, also everything, is no loss."""
    add(client, range(100))
    with running(log, stream(server)):
        come(log, 100)
        client.xtrim("s", maxlen=0, approximate=False)
        add(client, range(100, 110))
        come(log, 110)
        found: Any = client.xrange("s")
        client.xdel("s", *(text for text, _ in found))
    with running(log, stream(server)):
        add(client, range(110, 120))
        come(log, 120)
    assert texts(log) == numbered(range(120))


def test_what_was_deleted_before_the_beginning_is_no_loss(
    server: RedisServer, client: redis.Redis, log: Log
) -> None:
    add(client, range(3000))
    found: Any = client.xrange("s")
    client.xdel("s", found[2000][0])
    with running(log, stream(server)):
        come(log, 2999)
    assert texts(log) == numbered([n for n in range(3000) if n != 2000])


def test_an_id_that_is_no_number(server: RedisServer, client: redis.Redis, log: Log) -> None:
    assert number_of(b"1-5") == (1 << 20) + 5
    client.xadd("s", {"data": "x"}, id=f"1-{1 << 20}")
    with pytest.raises(ConnectorError, match="the id 1-1048576 does not fit into a number"):
        with running(log, stream(server)) as connector:
            connector.finish(30)


def test_a_key_that_is_no_stream(server: RedisServer, client: redis.Redis, log: Log) -> None:
    client.set("s", "x")
    with pytest.raises(ConnectorError, match=r"source a failed.*wrong kind of value"):
        with running(log, stream(server)) as connector:
            connector.finish(30)


def test_an_idle_stream_is_not_hammered(server: RedisServer, client: redis.Redis) -> None:
    add(client, [1])
    source = stream(server)
    source.handle_open()
    source.handle_reset(None)
    assert source.handle_next() is not None
    before: Any = client.info("stats")
    until, asked = time.monotonic() + 0.3, 0
    while time.monotonic() < until:
        assert source.handle_next() is None
        asked += 1
    after: Any = client.info("stats")
    source.handle_close()
    assert asked > 1000
    commands = after["total_commands_processed"] - before["total_commands_processed"]
    assert commands < 100, "4 for each of 15 times"


# Groups


def next_of(source: RedisGroupSource, count: int) -> list[Item]:
    found: list[Item] = []

    def has_all() -> bool:
        while len(found) < count and (item := source.handle_next()) is not None:
            found.append(item)
        return len(found) == count

    wait_until(has_all, 30, f"{count} entries")
    return found


def test_entries_are_acknowledged_when_they_are_safe(
    server: RedisServer, client: redis.Redis, log: Log
) -> None:
    with running(log, group(server)):
        add(client, range(1500))
        come(log, 1500)
        wait_until(lambda: not unacknowledged(client), 10, "acknowledging")


def test_what_was_delivered_and_is_not_safe_comes_again(
    server: RedisServer, client: redis.Redis
) -> None:
    add(client, range(10))
    first = group(server)
    first.handle_open()
    first.handle_reset(None)
    taken = next_of(first, 6)
    add(client, range(10, 12))
    first.handle_close()  # nothing was acknowledged
    assert unacknowledged(client) == 10
    second = group(server)
    second.handle_open()
    second.handle_reset(taken[5].point_of_ref)
    found = [item.data.decode() for item in next_of(second, 6)]
    assert found == numbered(range(6, 12))
    assert unacknowledged(client) == 6, "what was safe is acknowledged"
    second.handle_close()


def test_an_answer_that_was_lost_comes_again(server: RedisServer, client: redis.Redis) -> None:
    """Redis has delivered entries, and the connection broke before they arrived."""
    add(client, range(5))
    source = group(server)
    source.handle_open()
    source.handle_reset(None)
    assert next_of(source, 5)
    add(client, range(5, 10))
    client.xreadgroup("g", "a", {"s": ">"})  # as if it were the source
    server.kill()
    wait_until(lambda: source.handle_next() is not None or source._again is not None, 30, "notice")
    start(server, client)
    found = [item.data.decode() for item in next_of(source, 5)]
    source.handle_close()
    assert found == numbered(range(5, 10))


def test_a_delivered_entry_that_is_gone(server: RedisServer, client: redis.Redis, log: Log) -> None:
    add(client, range(3))
    client.xgroup_create("s", "g", "0")
    client.xreadgroup("g", "a", {"s": ">"})
    client.xtrim("s", maxlen=1, approximate=False)
    with pytest.raises(ConnectorError, match="of s is gone from Redis"):
        with running(log, group(server)) as connector:
            connector.finish(30)
    with running(log, group(server, on_gone="skip")):
        come(log, 1)
        wait_until(lambda: not unacknowledged(client), 10, "acknowledging")
    assert texts(log) == ["2"]


def test_two_share_a_group(server: RedisServer, client: redis.Redis, log: Log) -> None:
    sources = [RedisGroupSource(name, server.url, "s", "g") for name in ("a", "b")]
    with running(log, *sources):
        for n in range(20):
            add(client, range(n * 100, n * 100 + 100))
        come(log, 2000)
    assert sorted(map(int, texts(log))) == list(range(2000))


# Channels


def test_a_channel(server: RedisServer, client: redis.Redis, log: Log) -> None:
    for first in (0, 100):
        source = RedisSubscribeSource("a", server.url, "c")
        with running(log, source):
            wait_until(lambda: source.connections, 30, "subscribing")  # noqa: B023
            for n in range(first, first + 100):
                client.publish("c", f"{n}")
            come(log, first + 100)
    assert texts(log) == numbered(range(200))


def test_a_channel_of_a_redis_that_is_killed(
    server: RedisServer, client: redis.Redis, log: Log
) -> None:
    source = RedisSubscribeSource("a", server.url, "c")
    with running(log, source) as connector:
        wait_until(lambda: source.connections, 30, "subscribing")
        client.publish("c", "1")
        come(log, 1)
        server.kill()
        start(server, client)
        wait_until(lambda: source.connections == 2, 30, "subscribing again")
        client.publish("c", "2")
        come(log, 2)
        connector.check()
    assert texts(log) == ["1", "2"]


def test_what_is_not_safe_is_bounded(server: RedisServer, client: redis.Redis) -> None:
    source = RedisSubscribeSource("a", server.url, "c", buffer_bytes_max=10 * 300)
    source.handle_open()
    source.handle_reset(None)
    wait_until(lambda: source.connections, 30, "subscribing")
    for n in range(25):
        client.publish("c", f"{n}".rjust(100))
    wait_until(lambda: source.dropped == 15, 30, "dropping")
    taken = [source.handle_next() for _ in range(11)]
    assert [item and int(item.data) for item in taken] == [*range(15, 25), None]
    source.handle_progress("a", 3)
    source.handle_reset(4)  # the listener went away and came again
    again = [source.handle_next() for _ in range(6)]
    assert again == [*taken[5:10], None]
    source.handle_close()


# Sinks


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
    start(server, client)
    with hosted(entries(server), tmp_path) as address, worker(address, 2) as sink:
        assert (sink.committed, sink.uncommitted) == (0, ("t1",))
        assert out(client) == []
        sink.resolve("t1", commit)
    assert out(client) == (numbered(range(2000)) if commit else [])
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
        start(server, client)
        with worker(address, 3, 30) as sink:
            assert (sink.committed, sink.uncommitted) == (0, ())
            sink.send([row(None, "one")])
            assert sink.vote("t2", 0)
            server.kill()
            with refused(told, "could not commit t2"):
                sink.resolve("t2", True)
        start(server, client)
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
