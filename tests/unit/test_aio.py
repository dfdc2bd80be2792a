"""asyncio on the embedded log: who waits holds no thread, and nobody's things are touched."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.aio import READERS_MAX, AsyncProducer, read_batches_async, read_events
from penstock.errors import ClosedError, RecordError, UnknownObjectError
from penstock.log import open_log
from penstock.log.api import Log
from penstock.log.declaring.objects import DropStream, GrowStream
from penstock.log.reading.read import ReadOptions
from penstock.records.schema import Record
from penstock.testing.contract import Order, commit, create

FOLLOW = ReadOptions(follow=True)
LIMIT_S = 60


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as opened:
        create(opened, "s", partitions=2)
        yield opened


async def take(log: Log, count: int, options: ReadOptions = FOLLOW) -> list[int]:
    found = []
    async with contextlib.aclosing(read_events(log, "s", Order, options)) as events:
        async for event in events:
            found.append(event.data.amount)
            if len(found) == count:
                break
    return found


async def settle(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    while not condition():
        await asyncio.sleep(0.001)


def test_many_followers_leave_room_for_everybody_else(log: Log) -> None:
    async def work() -> None:
        followers = [asyncio.create_task(take(log, 3)) for _ in range(100)]
        assert await asyncio.to_thread(lambda: "free") == "free"
        async with AsyncProducer(log) as producer:
            assert await take(log, 0, ReadOptions()) == []
            for n in range(3):
                await producer.send("s", Order("a", n))
        assert await asyncio.to_thread(lambda: "free") == "free"
        assert await asyncio.gather(*followers) == [[0, 1, 2]] * 100

    before = threading.active_count()
    asyncio.run(asyncio.wait_for(work(), LIMIT_S))
    ours = [t for t in threading.enumerate() if t.name.startswith("penstock-aio-read")]
    assert len(ours) <= READERS_MAX
    assert threading.active_count() - len(ours) <= before + 1


def test_followers_are_told_of_what_another_process_writes(log: Log) -> None:
    async def work() -> None:
        following = asyncio.create_task(take(log, 50))
        with open_log(log.url, upkeep_interval_ms=0) as other:
            for n in range(50):
                await asyncio.to_thread(commit, other, "p", n, "s", [n])
        assert await following == list(range(50))

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def test_a_read_that_ends_leaves_the_caller_s_stop_alone(log: Log) -> None:
    async def work() -> None:
        stop = threading.Event()
        commit(log, "p", 0, "s", range(5))
        assert sorted(await take(log, 9, ReadOptions(stop=stop))) == list(range(5))
        assert not stop.is_set()
        assert len(await take(log, 5, ReadOptions(stop=stop, follow=True))) == 5
        assert not stop.is_set()
        stop.set()
        assert await take(log, 5, ReadOptions(stop=stop, follow=True)) == []

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def test_a_follower_stops_when_told(log: Log) -> None:
    async def work() -> None:
        stop = threading.Event()
        following = asyncio.create_task(take(log, 5, ReadOptions(stop=stop, follow=True)))
        await asyncio.sleep(0)
        stop.set()
        assert await following == []

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def test_a_follower_sees_growth_and_hears_of_another_stream(log: Log) -> None:
    async def work() -> None:
        seen: set[int] = set()

        async def follow() -> None:
            async for batch in read_batches_async(log, "s", FOLLOW):
                seen.add(batch.partition)

        following = asyncio.create_task(follow())
        await asyncio.to_thread(commit, log, "p", 0, "s", range(20))
        await settle(lambda: seen == {0, 1})
        log.apply([GrowStream("s", 8)])
        await asyncio.to_thread(commit, log, "p", 1, "s", range(20))
        await settle(lambda: len(seen) > 2)
        log.apply([DropStream("s")])
        create(log, "s")
        with pytest.raises(UnknownObjectError, match="created again"):
            await following

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def test_a_follower_ends_with_its_log(tmp_path: Path) -> None:
    async def work() -> None:
        with open_log(tmp_path / "other.db", upkeep_interval_ms=0) as log:
            create(log, "s")
            following = asyncio.create_task(take(log, 1))
            await asyncio.sleep(0.01)
        with pytest.raises(ClosedError):
            await following

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def test_a_cancelled_follower_leaves_nothing_behind(log: Log) -> None:
    async def work() -> None:
        followers = [asyncio.create_task(take(log, 1)) for _ in range(20)]
        await asyncio.sleep(0.01)
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        await settle(lambda: not watching())

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def watching() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "penstock-aio-s"]


def test_what_is_sent_at_once_keeps_its_order(log: Log) -> None:
    async def work() -> None:
        async with AsyncProducer(log) as producer:
            await asyncio.gather(*(producer.send("s", Order("a", n)) for n in range(1000)))
        assert await take(log, 1000, ReadOptions()) == list(range(1000))

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def test_a_class_that_does_not_fit_the_stream_is_refused(log: Log) -> None:
    class Other(Record):
        user: int

    async def work() -> None:
        with pytest.raises(RecordError, match="does not match"):
            await anext(read_events(log, "s", Other))

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))
