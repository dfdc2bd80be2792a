"""Reading events from asyncio: waiting for new events does not occupy a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext, suppress
from functools import partial
from typing import TypeVar, cast

from penstock.aio.threads import in_thread
from penstock.errors import PenstockError
from penstock.log.api import Log
from penstock.log.batch import Batch
from penstock.log.reading.read import FOLLOW_WAIT_S, Reading, ReadOptions
from penstock.log.writing.compose import check_class_fits
from penstock.records.event import StoredEvent, key_bytes
from penstock.records.schema import Record

R = TypeVar("R", bound=Record)

READERS_MAX = 8
"""How many reads run at the same time, over all logs and streams."""


async def read_batches_async(
    log: Log, stream: str, options: ReadOptions = ReadOptions()
) -> AsyncGenerator[Batch, None]:
    """`penstock.read_batches` for asyncio; close it (`aclosing`) if you stop early."""
    reading = await in_thread(_READERS, partial(Reading, log, stream, options))
    with _following(log, stream) if options.follow else nullcontext() as news:
        while not reading.is_stopped:
            batches = reading.batches()
            while found := await in_thread(_READERS, partial(next, batches, None)):
                yield found
                if reading.is_stopped:
                    return
            if news is None:
                return
            await _wait(log, stream, reading.positions, news)
            await in_thread(_READERS, reading.look)


async def _wait(log: Log, stream: str, positions: Mapping[int, int], news: asyncio.Event) -> None:
    """Wait briefly until there is something to read."""
    news.clear()
    if not await in_thread(_READERS, partial(log.wait, {stream: positions}, 0.0)):
        with suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), FOLLOW_WAIT_S)


class _Watch:
    """One thread that waits for new events of a stream, on behalf of all its followers here.

    A follower is notified of every commit made after it began to wait: the thread looks up the
    end of the stream before it notifies, not after.
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
        """Remove a follower; return whether none is left."""
        self._followers.pop(news, None)
        return not self._followers

    def _loop(self) -> None:
        try:
            while self._is_wanted():
                ends = {p: found.next for p, found in self._log.offsets(self._stream).items()}
                self._tell()
                self._log.wait({self._stream: ends}, FOLLOW_WAIT_S)
        except PenstockError:  # followers get the error themselves; a later one starts a new thread
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
) -> AsyncGenerator[StoredEvent[R], None]:
    """`penstock.read_events` for asyncio; close it (`aclosing`) if you stop early."""
    if record is not None:
        check_class_fits(await in_thread(_READERS, partial(log.stream, stream)), record)
    key = key_bytes(options.key)
    async with aclosing(read_batches_async(log, stream, options)) as batches:
        async for batch in batches:
            for event in batch.events(record, key):
                yield cast(StoredEvent[R], event)
