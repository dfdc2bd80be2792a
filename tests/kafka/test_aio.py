"""asyncio: many senders share commits, readers follow, and the loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from penstock import CreateStream, Log, ReadOptions, declare
from penstock import open as open_log
from penstock.aio import AsyncProducer, read_events
from penstock.errors import RecordError, UnknownObjectError
from penstock.testing.contract import Order

pytestmark = pytest.mark.parametrize("log", ["embedded", "kafka"], indirect=True)


@pytest.fixture
def shop(log: str) -> Iterator[Log]:
    with open_log(log) as opened:
        opened.apply([CreateStream(declare("orders", Order, key="user", partitions=2))])
        yield opened


@pytest.mark.row("F13", engine="kafka")
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
