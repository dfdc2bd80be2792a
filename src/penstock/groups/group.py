"""Consumer groups: many members on one stream, messages taken and acknowledged one by one.

    with penstock.Group(log, "orders", "billing", Order) as group:
        for message in group:
            charge(message.data)
            message.ack()

Each message goes to one member at a time, and comes again until it is acknowledged. Messages with
the same key are delivered in order, one after the other; all others in parallel.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

from penstock.errors import (
    ClosedError,
    LeaseLostError,
    LogBusyError,
    PenstockError,
    UsageError,
)
from penstock.groups.coordinator import Coordinator
from penstock.groups.messages import GroupMessage
from penstock.groups.names import GroupName
from penstock.groups.outcomes import DELAY_S_MAX, GroupRules
from penstock.groups.saved import GroupKeys, unpack_client
from penstock.groups.transactions import TIMEOUT_S, GroupTransaction, PreparedTransaction
from penstock.groups.work import GroupWork, Handout
from penstock.log.api import Count, Log, Start
from penstock.log.claims import LEASE_S
from penstock.log.declaring.names import NAME_CHARS_MAX, check_text
from penstock.log.writing.compose import check_class_fits
from penstock.processes import this_process
from penstock.records.event import StoredEvent
from penstock.records.schema import Record

T = TypeVar("T")
WAIT_S = 1.0
UNREAD_S = 0.1
DELIVERIES_MAX = 10_000
_numbers = itertools.count(1)
COORDINATED_S = 30.0
"""How long a transaction waits for the group to be coordinated here."""


class Group(Generic[T]):
    """A consumer group of a stream, coordinated by this process unless another one does.

    A second process that opens the group stands by: its `take` waits until the first is gone. Any
    thread may take and acknowledge messages; each thread is a member. Leaving the block saves what
    was acknowledged and gives back the rest.
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
        claim_lease_s: float = LEASE_S,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        check_rules(rules)
        self.name = GroupName.parse(stream, name)
        self._log = log
        self._record = cast("type[Record] | None", record)
        self._coordinator = Coordinator(
            log,
            self.name,
            rules,
            start=start,
            record=self._record,
            claim_lease_s=claim_lease_s,
            tell=tell,
        )
        self._members = threading.local()

    def __enter__(self) -> Self:
        stream = self._log.stream(self.name.stream)
        if self._record is not None:
            check_class_fits(stream, self._record)
        self._coordinator.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._coordinator.close()
        except PenstockError:
            if error is None:  # else it is what has ended the block, or comes second to it
                raise

    @property
    def is_coordinating(self) -> bool:
        """Whether this process coordinates the group; otherwise it stands by."""
        return self._coordinator.is_at_work

    def lag(self) -> Count:
        """How many messages are not acknowledged. Raises `ClosedError` unless this process
        coordinates the group.
        """
        return self._coordinator.work().lag()

    # Taking

    def take(
        self, timeout_s: float | None = None, *, member: str | None = None
    ) -> GroupMessage[T] | None:
        """The next message; `None` after the timeout."""
        found = self.take_many(1, timeout_s, member=member)
        return found[0] if found else None

    def take_many(
        self, count: int, timeout_s: float | None = None, *, member: str | None = None
    ) -> list[GroupMessage[T]]:
        """Up to `count` messages, as soon as there is one; an empty list after the timeout."""
        if count < 1:
            raise UsageError(f"count must be 1 or more, not {count}")
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, min(WAIT_S, deadline - time.monotonic()))
            work = self._coordinator.wait_for_work(left_s)
            given = work.take(member or self._member(), count, left_s) if work else []
            if work is not None and (messages := self._to_messages(work, given)):
                return messages
            if time.monotonic() >= deadline:
                return []

    def _to_messages(self, work: GroupWork, given: Sequence[Handout]) -> list[GroupMessage[T]]:
        """Messages with their events. One that cannot be read becomes a dead letter; while the log
        does not answer, it is given back.
        """
        found: list[GroupMessage[T]] = []
        is_whole = True
        for one in given:
            try:
                event = cast("StoredEvent[T]", work.event(one.slot))
            except Exception as error:
                is_whole = False
                with contextlib.suppress(LeaseLostError):  # given back with one before it
                    self._return_unread(work, one, error)
            else:
                found.append(GroupMessage(work, one, event))
        if is_whole:
            return found
        return [message for message in found if work.has_lease(message.lease)]

    def _return_unread(self, work: GroupWork, given: Handout, error: Exception) -> None:
        if isinstance(error, PenstockError) and error.retriable:
            work.release(work.epoch, [given.lease])
            time.sleep(UNREAD_S)
        else:
            reason = f"it could not be read: {type(error).__name__}: {error}"
            work.reject(work.epoch, [given.lease], reason)

    def __iter__(self) -> Iterator[GroupMessage[T]]:
        """Messages one by one, until the group is closed."""
        while True:
            try:
                message = self.take(1.0)
            except ClosedError:
                return
            if message is not None:
                yield message

    def _member(self) -> str:
        name: str | None = getattr(self._members, "name", None)
        if name is None:
            thread = threading.current_thread()
            name = f"{socket.gethostname()}/{this_process().pid}/{thread.name}"
            self._members.name = name
        return name

    def member(
        self, name: str, *, heartbeat_s: float = 5.0, heartbeats_missed_max: int = 3
    ) -> GroupMember[T]:
        """A named member that sends heartbeats: see `GroupMember`."""
        return GroupMember(self, self._coordinator, name, heartbeat_s * heartbeats_missed_max)

    # Giving back

    def transaction(
        self, name: tuple[str, int] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> GroupTransaction:
        """Acknowledge messages together with what follows from them: see `GroupTransaction`.

        `name` is a client's name and the number of the transaction: after a crash it can be
        repeated under the same name, and happens once.
        """
        if name is not None:
            check_text(name[0], "the client's name")
            if not 1 <= len(name[0]) <= NAME_CHARS_MAX or name[1] < 0:
                raise UsageError(
                    f"invalid transaction name {name!r}: expected the name of a client (1 to "
                    f"{NAME_CHARS_MAX} characters) and a number (0 or more)"
                )
        return GroupTransaction(self._log, self.name.producer, self._execute, name, timeout_s)

    def last_transaction(self, client: str) -> int | None:
        """The number of a client's latest transaction that was committed; `None` if none was, or
        not within 30 days.
        """
        saved = self._log.progress(GroupKeys(*self.name).client(client))
        return None if saved is None else unpack_client(saved).number

    def _execute(self, epoch: int | None, given: PreparedTransaction) -> Future[None]:
        work = self._coordinator.wait_for_work(COORDINATED_S)
        if work is None:
            raise LogBusyError(
                f"group {self.name} is coordinated by another process: execute the transaction "
                "there, or try again when that process has ended"
            )
        return work.execute(epoch, given)

    def ack(self, messages: Sequence[GroupMessage[T]]) -> Future[None]:
        """Acknowledge messages, all in one commit. Raises `LeaseLostError` if the lease of one is
        over; then none is acknowledged.
        """
        return self._coordinator.work().ack(*_leases(self.name, messages))

    def nack(
        self, messages: Sequence[GroupMessage[T]], delay_s: float | None = None, reason: str = ""
    ) -> Future[None]:
        """Let messages be delivered again after a pause; see `GroupMessage.nack`."""
        return self._coordinator.work().nack(*_leases(self.name, messages), delay_s, reason)

    def reject(self, messages: Sequence[GroupMessage[T]], reason: str) -> Future[None]:
        """Turn messages into dead letters."""
        return self._coordinator.work().reject(*_leases(self.name, messages), reason)

    def release(self, messages: Sequence[GroupMessage[T]]) -> None:
        """Give messages back as if they had not been delivered."""
        self._coordinator.work().release(*_leases(self.name, messages))

    def extend(self, messages: Sequence[GroupMessage[T]], lease_s: float | None = None) -> None:
        """Keep messages for longer, from now on."""
        self._coordinator.work().extend(*_leases(self.name, messages), lease_s)


class GroupMember(Generic[T]):
    """A named member that takes messages on behalf of something that may go away.

        with group.member("till-7", heartbeat_s=1) as member:
            message = member.take(10)
            member.beat()

    If it is silent for `heartbeat_s` times `heartbeats_missed_max`, its messages go to other
    members, as if they had failed. Taking counts as a heartbeat; leaving the block gives its
    messages back. Two of one name, such as a till's old and its new connection, are two members.
    """

    def __init__(
        self, group: Group[T], coordinator: Coordinator, name: str, silence_s: float
    ) -> None:
        self.name = name
        self._member = f"{name}#{next(_numbers)}"  # another one of the same name is another member
        self._group = group
        self._coordinator = coordinator
        self._silence_s = silence_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(PenstockError):
            self._coordinator.work().leave(self._member)

    def take(self, timeout_s: float | None = None) -> GroupMessage[T] | None:
        """The next message; `None` after the timeout."""
        found = self.take_many(1, timeout_s)
        return found[0] if found else None

    def take_many(self, count: int, timeout_s: float | None = None) -> list[GroupMessage[T]]:
        """Up to `count` messages, as soon as there is one; an empty list after the timeout."""
        found = self._group.take_many(count, timeout_s, member=self._member)
        self.beat()
        return found

    def beat(self) -> None:
        """Send a heartbeat."""
        work = self._coordinator.wait_for_work(0.0)
        if work is not None:
            work.join(self._member, self._silence_s)


def _leases(group: GroupName, messages: Sequence[GroupMessage[T]]) -> tuple[int, list[int]]:
    if not messages:
        raise UsageError("no messages were given")
    if any(message.group != group for message in messages):
        raise UsageError(f"a message belongs to another group than {group}: acknowledge it there")
    epochs = {message.epoch for message in messages}
    if len(epochs) > 1:
        raise LeaseLostError(
            f"some of the messages were delivered before group {group} was taken over: they will "
            "be, or were, delivered again"
        )
    return epochs.pop(), [message.lease for message in messages]


def check_rules(rules: GroupRules) -> None:
    """Raises `UsageError` for rules that cannot be kept."""
    for name in (
        "key_batch", "deliveries_max", "outstanding_max", "in_flight_max", "member_in_flight_max",
        "breaker_letters",
    ):  # fmt: skip
        if getattr(rules, name) < 1:
            raise UsageError(f"{name} must be 1 or more, not {getattr(rules, name)}")
    if rules.deliveries_max > DELIVERIES_MAX:
        raise UsageError(f"deliveries_max must be at most {DELIVERIES_MAX:,}")
    if not 0 < rules.lease_s <= DELAY_S_MAX:
        raise UsageError(f"lease_s must be up to {DELAY_S_MAX:,.0f} seconds, not {rules.lease_s}")
    for name in ("backoff_s", "backoff_max_s", "breaker_s"):
        if not 0 <= getattr(rules, name) <= DELAY_S_MAX:
            most = f"{DELAY_S_MAX:,.0f}"
            raise UsageError(f"{name} must be 0 to {most} seconds, not {getattr(rules, name)}")
