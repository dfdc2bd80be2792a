"""What a coordinator leaves behind when it is gone, and what the next one makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Commit, Log, Producer
from penstock import open as open_log
from penstock.groups import journal, saved
from penstock.groups.group import Group
from penstock.groups.work import GroupWork
from tests.groups.conftest import Order, make_stream, send
from tests.groups.test_group import WAIT_S, take_all


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """With a short ring; and coordinators that end as if they were killed."""
    monkeypatch.setattr(saved, "RING", 4)
    monkeypatch.setattr(journal, "RING", 4)
    monkeypatch.setattr(GroupWork, "_compose_end", lambda self: Commit())
    with open_log(tmp_path / "log.db", create=True) as opened:
        make_stream(opened)
        yield opened


def homes(log: Log) -> dict[int, list[str]]:
    """Users whose events are in each partition."""
    found: dict[int, list[str]] = {0: [], 1: []}
    with Producer(log) as producer:
        for n in range(40):
            user = f"u{n}"
            found[producer.send("orders", Order(user, -1)).result(WAIT_S).partition].append(user)
    return found


@pytest.mark.row("H17", engine="embedded")
def test_what_was_acknowledged_before_a_takeover_is_not_lost(log: Log) -> None:
    """Also where the next coordinator has nothing to do with that partition for long."""
    users = homes(log)
    with Group(log, "orders", "billing", Order) as group:
        group.ack(take_all(group, 40)).result(WAIT_S)
    for n in range(12):  # three times around the ring, in one partition
        send(log, [(users[1][0], n)])
        with Group(log, "orders", "billing", Order) as group:
            (message,) = take_all(group, 1)
            assert message.data.number == n
            message.ack().result(WAIT_S)
    with Group(log, "orders", "billing", Order) as group:
        assert group.take(1.0) is None


def test_a_snapshot_of_what_was_not_read_yet(log: Log) -> None:
    """A coordinator saves what its predecessor knew, though it has read little of it."""
    users = homes(log)
    with Group(log, "orders", "billing", Order) as group:
        taken = take_all(group, 40)
        group.ack([m for m in taken if m.data.user != users[0][0]]).result(WAIT_S)
    for _ in range(12):
        with Group(log, "orders", "billing", Order) as group:
            (message,) = take_all(group, 1)
            assert message.data.user == users[0][0]
            if message.deliveries >= 3:
                break
            message.nack(0.0).result(WAIT_S)
    with Group(log, "orders", "billing", Order) as group:
        (message,) = take_all(group, 1)
        assert message.data.user == users[0][0]
        message.ack().result(WAIT_S)
        assert group.take(0.5) is None
