"""Messages as members have them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

from penstock.groups.names import GroupName
from penstock.groups.saved import Clocks
from penstock.groups.work import GroupWork, Handout
from penstock.records.event import StoredEvent, from_microseconds

T = TypeVar("T")


class TakenMessage(Generic[T]):
    """A message that was delivered. Its member has it until the lease is over.

    `deliveries` is how often it was delivered, this time included; after a crash it may be more
    than that, and is never less.
    """

    __slots__ = ("_given", "_work", "deliveries", "event", "lease")

    def __init__(self, work: GroupWork, given: Handout, event: StoredEvent[T]) -> None:
        self._work = work
        self._given = given
        self.event = event
        self.lease = given.lease
        self.deliveries = given.deliveries

    def __repr__(self) -> str:
        event = self.event
        return f"<Message {event.stream}/{event.partition}:{event.offset} lease {self.lease}>"

    @property
    def data(self) -> T:
        return self.event.data

    @property
    def key(self) -> bytes | None:
        return self.event.key

    @property
    def headers(self) -> Mapping[str, str]:
        return self.event.headers

    @property
    def first_delivered(self) -> dt.datetime:
        """When it was delivered for the first time, as far as that is known."""
        return from_microseconds(Clocks.read().to_us(self._given.first_s or 0.0))

    @property
    def group(self) -> GroupName:
        """The group that it belongs to."""
        return self._work.group

    @property
    def epoch(self) -> int:
        """Which coordinator delivered it."""
        return self._work.epoch


class GroupMessage(TakenMessage[T]):
    """A message, with what a member does to it."""

    __slots__ = ()

    def ack(self) -> Future[None]:
        """Acknowledge it. The future is done once that is saved: `message.ack().result()`.

        It is shared with other acknowledgements. Callbacks run in the group's own thread: one that
        waits for another acknowledgement waits for ever.

        Raises `LeaseLostError` if the lease is over.
        """
        return self._work.ack(self.epoch, [self.lease])

    def nack(self, delay_s: float | None = None, reason: str = "") -> Future[None]:
        """It failed: let it be delivered again after a pause, which doubles with each try."""
        return self._work.nack(self.epoch, [self.lease], delay_s, reason)

    def reject(self, reason: str) -> Future[None]:
        """It can never succeed: turn it into a dead letter now."""
        return self._work.reject(self.epoch, [self.lease], reason)

    def release(self) -> None:
        """Give it back as if it had not been delivered."""
        self._work.release(self.epoch, [self.lease])

    def extend(self, lease_s: float | None = None) -> None:
        """Keep it for longer, from now on."""
        self._work.extend(self.epoch, [self.lease], lease_s)
