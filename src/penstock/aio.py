"""For asyncio: the same streams, without blocking the loop.

    async with aio.AsyncProducer(log) as producer:
        place = await producer.send("orders", Order(user="ada", amount=9.5))

    async with contextlib.aclosing(aio.read_events(log, "orders", Order)) as events:
        async for event in events:
            ...

On Kafka, reading uses the asyncio client of librdkafka's binding. Everything else of a log is
synchronous: call it with `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from types import TracebackType
from typing import Protocol, Self, TypeVar, cast, runtime_checkable

import msgspec

from penstock.log.api import Log
from penstock.log.batch import Batch
from penstock.log.compose import check_class_fits
from penstock.log.read import ReadOptions, read_batches
from penstock.producer import Place, Producer, ProducerOptions
from penstock.records.event import Event, Key, key_bytes
from penstock.records.schema import Record

R = TypeVar("R", bound=Record)


@runtime_checkable
class AsyncLog(Protocol):
    """A log that can be read by asyncio itself."""

    def read_async(self, stream: str, options: ReadOptions) -> AsyncGenerator[Batch, None]:
        """What `read_batches` gives."""


class AsyncProducer:
    """A `penstock.Producer` whose waits are awaited."""

    def __init__(self, log: Log, options: ProducerOptions = ProducerOptions()) -> None:
        self._producer = Producer(log, options)
        # One thread: what is sent in an order is sent in that order.
        self._sender = ThreadPoolExecutor(1, "penstock-aio")

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._producer.__enter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._producer.close)
        self._sender.shutdown(wait=False)

    async def send(
        self,
        stream: str,
        data: object,
        *,
        key: Key | None = None,
        id: str | int | None = None,  # noqa: A002  the word for it
        time: dt.datetime | None = None,
        type: str | None = None,  # noqa: A002  the word for it
        headers: Mapping[str, str] | None = None,
    ) -> Place:
        """Send an event and wait until it is committed. Gather many to have them share commits.

        A task that is cancelled may still have sent it.
        """
        send = functools.partial(
            self._producer.send, stream, data, key=key, id=id, time=time, type=type,
            headers=headers,
        )  # fmt: skip
        sent = await asyncio.get_running_loop().run_in_executor(self._sender, send)
        return await asyncio.wrap_future(sent)


async def read_batches_async(
    log: Log, stream: str, options: ReadOptions = ReadOptions()
) -> AsyncGenerator[Batch, None]:
    """`penstock.read_batches` for asyncio; close it (`aclosing`) if you stop early."""
    if isinstance(log, AsyncLog):
        async with aclosing(log.read_async(stream, options)) as live:
            async for batch in live:
                yield batch
        return
    stop = options.stop or threading.Event()
    batches = read_batches(log, stream, msgspec.structs.replace(options, stop=stop))
    try:
        while (found := await asyncio.to_thread(_next, batches)) is not None:
            yield found
    finally:
        stop.set()  # whoever is cancelled leaves a thread behind that must end


def _next(batches: Iterator[Batch]) -> Batch | None:
    return next(batches, None)


async def read_events(
    log: Log, stream: str, record: type[R] | None = None, options: ReadOptions = ReadOptions()
) -> AsyncGenerator[Event[R], None]:
    """`penstock.read_events` for asyncio; close it (`aclosing`) if you stop early."""
    if record is not None:
        check_class_fits(await asyncio.to_thread(log.stream, stream), record)
    key = key_bytes(options.key)
    async with aclosing(read_batches_async(log, stream, options)) as batches:
        async for batch in batches:
            for event in batch.events(record, key):
                yield cast(Event[R], event)
