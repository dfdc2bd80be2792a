"""A program whose threads are members of a group; it writes down what it takes and acknowledges.

python -m tests.groups.working LOG FILE [RULES [effects]]     until everything is acknowledged

With effects, each message is acknowledged in one transaction with a receipt and a changed entry.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

import msgspec

import penstock
from penstock import Record
from penstock.errors import ClaimLostError, LeaseLostError, PenstockError
from penstock.groups.group import Group
from penstock.groups.messages import GroupMessage
from penstock.groups.outcomes import GroupRules
from tests.groups.conftest import Order

MEMBERS = 4


class Worker(threading.Thread):
    """A member."""

    def __init__(self, group: Group[Order], file: int, has_effects: bool) -> None:
        super().__init__()
        self._group = group
        self._file = file
        self._has_effects = has_effects

    def say(self, *words: object) -> None:
        line = " ".join(map(str, (os.getpid(), *words)))
        os.write(self._file, f"{line}\n".encode())

    def run(self) -> None:
        try:
            while not self._group.is_coordinating or self._group.lag():
                for message in self._group.take_many(4, 0.5):
                    self.handle(message)
        except PenstockError as error:
            self.say("failed", type(error).__name__)

    def handle(self, message: GroupMessage[Order]) -> None:
        number = message.data.number
        self.say("taken", number, message.deliveries)
        if number < 0:  # poison
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if self._has_effects:
                self.follow(message)
            else:
                message.ack().result(60)
        except LeaseLostError:
            self.say("lost", number)
        else:
            self.say("acked", number)

    def follow(self, message: GroupMessage[Order]) -> None:
        """The order of a key's messages makes reading and changing its entry safe."""
        user, number = message.data.user, message.data.number
        with self._group.transaction() as tx:
            before = tx.get("seen", user, Seen) or Seen(user, [])
            tx.ack(message)
            tx.send("receipts", Order(user, number))
            tx.put("seen", user, Seen(user, [*before.numbers, number]))


class Seen(Record):
    """Which orders of a user were handled, in order."""

    user: str
    numbers: list[int]


def main(url: str, path: str, rules: str = "{}", effects: str = "") -> int:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    given = msgspec.json.decode(rules, type=GroupRules)
    with (
        penstock.open(url) as log,
        contextlib.suppress(ClaimLostError),  # which the members have said
        Group(log, "orders", "billing", Order, rules=given, claim_lease_s=2.0) as group,
    ):
        members = [Worker(group, file, bool(effects)) for _ in range(MEMBERS)]
        for member in members:
            member.start()
        for member in members:
            member.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
