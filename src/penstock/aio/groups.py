"""Consumer groups for asyncio: the same group, its waits awaited.

One thread takes messages for all tasks that wait for one.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Generic, Self, TypeVar

from penstock.aio.threads import in_thread
from penstock.errors import ClosedError, PenstockError, UsageError
from penstock.groups.group import Group
from penstock.groups.messages import GroupMessage, TakenMessage
from penstock.groups.outcomes import GroupRules
from penstock.groups.transactions import TIMEOUT_S, GroupTransaction
from penstock.log.api import Log, Start
from penstock.processes import this_process
from penstock.records.event import Key

T = TypeVar("T")
V = TypeVar("V")
TURN_S = 0.05
"""How long the thread waits for one task's messages while others wait, too."""
ALONE_S = 0.5
WORKERS = 4
"""How many calls into the log a group makes at a time."""


class AsyncGroupMessage(TakenMessage[T]):
    """A message, with what a member does to it."""

    __slots__ = ("_message",)

    def __init__(self, message: GroupMessage[T]) -> None:
        super().__init__(message._work, message._given, message.event)
        self._message = message

    async def ack(self) -> None:
        """Acknowledge it; returns once that is saved. Raises `LeaseLostError` if the lease is over.

        Gather many, so that they share commits.
        """
        await asyncio.wrap_future(self._message.ack())

    async def nack(self, delay_s: float | None = None, reason: str = "") -> None:
        """It failed: let it be delivered again after a pause, which doubles with each try."""
        await asyncio.wrap_future(self._message.nack(delay_s, reason))

    async def reject(self, reason: str) -> None:
        """It can never succeed: turn it into a dead letter now."""
        await asyncio.wrap_future(self._message.reject(reason))

    def release(self) -> None:
        """Give it back as if it had not been delivered."""
        self._message.release()

    def extend(self, lease_s: float | None = None) -> None:
        """Keep it for longer, from now on."""
        self._message.extend(lease_s)


class _Wish(Generic[T]):
    """A task that waits for messages."""

    def __init__(self, count: int, member: str, timeout_s: float | None) -> None:
        self.count = count
        self.member = member
        self.deadline_s = math.inf if timeout_s is None else monotonic() + timeout_s
        self.loop = asyncio.get_running_loop()
        self.granted: asyncio.Future[list[GroupMessage[T]]] = self.loop.create_future()


class AsyncGroup(Generic[T]):
    """A `penstock.Group` whose waits are awaited; it takes the same arguments.

        async with AsyncGroup(log, "orders", "billing", Order) as group:
            async for message in group:
                await message.ack()

    Each task is a member. Leaving the block saves what was acknowledged, and gives back the rest.
    """

    def __init__(
        self,
        log: Log,
        stream: str,
        name: str,
        record: type[T] | None = None,
        *,
        rules: GroupRules = GroupRules(),
        start: Start = "earliest",
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._group = Group(log, stream, name, record, rules=rules, start=start, tell=tell)
        self._threads = ThreadPoolExecutor(WORKERS, "penstock-aio-group")
        self._changed = threading.Condition()
        self._wishes: deque[_Wish[T]] = deque()
        self._is_over = False
        self._taker = threading.Thread(target=self._serve, name="penstock-aio-take", daemon=True)

    async def __aenter__(self) -> Self:
        try:
            await in_thread(self._threads, self._group.__enter__)
        except asyncio.CancelledError:
            self._threads.submit(self._group.__exit__, None, None, None)  # after it was entered
            self._threads.shutdown(wait=False)
            raise
        self._taker.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        try:
            await in_thread(self._threads, partial(self._close, kind, error))
        finally:
            self._threads.shutdown(wait=False)

    def _close(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        try:
            self._group.__exit__(kind, error, None)
        finally:
            self._taker.join()

    @property
    def is_coordinating(self) -> bool:
        """Whether this process coordinates the group; otherwise it stands by."""
        return self._group.is_coordinating

    # Taking

    async def take(
        self, timeout_s: float | None = None, *, member: str | None = None
    ) -> AsyncGroupMessage[T] | None:
        """The next message; `None` after the timeout."""
        found = await self.take_many(1, timeout_s, member=member)
        return found[0] if found else None

    async def take_many(
        self, count: int, timeout_s: float | None = None, *, member: str | None = None
    ) -> list[AsyncGroupMessage[T]]:
        """Up to `count` messages, as soon as there is one; an empty list after the timeout.

        A task that is cancelled meanwhile has taken nothing.
        """
        if count < 1:
            raise UsageError(f"count must be 1 or more, not {count}")
        wish = _Wish[T](count, member or _member(), timeout_s)
        with self._changed:
            if self._is_over:
                raise ClosedError(f"group {self._group.name} is closed")
            self._wishes.append(wish)
            self._changed.notify()
        try:
            messages = await wish.granted
        except asyncio.CancelledError:
            if wish.granted.done() and not wish.granted.cancelled():
                self._give_back(wish.granted.result())  # it came in the same moment
            raise
        return [AsyncGroupMessage(message) for message in messages]

    async def __aiter__(self) -> AsyncIterator[AsyncGroupMessage[T]]:
        """Messages one by one, until the group is closed."""
        while True:
            try:
                message = await self.take()
            except ClosedError:
                return
            if message is not None:
                yield message

    def _serve(self) -> None:
        """Take messages for whoever waits, in turns. Runs in a thread of its own."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wishes or self._is_over)
                if not self._wishes:
                    return
                wish = self._wishes.popleft()
                pause_s = TURN_S if self._wishes else ALONE_S
            if wish.granted.done():
                continue
            pause_s = max(0.0, min(pause_s, wish.deadline_s - monotonic()))
            try:
                taken = self._group.take_many(wish.count, pause_s, member=wish.member)
            except Exception as error:
                _call(wish, partial(_refuse, wish, error))
                continue
            if taken or monotonic() >= wish.deadline_s:
                _call(wish, partial(self._grant, wish, taken))
            else:
                with self._changed:
                    self._wishes.append(wish)

    def _grant(self, wish: _Wish[T], taken: list[GroupMessage[T]]) -> None:
        """Runs in the task's loop: only there it is known whether it still waits."""
        if not wish.granted.done():
            wish.granted.set_result(taken)
        else:
            self._give_back(taken)

    def _give_back(self, taken: list[GroupMessage[T]]) -> None:
        if taken:
            with suppress(PenstockError):  # it is lost, or the group closed: then it is given back
                self._group.release(taken)

    # Giving back

    async def ack(self, messages: Sequence[AsyncGroupMessage[T]]) -> None:
        """Acknowledge messages, all in one commit; none if the lease of one is over."""
        given = [message._message for message in messages]
        await asyncio.wrap_future(self._group.ack(given))

    def transaction(
        self, name: tuple[str, int] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> AsyncGroupTransaction:
        """Acknowledge messages together with what follows from them: see `Group.transaction`."""
        return AsyncGroupTransaction(
            self._group.transaction(name, timeout_s=timeout_s), self._threads
        )


class AsyncGroupTransaction:
    """A `penstock.GroupTransaction` whose waits are awaited."""

    def __init__(self, transaction: GroupTransaction, threads: ThreadPoolExecutor) -> None:
        self._transaction = transaction
        self._threads = threads

    async def __aenter__(self) -> Self:
        self._transaction.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._transaction.state == "open":
            if error is None:
                await self.commit()
            else:
                self._transaction.roll_back()

    def ack(self, *messages: TakenMessage[T]) -> None:
        """Acknowledge messages with it."""
        self._transaction.ack(*messages)

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
    ) -> str:
        """Add an event; returns its id, which is final although the commit is not."""
        send = partial(
            self._transaction.send, stream, data, key=key, id=id, time=time, type=type,
            headers=headers,
        )  # fmt: skip
        return await in_thread(self._threads, send)

    async def get(self, table: str, key: Key, record: type[V]) -> V | None:
        """The entry of a key as it is, not what this transaction puts."""
        return await in_thread(self._threads, partial(self._transaction.get, table, key, record))

    async def put(self, table: str, key: Key, value: object) -> None:
        """Set the entry of a key; `None` deletes it."""
        await in_thread(self._threads, partial(self._transaction.put, table, key, value))

    async def put_if(self, table: str, key: Key, value: object, offset: int | None) -> None:
        """Set the entry of a key, if it is still the one at `offset`."""
        await in_thread(self._threads, partial(self._transaction.put_if, table, key, value, offset))

    async def commit(self) -> None:
        """Commit. If the task is cancelled meanwhile, it may have been committed nevertheless."""
        begun = await in_thread(self._threads, self._transaction.begin_commit)
        await asyncio.wrap_future(begun)

    def roll_back(self) -> None:
        """Forget everything. Messages are still their member's."""
        self._transaction.roll_back()


def _member() -> str:
    task = asyncio.current_task()
    name = "" if task is None else task.get_name()
    return f"{socket.gethostname()}/{this_process().pid}/{name}"


def _call(wish: _Wish[T], work: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop was closed: its group gives the messages back
        wish.loop.call_soon_threadsafe(work)


def _refuse(wish: _Wish[T], error: Exception) -> None:
    if not wish.granted.done():
        wish.granted.set_exception(error)
