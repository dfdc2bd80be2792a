"""For asyncio: the same streams, without blocking the loop.

    async with aio.AsyncProducer(log) as producer:
        place = await producer.send("orders", Order(user="ada", amount=9.5))

    async with contextlib.aclosing(aio.read_events(log, "orders", Order)) as events:
        async for event in events:
            ...

Everything else of a log is synchronous: call it with `asyncio.to_thread`. Nothing here uses the
loop's default executor, and whoever waits for new events holds no thread.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, cast

from penstock.errors import PenstockError
from penstock.log.api import Log
from penstock.log.batch import Batch
from penstock.log.compose import check_class_fits
from penstock.log.read import FOLLOW_WAIT_S, Reading, ReadOptions
from penstock.producer import Place, Producer, ProducerOptions
from penstock.records.event import Event, Key, key_bytes
from penstock.records.schema import Record

R = TypeVar("R", bound=Record)
T = TypeVar("T")

READERS_MAX = 8
"""How many reads, of all logs and streams, are made at a time."""


class AsyncProducer:
    """A `penstock.Producer` whose waits are awaited."""

    def __init__(self, log: Log, options: ProducerOptions = ProducerOptions()) -> None:
        self._producer = Producer(log, options)
        # One thread: what is sent in an order is sent in that order.
        self._sender = ThreadPoolExecutor(1, "penstock-aio-send")

    async def __aenter__(self) -> Self:
        await _in_thread(self._sender, self._producer.__enter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await _in_thread(self._sender, self._producer.close)
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
        send = partial(
            self._producer.send, stream, data, key=key, id=id, time=time, type=type,
            headers=headers,
        )  # fmt: skip
        return await asyncio.wrap_future(await _in_thread(self._sender, send))


async def _in_thread(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, work)


async def read_batches_async(
    log: Log, stream: str, options: ReadOptions = ReadOptions()
) -> AsyncGenerator[Batch, None]:
    """`penstock.read_batches` for asyncio; close it (`aclosing`) if you stop early."""
    reading = await _in_thread(_READERS, partial(Reading, log, stream, options))
    with _following(log, stream) if options.follow else nullcontext() as news:
        while not reading.is_stopped:
            batches = reading.batches()
            while found := await _in_thread(_READERS, partial(next, batches, None)):
                yield found
                if reading.is_stopped:
                    return
            if news is None:
                return
            await _wait(log, stream, reading.positions, news)
            await _in_thread(_READERS, reading.look)


async def _wait(log: Log, stream: str, positions: Mapping[int, int], news: asyncio.Event) -> None:
    """Wait until there is something to read, for a moment at most."""
    news.clear()
    if not await _in_thread(_READERS, partial(log.wait, stream, positions, 0.0)):
        with suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), FOLLOW_WAIT_S)


class _Watch:
    """One thread that waits for new events of a stream, for all in the process who follow it.

    A follower is told of every commit that comes after it has begun to wait: the thread looks
    where the stream ends before it tells, not after.
    """

    def __init__(self, log: Log, stream: str) -> None:
        self._log = log
        self._stream = stream
        self._followers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._is_running = False

    def add(self, news: asyncio.Event) -> None:
        self._followers[news] = asyncio.get_running_loop()
        if not self._is_running:
            name = f"penstock-aio-{self._stream}"
            threading.Thread(target=self._loop, name=name, daemon=True).start()
            self._is_running = True

    def remove(self, news: asyncio.Event) -> bool:
        """Whether nobody follows any more."""
        self._followers.pop(news, None)
        return not self._followers

    def _loop(self) -> None:
        try:
            while self._is_wanted():
                ends = {p: found.next for p, found in self._log.offsets(self._stream).items()}
                self._tell()
                self._log.wait(self._stream, ends, FOLLOW_WAIT_S)
        except PenstockError:  # the followers meet it themselves; who comes later starts again
            with _LOCK:
                self._is_running = False

    def _is_wanted(self) -> bool:
        with _LOCK:
            self._is_running = bool(self._followers)
            return self._is_running

    def _tell(self) -> None:
        with _LOCK:
            for news, loop in self._followers.items():
                with suppress(RuntimeError):  # that loop was closed
                    loop.call_soon_threadsafe(news.set)


_READERS = ThreadPoolExecutor(READERS_MAX, "penstock-aio-read")
_LOCK = threading.Lock()
_WATCHES: dict[tuple[Log, str], _Watch] = {}


@contextmanager
def _following(log: Log, stream: str) -> Iterator[asyncio.Event]:
    news = asyncio.Event()
    with _LOCK:
        watch = _WATCHES.setdefault((log, stream), _Watch(log, stream))
        watch.add(news)
    try:
        yield news
    finally:
        with _LOCK:
            if watch.remove(news):
                _WATCHES.pop((log, stream), None)


async def read_events(
    log: Log, stream: str, record: type[R] | None = None, options: ReadOptions = ReadOptions()
) -> AsyncGenerator[Event[R], None]:
    """`penstock.read_events` for asyncio; close it (`aclosing`) if you stop early."""
    if record is not None:
        check_class_fits(await _in_thread(_READERS, partial(log.stream, stream)), record)
    key = key_bytes(options.key)
    async with aclosing(read_batches_async(log, stream, options)) as batches:
        async for batch in batches:
            for event in batch.events(record, key):
                yield cast(Event[R], event)
