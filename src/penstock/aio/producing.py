"""Sending events from asyncio."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

from penstock.aio.threads import in_thread
from penstock.log.api import Log
from penstock.producer import Place, Producer, ProducerOptions
from penstock.records.event import Key


class AsyncProducer:
    """A `penstock.Producer` whose waits are awaited."""

    def __init__(self, log: Log, options: ProducerOptions = ProducerOptions()) -> None:
        self._producer = Producer(log, options)
        # A single thread, so that events are sent in the order of the calls.
        self._sender = ThreadPoolExecutor(1, "penstock-aio-send")

    async def __aenter__(self) -> Self:
        await in_thread(self._sender, self._producer.__enter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await in_thread(self._sender, self._producer.close)
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
        """Send an event and wait until it is committed. Gather many to let them share commits.

        If the task is cancelled, the event may have been sent nevertheless.
        """
        send = partial(
            self._producer.send,
            stream,
            data,
            key=key,
            id=id,
            time=time,
            type=type,
            headers=headers,
        )
        return await asyncio.wrap_future(await in_thread(self._sender, send))
