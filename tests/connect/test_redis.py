"""Redis as a source: a real one, killed and started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.connect.clients.source import Item, Source
from penstock.connect.sources.redis import (
    RedisGroupSource,
    RedisStreamSource,
    number_of,
)
from penstock.connect.sources.redis_channel import RedisSubscribeSource
from penstock.errors import ConnectorError
from penstock.testing.processes import wait_until
from penstock.testing.servers import RedisServer
from tests.connect.hosting import (
    running,
    start_redis,
    stored,
    texts,
)

pytestmark = pytest.mark.row("W9", engine="any")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("raw", content="bytes"))])
        yield opened


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
            start_redis(server, client)
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
        ConnectorError, match=f"an entry after {found[9][0].decode()} of s was removed"
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


def test_what_is_gone_is_told_after_a_reset_too(server: RedisServer, client: redis.Redis) -> None:
    """How many there were up to what was read before says nothing of where it goes on now."""
    ids: list[Any] = [client.xadd("s", {"data": f"{n}"}) for n in range(10)]
    source = RedisStreamSource("a", server.url, "s")
    source.handle_open()
    source.handle_reset(None)
    found: list[object] = []

    def has_come() -> bool:
        found.extend(filter(None, [source.handle_next()]))
        return len(found) == 10

    wait_until(has_come, 30, "all of them")
    client.xtrim("s", minid=ids[8], approximate=False)
    source.handle_reset(number_of(ids[5]))
    with pytest.raises(ConnectorError, match=r"an entry after .* was removed from Redis"):
        wait_until(lambda: source.handle_next() is not None, 30, "the next one")
    source.handle_close()


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
    with pytest.raises(ConnectorError, match="id 1-1048576 does not fit into a 64-bit number"):
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
    start_redis(server, client)
    found = [item.data.decode() for item in next_of(source, 5)]
    source.handle_close()
    assert found == numbered(range(5, 10))


def test_a_delivered_entry_that_is_gone(server: RedisServer, client: redis.Redis, log: Log) -> None:
    add(client, range(3))
    client.xgroup_create("s", "g", "0")
    client.xreadgroup("g", "a", {"s": ">"})
    client.xtrim("s", maxlen=1, approximate=False)
    with pytest.raises(ConnectorError, match="of s was removed from Redis"):
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
        start_redis(server, client)
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
    numbers = [item.point_of_ref for item in taken[:10] if item is not None]
    source.handle_progress("a", numbers[3])
    source.handle_reset(numbers[4])  # the listener went away and came again
    again = [source.handle_next() for _ in range(6)]
    assert [item and int(item.data) for item in again] == [*range(20, 25), None]
    told: list[str] = []
    source.on_tell = told.append
    source.handle_reset(numbers[4] - 1000)  # and meanwhile another program has written
    assert source.handle_next() is None
    assert source.dropped == 20
    assert told == [
        "another program has written to a in the meantime: "
        "5 messages that were in transit may be lost"
    ]
    source.handle_close()
