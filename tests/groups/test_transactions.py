"""Acknowledging in one transaction with what follows, on both engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock import CreateStream, DropStream, Log, Record, Table, declare, read_events
from penstock.errors import (
    ConflictError,
    LeaseLostError,
    LimitError,
    RecordError,
    SequenceError,
    TransactionStateError,
    UsageError,
)
from penstock.groups.group import Group
from penstock.groups.outcomes import GroupRules
from tests.groups.conftest import Order, on_both, send
from tests.groups.test_group import WAIT_S, take, take_all

pytestmark = on_both("H19", "X8")


class Receipt(Record):
    order: int


class Balance(Record):
    user: str
    orders: int


@pytest.fixture
def group(log: Log) -> Iterator[Group[Order]]:
    log.apply(
        [
            CreateStream(declare("receipts", Receipt)),
            CreateStream(
                declare("balances", Balance, key="user", table=True, writer="group/orders/billing")
            ),
        ]
    )
    send(log, [(f"u{n}", n) for n in range(4)])
    with Group(log, "orders", "billing", Order, rules=GroupRules(lease_s=60)) as group:
        yield group


def receipts(log: Log) -> list[int]:
    return sorted(event.data.order for event in read_events(log, "receipts", Receipt))


def test_an_acknowledgement_with_what_follows(log: Log, group: Group[Order]) -> None:
    first, second = take_all(group, 4)[:2]
    with group.transaction() as tx:
        tx.ack(first, second)
        for message in (first, second):
            tx.send("receipts", Receipt(order=message.data.number))
            tx.put("balances", message.data.user, Balance(message.data.user, 1))
        assert receipts(log) == []
    assert receipts(log) == sorted([first.data.number, second.data.number])
    entry = Table(log, "balances", Balance).get(first.data.user)
    assert entry == Balance(first.data.user, 1)
    with pytest.raises(LeaseLostError):
        first.ack()
    assert group.lag().events == 2


def test_what_is_rolled_back_never_happened(log: Log, group: Group[Order]) -> None:
    message = take(group)
    with pytest.raises(ZeroDivisionError), group.transaction() as tx:
        tx.ack(message)
        tx.send("receipts", Receipt(order=1))
        raise ZeroDivisionError
    assert tx.state == "rolled back"
    with pytest.raises(TransactionStateError, match="begin another"):
        tx.send("receipts", Receipt(order=1))
    assert receipts(log) == []
    message.ack().result(WAIT_S)


def test_a_message_that_is_not_yours_any_more(log: Log, group: Group[Order]) -> None:
    message, other = take_all(group, 2)
    message.release()
    with pytest.raises(LeaseLostError), group.transaction() as tx:
        tx.ack(other, message)
        tx.send("receipts", Receipt(order=1))
    assert receipts(log) == []
    other.ack().result(WAIT_S)


def test_the_same_transaction_happens_once(log: Log, group: Group[Order]) -> None:
    for _ in range(2):
        with group.transaction(("till-7", 5)) as tx:
            tx.send("receipts", Receipt(order=1))
    group.__exit__(None, None, None)
    with Group(log, "orders", "billing", Order) as again:
        take(again).release()
        with again.transaction(("till-7", 5)) as tx:
            tx.send("receipts", Receipt(order=1))
        with again.transaction(("till-7", 6)) as tx:
            tx.send("receipts", Receipt(order=2))
        with pytest.raises(SequenceError, match="must increase"):
            with again.transaction(("till-7", 4)) as tx:
                tx.send("receipts", Receipt(order=3))
    assert receipts(log) == [1, 2]


def test_an_entry_that_has_changed(log: Log, group: Group[Order]) -> None:
    def put(orders: int, offset: int | None) -> None:
        with group.transaction() as tx:
            tx.put_if("balances", "ada", Balance("ada", orders), offset)

    take(group).release()
    put(1, None)
    with pytest.raises(ConflictError, match="must not exist"):
        put(2, None)
    (entry,) = log.get("balances", [b"ada"])
    assert entry is not None
    put(2, entry.offset)
    with pytest.raises(ConflictError, match="is at offset"):
        put(3, entry.offset)
    assert Table(log, "balances", Balance).get("ada") == Balance("ada", 2)


def test_one_that_is_refused_fails_alone(log: Log, group: Group[Order]) -> None:
    """Together with others, whose commit it would be."""
    messages = take_all(group, 3)
    bad, good = group.transaction(), group.transaction()
    with bad:
        bad.ack(messages[0])
        bad.send("receipts", Receipt(order=1))
        log.apply([DropStream("receipts")])
        log.apply([CreateStream(declare("receipts", Receipt))])
        with good:
            good.ack(messages[1])
            good.send("receipts", Receipt(order=2))
        done = messages[2].ack()
        with pytest.raises(UsageError, match="dropped and created again"):
            bad.commit()
    done.result(WAIT_S)
    assert receipts(log) == [2]
    messages[0].ack().result(WAIT_S)


def test_what_is_wrong_is_said_at_once(log: Log, group: Group[Order]) -> None:
    with group.transaction() as tx:
        with pytest.raises(RecordError):
            tx.send("receipts", {"order": "one"})
        with pytest.raises(UsageError, match="not a table"):
            tx.put("receipts", "ada", Receipt(order=1))
        with pytest.raises(LimitError, match="transaction_memory_bytes_max"):
            for _ in range(2000):
                tx.send("receipts", Receipt(order=1), headers=BIG)
        tx.roll_back()
    assert receipts(log) == []


BIG = {"note": "x" * 16_000}


def test_ids_of_the_producer_on_kafka(log: Log, group: Group[Order]) -> None:
    log.apply([CreateStream(declare("unique", Receipt, ids="producer"))])
    with group.transaction() as tx:
        if log.url.startswith("kafka:"):
            with pytest.raises(UsageError, match="its own transactional session"):
                tx.send("unique", Receipt(order=1), id=1)
        else:
            tx.send("unique", Receipt(order=1), id=1)


def test_the_same_transaction_twice_at_once(log: Log, group: Group[Order]) -> None:
    take(group).release()
    both = [group.transaction(("till-7", 1)) for _ in range(2)]
    with both[0], both[1]:
        for tx in both:
            tx.send("receipts", Receipt(order=1))
        threads = [threading.Thread(target=tx.commit) for tx in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert receipts(log) == [1]
