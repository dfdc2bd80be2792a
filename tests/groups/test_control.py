"""Groups as whoever runs them sees them, on both engines."""

from __future__ import annotations

import datetime as dt

import pytest

from penstock import CreateStream, DropStream, Log, declare
from penstock.errors import BadNameError, GroupBusyError, UnknownObjectError, UsageError
from penstock.groups.control import drop_group, list_groups, reset_group, set_paused, show_group
from penstock.groups.group import Group
from penstock.groups.names import GroupName
from penstock.groups.outcomes import GroupRules
from penstock.log.kafka.log import KafkaLog
from penstock.testing.processes import wait_until
from tests.groups.conftest import Order, make_stream, on_both, send
from tests.groups.test_group import WAIT_S, take, take_all

pytestmark = on_both("H17")
NAME = GroupName("orders", "billing")


def test_how_a_group_is_doing(log: Log) -> None:
    assert list_groups(log) == []
    send(log, [(f"u{n}", n) for n in range(10)])
    with Group(log, "default.orders", "billing", Order) as group:
        group.ack(take_all(group, 10)[:4]).result(WAIT_S)
        found = show_group(log, NAME)
        assert found.coordinator is not None
        assert 6 <= found.lag.events <= (60 if isinstance(log, KafkaLog) else 6)
        assert found.lag_s is not None
        assert 0 <= found.lag_s < 60
    assert [(one.stream, one.name) for one in list_groups(log)] == [NAME]
    assert show_group(log, NAME).coordinator is None
    with pytest.raises(UnknownObjectError, match="it has: billing"):
        show_group(log, GroupName("orders", "shipping"))


def test_a_paused_group_hands_out_nothing(log: Log) -> None:
    send(log, [(f"u{n}", n) for n in range(3)])
    told: list[str] = []
    with Group(log, "orders", "billing", Order, tell=told.append) as group:
        take(group).ack().result(WAIT_S)
        set_paused(log, NAME, paused=True)
        wait_until(lambda: any("is paused" in line for line in told), WAIT_S, "the pause")
        assert group.take(0.2) is None
    with Group(log, "orders", "billing", Order) as group:
        assert group.take(1.0) is None, "it is still paused"
        set_paused(log, NAME, paused=False)
        take(group)


def test_starting_elsewhere(log: Log) -> None:
    send(log, [(f"u{n}", n) for n in range(6)])
    later = dt.datetime.now(dt.UTC)
    with Group(log, "orders", "billing", Order, start="latest") as group:
        send(log, [("late", 6)])  # where it starts was decided when it was opened
        take(group).ack().result(WAIT_S)
        with pytest.raises(GroupBusyError, match="is coordinated by process"):
            reset_group(log, NAME, "earliest")
        assert set(reset_group(log, NAME, "earliest", dry_run=True)) == {0, 1}
    reset_group(log, NAME, "earliest")
    with Group(log, "orders", "billing", Order) as group:
        assert {m.data.number for m in take_all(group, 7)} == set(range(7))
    reset_group(log, NAME, later)
    with Group(log, "orders", "billing", Order) as group:
        message = take(group)
        assert (message.data.number, message.deliveries) == (6, 1)


def test_a_group_that_is_dropped(log: Log) -> None:
    send(log, [("ada", 1)])
    with Group(log, "orders", "billing", Order) as group:
        take(group).ack().result(WAIT_S)
        with pytest.raises(GroupBusyError):
            drop_group(log, NAME)
    drop_group(log, NAME)
    assert log.progress_items("group/") == {}
    with Group(log, "orders", "billing", Order) as group:
        assert take(group).data.number == 1


def test_a_stream_that_was_made_anew(log: Log) -> None:
    send(log, [("ada", 1)])
    with Group(log, "orders", "billing", Order) as group:
        take(group).ack().result(WAIT_S)
    log.apply([DropStream("orders")])
    make_stream(log)
    with Group(log, "orders", "billing", Order) as group:
        with pytest.raises(UsageError, match="dropped and created again"):
            group.take(WAIT_S)
    reset_group(log, NAME, "earliest")
    send(log, [("ada", 2)])
    with Group(log, "orders", "billing", Order) as group:
        assert take(group).data.number == 2


def test_order_of_the_whole_stream(log: Log) -> None:
    log.apply([CreateStream(declare("one", Order, key="user", partitions=1))])
    send(log, [(f"u{n}", n) for n in range(5)])
    rules = GroupRules(order="stream")
    with Group(log, "orders", "strict", Order, rules=rules) as group:
        if isinstance(log, KafkaLog):
            with pytest.raises(UsageError, match="requires a stream with one partition"):
                group.take(WAIT_S)
            return
        for n in range(5):
            message = take(group)
            assert message.data.number == n
            assert group.take(0.05) is None
            message.ack().result(WAIT_S)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 101, "é"])
def test_names(log: Log, name: str) -> None:
    with pytest.raises(BadNameError):
        Group(log, "orders", name)
