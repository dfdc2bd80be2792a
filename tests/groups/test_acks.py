"""Single acknowledgements, while leases end and messages are given back at the same moments."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import pytest

from penstock import Group, GroupRules, Log
from penstock.errors import LeaseLostError
from penstock.groups.messages import GroupMessage
from tests.groups.conftest import Order, on_both, send

pytestmark = on_both("H17", "X8")

WAIT_S = 60.0
MEMBERS = 6
MESSAGES = 3_000
LEASE_S = 0.02


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Threads meet at every step of each other."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Ack(NamedTuple):
    number: int
    done: Future[None]


class Member(threading.Thread):
    """Takes messages, and acknowledges them sooner or later than their leases end."""

    def __init__(self, group: Group[Order], acked: Counter[int], seed: int) -> None:
        super().__init__()
        self._group = group
        self._acked = acked
        self._chance = random.Random(seed)
        self._open: list[Ack] = []
        self.lost = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while len(self._acked) < MESSAGES:
                for message in self._group.take_many(self._chance.randrange(1, 64), 0.1):
                    self._handle(message)
                for number, done in self._open:
                    done.result(WAIT_S)
                    self._acked[number] += 1
                self._open.clear()
        except BaseException as error:
            self.failure = error
            raise

    def _handle(self, message: GroupMessage[Order]) -> None:
        threading.Event().wait(self._chance.choice([0.0] * 20 + [LEASE_S]))
        try:
            if self._chance.random() < 0.05:
                message.release()
            else:
                self._open.append(Ack(message.data.number, message.ack()))
        except LeaseLostError:
            self.lost += 1


def test_what_counts_as_acknowledged_never_comes_again(log: Log, seed: int) -> None:
    send(log, [(f"u{n % 500}", n) for n in range(MESSAGES)])
    rules = GroupRules(lease_s=LEASE_S, backoff_s=0.0, deliveries_max=10_000, breaker_letters=10**6)
    acked = Counter[int]()
    with Group(log, "orders", "billing", Order, rules=rules) as group:
        members = [Member(group, acked, seed + n) for n in range(MEMBERS)]
        for member in members:
            member.start()
        for member in members:
            member.join(WAIT_S * 3)
        assert [member.failure for member in members] == [None] * MEMBERS
        assert group.take(0.5) is None
    assert sum(member.lost for member in members) > 0
    assert acked == Counter(range(MESSAGES))


def test_an_acknowledgement_counts_once(log: Log) -> None:
    send(log, [(f"u{n}", n) for n in range(200)])
    with Group(log, "orders", "billing", Order) as group:
        for _ in range(200):
            message = group.take(WAIT_S)
            assert message is not None
            done = message.ack()
            with pytest.raises(LeaseLostError):
                message.ack()
            done.result(WAIT_S)
            with pytest.raises(LeaseLostError):
                message.ack()
        assert group.take(0.1) is None
