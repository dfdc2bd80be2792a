"""What a group does when something happens that nobody thought of."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import Producer as Other

from penstock import Commit, DeadLetter, GroupRules, Log, read_events
from penstock.errors import ClaimLostError, LogUnreachableError, PenstockError
from penstock.groups.control import claims_of
from penstock.groups.group import Group
from penstock.groups.names import GroupName
from penstock.groups.state import GroupState
from penstock.log.kafka.log import KafkaLog
from penstock.log.writing.commit import next_sequence
from penstock.testing.brokers import Brokers
from penstock.testing.processes import wait_until
from tests.groups.conftest import Order, send
from tests.groups.test_group import WAIT_S, take

NAME = GroupName("orders", "billing")
SLOW = GroupRules(lease_s=60, backoff_s=0.0)
EMBEDDED = pytest.mark.parametrize("url", ["embedded"], indirect=True)


class Fussy(Order):
    """What some orders are not."""

    def __post_init__(self) -> None:
        raise ValueError("no order will do")


@pytest.mark.row("H17", engine="kafka")
@pytest.mark.parametrize("url", ["kafka"], indirect=True)
@pytest.mark.parametrize(("name", "size"), [("X-Trace-Id", 1), ("traceid", 100_000)])
def test_a_foreign_header_does_not_end_the_group(
    log: KafkaLog, broker: Brokers, name: str, size: int
) -> None:
    topic = f"{log.url.rpartition('/')[2]}.default.orders"
    other = Other({"bootstrap.servers": broker.addresses[0]})
    headers: Any = [(name, b"x" * size), ("ok", b"kept")]
    other.produce(topic, b'{"user":"ada","number":1}', "ada", 0, headers=headers)
    other.produce(topic, b'{"user":"bob","number":2}', "bob", 0)
    assert other.flush(WAIT_S) == 0
    with Group(log, "orders", "billing", Order, rules=SLOW) as group:
        first = take(group)
        first.reject("it is odd").result(WAIT_S)
        take(group).ack().result(WAIT_S)
    (letter,) = read_events(log, "orders_dead", DeadLetter)
    assert letter.data.error == "it is odd"
    assert "ada" in letter.data.data
    assert dict(letter.headers) == ({"ok": "kept"} if size == 1 else {})


@EMBEDDED
@pytest.mark.row("H17", engine="embedded")
def test_a_letter_tells_what_no_record_could(log: Log) -> None:
    """The group's class refuses what is there: the letter has it as it is stored."""
    send(log, [("ada", 1)])
    with Group(log, "orders", "billing", Fussy, rules=SLOW) as group:
        assert group.take(1.0) is None
        wait_until(
            lambda: len(list(read_events(log, "orders_dead", DeadLetter))) == 1, WAIT_S, "it"
        )
    (letter,) = read_events(log, "orders_dead", DeadLetter)
    assert '"user":"ada"' in letter.data.data
    assert letter.data.id
    assert "could not be read" in letter.data.error


@EMBEDDED
def test_a_callback_may_use_the_group_when_it_fails(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(log, [(f"u{n}", n) for n in range(3)])
    heard: list[type[BaseException]] = []
    saving, go_on = threading.Event(), threading.Event()
    group = Group(log, "orders", "billing", Order, rules=SLOW)
    group.__enter__()
    first, second, third = (take(group) for _ in range(3))
    work = group._coordinator.work()

    def wait(*_: object) -> None:
        saving.set()
        go_on.wait(WAIT_S)

    def give_back(done: Future[None]) -> None:
        try:
            third.release()
        except PenstockError as error:
            heard.append(type(error))

    monkeypatch.setattr(work._writer, "commit", wait)
    first.ack()
    assert saving.wait(WAIT_S)
    second.ack().add_done_callback(give_back)  # in the next round
    failing = threading.Thread(
        target=group._coordinator._fail, args=(ClaimLostError("gone"),), daemon=True
    )
    failing.start()
    failing.join(10)
    assert heard == [ClaimLostError]
    go_on.set()
    group.__exit__(None, None, None)


@EMBEDDED
def test_an_error_while_time_passes_leaves_nobody_waiting(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(log, [("ada", 1)])
    group = Group(log, "orders", "billing", Order, rules=SLOW)
    group.__enter__()
    message = take(group)
    monkeypatch.setattr(threading, "excepthook", lambda failed: None)

    def fail(state: GroupState, now_s: float) -> None:
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr(GroupState, "expire", fail)
    with pytest.raises(PenstockError, match="nobody expected this"):
        message.ack().result(WAIT_S)
    with pytest.raises(PenstockError, match="nobody expected this"):
        group.__exit__(None, None, None)


@EMBEDDED
@pytest.mark.row("X12", engine="embedded")
def test_whoever_lost_the_claim_before_it_began_fences_nobody(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is away while one takes over; the next one has the claim by the time it is back."""
    away, held = threading.Event(), threading.Event()
    away.set()
    hold = log.hold

    def hold_later(name: str, **more: Any) -> Any:
        if name == NAME.producer and away.is_set():
            held.set()
            raise LogUnreachableError("away")
        return hold(name, **more)

    monkeypatch.setattr(log, "hold", hold_later)
    group = Group(log, "orders", "billing", Order)
    group.__enter__()
    assert held.wait(WAIT_S)
    other = claims_of(log, NAME, 30.0)
    assert other.acquire(threading.Event(), take_over=True)
    mine = hold(NAME.producer)
    away.clear()
    with pytest.raises(ClaimLostError):
        group.take(WAIT_S)
    group.__exit__(None, None, None)
    log.commit(mine, next_sequence(log, NAME.producer), Commit(progress={"mine": b"1"}))
    other.release()
