"""What must not end a group, lose a message, or bury one that nobody has tried."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import CreateStream, DeadLetter, GrowStream, Log, Record, Table, declare, read_events
from penstock import open as open_log
from penstock.errors import (
    ClaimLostError,
    ConflictError,
    GroupBusyError,
    LeaseLostError,
    LogBusyError,
    PenstockError,
    UsageError,
)
from penstock.groups import saved
from penstock.groups.control import drop_group, is_paused, set_paused
from penstock.groups.group import Group
from penstock.groups.names import GroupName
from penstock.groups.outcomes import GroupRules
from penstock.groups.reading import GroupReader
from penstock.groups.transactions import PreparedTransaction
from penstock.log.writing.transaction import Transaction
from penstock.testing.processes import wait_until
from tests.groups.conftest import Order, make_stream, send
from tests.groups.test_group import WAIT_S, take, take_all

pytestmark = pytest.mark.row("H17", engine="embedded")
NAME = GroupName("orders", "billing")
SLOW = GroupRules(lease_s=60, backoff_s=0.0)


NACKING = """
import os, signal, sys, penstock
from tests.groups.conftest import Order
from tests.groups.test_group import take_all
rules = penstock.GroupRules(lease_s=60, deliveries_max=2)
with penstock.open(sys.argv[1]) as log:
    with penstock.Group(log, "orders", "billing", Order, rules=rules, claim_lease_s=1) as group:
        group.nack(take_all(group, 50), 0.5, "no").result(30)
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Balance(Record):
    user: str
    total: int


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "log.db")


@pytest.fixture
def log(url: str) -> Iterator[Log]:
    with open_log(url, create=True) as opened:
        make_stream(opened)
        yield opened


def letters(log: Log) -> list[DeadLetter]:
    if "orders_dead" not in [str(stream.name) for stream in log.streams()]:
        return []
    return [event.data for event in read_events(log, "orders_dead", DeadLetter)]


def test_reasons_of_many_messages_fit(log: Log) -> None:
    """More than one value of progress can hold, in one call, at the end and at the next start."""
    count = 3_000
    send(log, [(f"u{n}", n) for n in range(count)])
    rules = GroupRules(lease_s=60, member_in_flight_max=count)
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        group.nack(take_all(group, count), 0.0, "x" * 400).result(WAIT_S)
        again = take_all(group, count)
        assert {message.deliveries for message in again} == {2}
        group.nack(again, 0.0, "y" * 400).result(WAIT_S)
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        assert {message.deliveries for message in take_all(group, count)} == {3}
    assert letters(log) == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_waits_for_its_last_try_is_not_buried(log: Log, is_killed: bool) -> None:
    """Nobody had them when the process ended."""
    send(log, [(f"u{n}", n) for n in range(50)])
    rules = GroupRules(lease_s=60, deliveries_max=2)
    if is_killed:
        program = [sys.executable, "-c", NACKING, log.url]
        assert subprocess.run(program, check=False, timeout=60).returncode == -signal.SIGKILL
    else:
        with Group(log, "orders", "billing", Order, rules=rules) as group:
            group.nack(take_all(group, 50), 0.5, "no").result(WAIT_S)
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        found = take_all(group, 50)
        assert {message.deliveries for message in found} == {2}
        group.ack(found).result(WAIT_S)
    assert letters(log) == []


def test_what_the_breaker_holds_back_outlives_a_restart(log: Log) -> None:
    send(log, [(f"u{n}", n) for n in range(40)])
    rules = GroupRules(lease_s=60, deliveries_max=1, breaker_letters=5, breaker_s=0.3)
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        group.nack(take_all(group, 40), 0.0, "all fails").result(WAIT_S)
    buried = len(letters(log))
    assert buried < 10
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        for _ in range(40 - buried):
            take(group).ack().result(WAIT_S)
    assert len(letters(log)) == buried


def test_a_log_that_does_not_answer_makes_no_letters(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(log, [(f"u{n}", n) for n in range(5)])
    with Group(log, "orders", "billing", Order, rules=SLOW) as group:
        take(group).ack().result(WAIT_S)
        whole, fails = GroupReader.event, threading.Event()
        fails.set()

        def event(self: GroupReader, slot: object) -> object:
            if fails.is_set():
                raise LogBusyError("not now")
            return whole(self, slot)  # type: ignore[arg-type]

        monkeypatch.setattr(GroupReader, "event", event)
        assert group.take(0.5) is None
        fails.clear()
        assert {message.deliveries for message in take_all(group, 4)} == {1}
    assert letters(log) == []


@pytest.mark.parametrize(
    "reason",
    [os.fsdecode(b"caf\xe9"), "x" * 2_000_000, ValueError("so")],
    ids=["bytes", "long", "error"],
)
def test_any_reason_will_do(log: Log, reason: str) -> None:
    send(log, [("ada", 1), ("bob", 2)])
    with Group(log, "orders", "billing", Order, rules=SLOW) as group:
        first, second = take_all(group, 2)
        first.nack(0.0, reason).result(WAIT_S)
        second.reject(reason).result(WAIT_S)
        take(group).ack().result(WAIT_S)
    (letter,) = letters(log)
    assert 2 <= len(letter.error) <= 10_000


def test_a_pause_that_makes_no_sense_is_refused(log: Log) -> None:
    send(log, [("ada", 1)])
    with Group(log, "orders", "billing", Order, rules=SLOW) as group:
        message = take(group)
        for delay_s in (math.inf, math.nan, -1.0):
            with pytest.raises(UsageError, match="delay_s"):
                message.nack(delay_s)
        message.ack().result(WAIT_S)
        with pytest.raises(UsageError, match="count"):
            group.take_many(0)
    for rules in (
        GroupRules(breaker_letters=0),
        GroupRules(member_in_flight_max=0),
        GroupRules(deliveries_max=10**6),
    ):
        with pytest.raises(UsageError, match="must be"):
            Group(log, "orders", "billing", rules=rules)


def test_an_error_that_nobody_knows_leaves_nobody_waiting(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(log, [("ada", 1)])
    group = Group(log, "orders", "billing", Order, rules=SLOW)
    group.__enter__()
    message = take(group)

    def fail(*_: object) -> bytes:
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr("penstock.groups.journal.pack_step", fail)
    monkeypatch.setattr(threading, "excepthook", lambda failed: None)
    with pytest.raises(PenstockError, match="nobody expected this"):
        message.ack().result(WAIT_S)
    with pytest.raises(PenstockError, match="nobody expected this"):
        group.take(WAIT_S)
    group.__exit__(None, None, None)


def test_a_message_may_be_acknowledged_twice_in_a_transaction(log: Log) -> None:
    send(log, [("ada", 1), ("ada", 2)])
    with Group(log, "orders", "billing", Order, rules=SLOW) as group:
        message = take(group)
        with group.transaction(("till", 1)) as tx:
            tx.ack(message, message)
            tx.ack(message)
        with group.transaction(("till", 1)) as tx:  # tried again: it happens once
            tx.ack(message)
        assert group.last_transaction("till") == 1
        assert take(group).data.number == 2


def test_many_of_a_key_are_given_back(log: Log) -> None:
    count = 1_000
    with Transaction(log, "till") as tx:  # at once: what is read together comes together
        for number in range(count):
            tx.send("orders", Order("ada", number))
    rules = GroupRules(key_batch=count, lease_s=60, member_in_flight_max=count)
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        first = take_all(group, count)
        first[0].nack(0.0).result(WAIT_S)
        again = take_all(group, count)
        assert [message.data.number for message in again] == list(range(count))
        assert [message.deliveries for message in again[:2]] == [2, 1]


def test_order_holds_while_a_stream_grows(log: Log) -> None:
    """What was not read before it grew comes before what was sent after it."""
    rules = GroupRules(outstanding_max=10, lease_s=60)
    users = [f"u{n}" for n in range(8)]
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        send(log, [(user, n) for n in range(6) for user in users])
        wait_until(lambda: group.is_coordinating, WAIT_S, "the group")
        held = [take(group)]
        log.apply([GrowStream("orders", 7)])
        send(log, [(user, n) for n in range(6, 12) for user in users])
        seen: dict[str, list[int]] = {user: [] for user in users}
        for _ in range(12 * len(users)):
            message = held.pop() if held else take(group)
            seen[message.data.user].append(message.data.number)
            message.ack().result(WAIT_S)
    assert seen == {user: list(range(12)) for user in users}


def test_whoever_lost_the_group_hears_of_it(log: Log) -> None:
    """In the loop over messages, and when the block is left."""
    send(log, [(f"u{n}", n) for n in range(20)])
    with pytest.raises(ClaimLostError):
        with Group(log, "orders", "billing", Order, rules=SLOW) as group:
            for message in group:
                log.hold(NAME.producer)  # as a process does that takes over
                message.ack()
    with pytest.raises(ClaimLostError):
        with Group(log, "orders", "billing", Order, rules=SLOW) as group:
            message = take(group)
            log.hold(NAME.producer)
            message.ack()


def test_what_cannot_be_read_takes_no_others_with_it(log: Log) -> None:
    class Fussy(Order):
        def __post_init__(self) -> None:
            if self.number == 1:
                raise ValueError("no ones")

    send(log, [("ada", n) for n in range(4)])
    rules = GroupRules(key_batch=4, lease_s=60)
    with Group(log, "orders", "billing", Fussy, rules=rules) as group:
        seen: list[int] = []
        while len(seen) < 3:
            for message in take_all(group, 1):  # type: ignore[arg-type]
                message.ack().result(WAIT_S)
                seen.append(message.data.number)
    assert seen == [0, 2, 3]
    assert [letter.offset for letter in letters(log)] == [1]


def test_a_transaction_waits_for_a_log_that_is_busy(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(log, [("ada", 1)])
    whole, left = PreparedTransaction.check, [2]

    def check(self: PreparedTransaction, *rest: object) -> None:
        if left[0]:
            left[0] -= 1
            raise LogBusyError("not now")
        whole(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PreparedTransaction, "check", check)
    with Group(log, "orders", "billing", Order, rules=SLOW) as group:
        with group.transaction() as tx:
            tx.ack(take(group))
        assert group.take(0.2) is None


def test_messages_of_another_group_are_refused(log: Log) -> None:
    send(log, [("ada", 1), ("bob", 2)])
    with (
        Group(log, "orders", "billing", Order, rules=SLOW) as billing,
        Group(log, "orders", "shipping", Order, rules=SLOW) as shipping,
    ):
        mine, others = take(billing), take(shipping)
        with pytest.raises(UsageError, match="belongs to another group than orders/billing"):
            billing.ack([mine, others])
        billing.ack([mine]).result(WAIT_S)


def test_a_drop_that_is_refused_changes_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.groups.control.CLAIM_S", 0.3)
    with Group(log, "orders", "billing", Order) as group:
        wait_until(lambda: group.is_coordinating, WAIT_S, "the group")
        set_paused(log, NAME, paused=True)
        with pytest.raises(GroupBusyError):
            drop_group(log, NAME)
        assert is_paused(log, NAME)
    drop_group(log, NAME)
    assert not is_paused(log, NAME)


def test_a_member_of_a_group_that_stands_by_waits(log: Log) -> None:
    send(log, [("ada", 1)])
    with Group(log, "orders", "billing", Order) as first:
        wait_until(lambda: first.is_coordinating, WAIT_S, "the group")
        with Group(log, "orders", "billing", Order) as second:
            with second.member("till") as member:
                assert member.take(0.2) is None


@pytest.mark.row("X8", engine="embedded")
def test_an_entry_that_another_has_changed_is_not_overwritten(log: Log) -> None:
    """A plain producer writes to the table meanwhile: each addition counts, or conflicts."""
    log.apply([CreateStream(declare("balances", Balance, key="user", table=True))])
    rounds = 150
    stop = threading.Event()
    added = [0]

    def meddle() -> None:
        while not stop.is_set():
            before = Table(log, "balances", Balance).get("ada") or Balance("ada", 0)
            try:
                with Transaction(log, "meddler") as tx:
                    tx.put("balances", "ada", Balance("ada", before.total + 1000))
                added[0] += 1
            except PenstockError:
                continue

    with Group(log, "orders", "billing", Order, rules=SLOW) as group:
        thread = threading.Thread(target=meddle)
        thread.start()
        try:
            conflicts = 0
            for _ in range(rounds):
                (entry,) = log.get("balances", [b"ada"], settled=True)
                offset = None if entry is None else entry.offset
                try:
                    with group.transaction() as tx:
                        tx.put_if("balances", "ada", Balance("ada", -1), offset)
                except ConflictError:
                    conflicts += 1
                    continue
                changes = [
                    event
                    for batch in log.read("balances", 0, offset or 0)
                    for event in batch.events(Balance)
                ]
                last = -1 if offset is None else offset
                mine = next(
                    event
                    for event in changes
                    if event.data == Balance("ada", -1) and event.offset > last
                )
                between = [event for event in changes if last < event.offset < mine.offset]
                assert not between, "another's change was overwritten"
        finally:
            stop.set()
            thread.join()
    assert conflicts, "nobody was in the way: the test has shown nothing"


def test_a_commit_that_was_refused_loses_no_snapshot(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the turn of the ring everything is saved whole, also if it takes a second try."""
    monkeypatch.setattr(saved, "RING", 4)
    monkeypatch.setattr("penstock.groups.journal.RING", 4)
    log.apply([CreateStream(declare("balances", Balance, key="user", table=True))])
    send(log, [(f"u{n}", n) for n in range(60)])
    with (
        contextlib.suppress(ClaimLostError),
        Group(log, "orders", "billing", Order, rules=SLOW) as group,
    ):
        done: set[int] = set()
        while len(done) < 50:
            message = take(group)
            message.ack().result(WAIT_S)
            done.add(message.data.number)
            with pytest.raises(ConflictError):
                with group.transaction() as tx:
                    tx.put_if("balances", "ada", Balance("ada", 1), 77)
        with pytest.raises(LeaseLostError):
            message.ack()
        log.hold(NAME.producer)  # nothing more is saved, not even at the end
        with pytest.raises(PenstockError):
            take(group).ack().result(WAIT_S)
    with Group(log, "orders", "billing", Order, rules=SLOW) as group:
        left = {message.data.number for message in take_all(group, 10)}
        assert left == set(range(60)) - done
        assert group.take(0.2) is None
