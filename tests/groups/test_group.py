"""Taking messages, acknowledging them and giving them back, on both engines."""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import threading
import time

import pytest

from penstock import DeadLetter, Log, read_events
from penstock.errors import ClosedError, LeaseLostError, UsageError
from penstock.groups.group import Group
from penstock.groups.messages import GroupMessage
from penstock.groups.outcomes import GroupRules
from penstock.testing.processes import wait_until
from tests.groups.conftest import Order, on_both, send

pytestmark = on_both("H17")

WAIT_S = 30.0


def take(group: Group[Order]) -> GroupMessage[Order]:
    message = group.take(WAIT_S)
    assert message is not None
    return message


def take_all(group: Group[Order], count: int) -> list[GroupMessage[Order]]:
    found: list[GroupMessage[Order]] = []
    while len(found) < count:
        more = group.take_many(count, WAIT_S)
        assert more, f"{len(found)} of {count} came"
        found += more
    return found


def test_what_is_acknowledged_does_not_come_again(log: Log) -> None:
    send(log, [(f"u{n}", n) for n in range(10)])
    with Group(log, "orders", "billing", Order) as group:
        taken = take_all(group, 10)
        assert sorted(message.data.number for message in taken) == list(range(10))
        group.ack([m for m in taken if m.data.number % 2]).result(WAIT_S)
    with Group(log, "orders", "billing", Order) as group:
        again = take_all(group, 5)
        assert sorted(message.data.number for message in again) == [0, 2, 4, 6, 8]
        group.ack(again).result(WAIT_S)
        assert group.take(0.2) is None
        send(log, [("u1", 10)])
        assert take(group).data.number == 10
    with Group(log, "orders", "shipping", Order) as other:
        assert len(take_all(other, 10)) == 10


def test_one_of_a_key_at_a_time_in_order(log: Log) -> None:
    send(log, [("ada", n) for n in range(3)])
    with Group(log, "orders", "billing", Order) as group:
        for n in range(3):
            message = take(group)
            assert message.data.number == n
            assert group.take(0.1) is None, "another one of the key"
            message.ack()


def test_several_of_a_key_together(log: Log) -> None:
    send(log, [("ada", n) for n in range(5)])
    with Group(log, "orders", "billing", Order, rules=GroupRules(key_batch=3)) as group:
        first = take_all(group, 3)
        assert [message.data.number for message in first] == [0, 1, 2]
        assert group.take(0.1) is None
        first[0].ack()
        first[1].nack(0.0)
        with pytest.raises(LeaseLostError):
            first[2].ack()
        again = take_all(group, 2)
        assert [message.data.number for message in again] == [1, 2]
        assert [message.deliveries for message in again] == [2, 1]


def test_a_lease_that_is_over(log: Log) -> None:
    send(log, [("ada", 1)])
    rules = GroupRules(lease_s=0.3, backoff_s=0.0)
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        late = take(group)
        again = take(group)
        assert (late.deliveries, again.deliveries) == (1, 2)
        assert abs(again.first_delivered - late.first_delivered) < dt.timedelta(seconds=0.1)
        with pytest.raises(LeaseLostError, match="no longer yours"):
            late.ack()
        for _ in range(3):
            again.extend(60)
        threading.Event().wait(0.5)
        again.ack().result(WAIT_S)


def test_giving_back(log: Log) -> None:
    send(log, [("ada", 1)])
    with Group(log, "orders", "billing", Order) as group:
        take(group).release()
        message = take(group)
        assert message.deliveries == 1
        message.nack(0.0, "not now").result(WAIT_S)
        message = take(group)
        assert message.deliveries == 2
        message.nack(3600.0)
        assert group.take(0.3) is None


def test_dead_letters(log: Log) -> None:
    send(log, [("ada", 1), ("bob", 2)])
    with Group(log, "orders", "billing", Order, rules=GroupRules(deliveries_max=2)) as group:
        for message in take_all(group, 2):
            if message.data.user == "bob":
                message.reject("bob is not a customer")
            else:
                message.nack(0.0, "first").result(WAIT_S)
        take(group).nack(0.0, "second").result(WAIT_S)
        assert group.take(0.2) is None
    letters = {e.data.key: e.data for e in read_events(log, "orders_dead", DeadLetter)}
    assert letters["bob"].error == "bob is not a customer"
    assert letters["bob"].tries == 1
    ada = letters["ada"]
    assert (ada.agent, ada.error, ada.tries) == ("group billing", "second", 2)
    assert ada.traceback == "first\nsecond"
    assert '"number":1' in ada.data


def test_a_clean_end_counts_nothing(log: Log) -> None:
    """What was read ahead, or handed out and not handled, was not tried."""
    send(log, [(f"u{n}", n) for n in range(20)])
    for _ in range(3):
        with Group(log, "orders", "billing", Order) as group:
            assert {message.deliveries for message in take_all(group, 20)} == {1}


def test_a_second_one_stands_by(log: Log) -> None:
    send(log, [("ada", 1)])
    told: list[str] = []
    with Group(log, "orders", "billing", Order) as first:
        late = take(first)
        with Group(log, "orders", "billing", Order, tell=told.append) as second:
            wait_until(lambda: any("standing by" in line for line in told), WAIT_S, "standing by")
            assert second.take(0.2) is None
            assert not second.is_coordinating
            first.__exit__(None, None, None)
            message = take(second)
            assert message.deliveries == 1
            with pytest.raises(ClosedError):
                late.ack()
            message.ack().result(WAIT_S)


def test_many_members_keep_the_order_of_each_key(log: Log, seed: int) -> None:
    chance = random.Random(seed)
    users = [f"u{n}" for n in range(7)]
    sent = [(chance.choice(users), n) for n in range(300)]
    send(log, sent)
    rules = GroupRules(deliveries_max=1000, breaker_letters=1000)
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        members = [MovingMember(group, seed + n) for n in range(6)]
        for member in members:
            member.start()
        wait_until(lambda: sum(len(m.done) for m in members) == len(sent), 60, "all of them")
    for member in members:
        member.join(WAIT_S)
    done = sorted(one for member in members for one in member.done)
    for user in users:
        mine = [number for _, who, number in done if who == user]
        assert mine == [n for who, n in sent if who == user]


class MovingMember(threading.Thread):
    """Handles most messages, and gives some back."""

    def __init__(self, group: Group[Order], seed: int) -> None:
        super().__init__()
        self._group = group
        self._chance = random.Random(seed)
        self.done: list[tuple[float, str, int]] = []

    def run(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                for message in self._group.take_many(self._chance.randrange(1, 8), 0.5):
                    self.handle(message)

    def handle(self, message: GroupMessage[Order]) -> None:
        what = self._chance.random()
        if what < 0.1:
            message.nack(0.0)
        elif what < 0.2:
            message.release()
        else:
            handled = time.monotonic()
            message.ack().result(WAIT_S)
            self.done.append((handled, message.data.user, message.data.number))


def test_a_member_that_is_not_heard_of(log: Log) -> None:
    send(log, [("ada", 1), ("bob", 2)])
    with Group(log, "orders", "billing", Order, rules=GroupRules(backoff_s=0.0)) as group:
        with (
            group.member("silent", heartbeat_s=0.2, heartbeats_missed_max=2) as silent,
            group.member("lively", heartbeat_s=0.2, heartbeats_missed_max=2) as lively,
        ):
            late = silent.take(WAIT_S)
            assert late is not None
            mine = lively.take(WAIT_S)
            assert mine is not None
            found: list[GroupMessage[Order]] = []
            while not found:
                lively.beat()
                found = group.take_many(1, 0.1)
            assert found[0].data == late.data
            assert found[0].deliveries == 2
            with pytest.raises(LeaseLostError):
                late.ack()
            mine.ack().result(WAIT_S)
            found[0].ack().result(WAIT_S)


def test_an_old_connection_of_a_member_does_not_give_back_what_the_new_one_has(log: Log) -> None:
    send(log, [("ada", 1), ("bob", 2)])
    with Group(log, "orders", "billing", Order) as group:
        with group.member("till") as new:
            with group.member("till") as old:
                assert old.take(WAIT_S) is not None
                mine = new.take(WAIT_S)
                assert mine is not None
            back = take(group)
            assert back.deliveries == 1
            assert back.data != mine.data
            mine.ack().result(WAIT_S)


def test_rules_that_cannot_be_kept(log: Log) -> None:
    with pytest.raises(UsageError, match="deliveries_max must be 1 or more"):
        Group(log, "orders", "billing", rules=GroupRules(deliveries_max=0))
