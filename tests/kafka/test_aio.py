"""asyncio: many senders share commits, readers follow, and the loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from penstock import CreateStream, DropStream, GrowStream, Log, ReadOptions, declare
from penstock import open as open_log
from penstock.aio import AsyncProducer, read_batches_async, read_events
from penstock.errors import ClosedError, RecordError, UnknownObjectError
from penstock.log.declaring.objects import Change
from penstock.testing.contract import Order

both = pytest.mark.parametrize("log", ["embedded", "kafka"], indirect=True)


@pytest.fixture
def shop(log: str) -> Iterator[Log]:
    with open_log(log) as opened:
        opened.apply([CreateStream(declare("orders", Order, key="user", partitions=2))])
        yield opened


@pytest.mark.row("F13", engine="kafka")
@both
def test_what_many_send_is_read_once(shop: Log) -> None:
    async def work() -> None:
        async with AsyncProducer(shop) as producer:
            tasks = (producer.send("orders", Order(f"u{n % 7}", n)) for n in range(300))
            places = await asyncio.gather(*tasks)
            with pytest.raises(RecordError):
                await producer.send("orders", {"user": 1})
        assert len({(place.partition, place.offset) for place in places}) == 300
        found = [event async for event in read_events(shop, "orders", Order)]
        assert sorted(event.data.amount for event in found) == list(range(300))
        mine = [event async for event in read_events(shop, "orders", Order, ReadOptions(key="u3"))]
        assert {event.data.user for event in mine} == {"u3"}
        with pytest.raises(UnknownObjectError):
            await anext(read_events(shop, "nobody", Order))

    asyncio.run(work())


@pytest.mark.row("F13", engine="kafka")
@both
def test_a_follower_leaves_the_loop_free(shop: Log) -> None:
    async def work() -> None:
        turns = 0

        async def beat() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        async def follow() -> list[int]:
            found = []
            events = read_events(shop, "orders", Order, ReadOptions(follow=True))
            async with contextlib.aclosing(events):
                async for event in events:
                    found.append(event.data.amount)
                    if len(found) == 20:
                        break
            return found

        heart, follower = asyncio.create_task(beat()), asyncio.create_task(follow())
        async with AsyncProducer(shop) as producer:
            for n in range(20):
                await producer.send("orders", Order("a", n))
        assert await asyncio.wait_for(follower, 60) == list(range(20))
        heart.cancel()
        assert turns > 20

    asyncio.run(work())


async def settle(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    while not condition():
        await asyncio.sleep(0.01)


@both
def test_a_follower_sees_partitions_that_are_added(shop: Log) -> None:
    async def work() -> None:
        seen: set[int] = set()

        async def follow() -> None:
            async for batch in read_batches_async(shop, "orders", ReadOptions(follow=True)):
                seen.add(batch.partition)

        following = asyncio.create_task(follow())
        async with AsyncProducer(shop) as producer:
            await asyncio.gather(*(producer.send("orders", Order(f"u{n}", n)) for n in range(20)))
            await settle(lambda: seen == {0, 1})
            await asyncio.to_thread(shop.apply, [GrowStream("orders", 6)])
            await asyncio.gather(*(producer.send("orders", Order(f"u{n}", n)) for n in range(40)))
        await settle(lambda: len(seen) == 6)
        following.cancel()

    asyncio.run(asyncio.wait_for(work(), 60))


@both
def test_a_follower_hears_that_its_stream_is_another_one(shop: Log) -> None:
    async def work() -> None:
        found: list[int] = []

        async def follow() -> None:
            async for event in read_events(shop, "orders", Order, ReadOptions(follow=True)):
                found.append(event.data.amount)

        following = asyncio.create_task(follow())
        async with AsyncProducer(shop) as producer:
            await producer.send("orders", Order("a", 1))
            await settle(lambda: found == [1])
            again: list[Change] = [DropStream("orders"), CreateStream(shop.stream("orders").spec)]
            await asyncio.to_thread(shop.apply, again)
            await producer.send("orders", Order("a", 2))
        with pytest.raises(UnknownObjectError, match="created again"):
            await following
        assert found == [1]

    asyncio.run(asyncio.wait_for(work(), 60))


@both
def test_a_follower_stops_when_told_and_ends_with_its_log(shop: Log, log: str) -> None:
    async def work() -> None:
        stop = threading.Event()
        async with AsyncProducer(shop) as producer:
            await producer.send("orders", Order("a", 1))
        options = ReadOptions(follow=True, stop=stop)
        async for event in read_events(shop, "orders", Order, options):
            assert event.data.amount == 1
            stop.set()
        with open_log(log) as other:
            events = read_events(other, "orders", Order, ReadOptions(follow=True))
            assert (await anext(events)).data.amount == 1
        with pytest.raises(ClosedError):
            await anext(events)

    asyncio.run(asyncio.wait_for(work(), 60))
