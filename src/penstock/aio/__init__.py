"""For asyncio: the same streams and groups, without blocking the loop.

    async with aio.AsyncProducer(log) as producer:
        place = await producer.send("orders", Order(user="ada", amount=9.5))

    async with contextlib.aclosing(aio.read_events(log, "orders", Order)) as events:
        async for event in events:
            ...

    async with aio.AsyncGroup(log, "orders", "billing", Order) as group:
        async for message in group:
            await message.ack()

Everything else of a log is synchronous: call it with `asyncio.to_thread`. Nothing here uses the
loop's default executor.
"""

from penstock.aio.groups import AsyncGroup, AsyncGroupMessage, AsyncGroupTransaction
from penstock.aio.producing import AsyncProducer
from penstock.aio.reading import READERS_MAX, read_batches_async, read_events

__all__ = [
    "READERS_MAX",
    "AsyncGroup",
    "AsyncGroupMessage",
    "AsyncGroupTransaction",
    "AsyncProducer",
    "read_batches_async",
    "read_events",
]
