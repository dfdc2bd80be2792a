"""A program that handles payments one after the other, and keeps its effects in a database.

python -m tests.connect.effects LOG DATABASE [IDLE_S]     until no message came for so long
"""

from __future__ import annotations

import sys
import time

import psycopg

import penstock
from penstock import Group, GroupRules
from tests.connect.test_outbox import Payment

EFFECT = "INSERT INTO effects (id, amount) VALUES (%s, %s) ON CONFLICT (id) DO NOTHING"


def main(url: str, database: str, idle_s: str = "3600") -> int:
    rules = GroupRules(order="stream", lease_s=60)
    with (
        penstock.open(url) as log,
        psycopg.connect(database) as connection,
        Group(log, "payments", "ledger", Payment, rules=rules, claim_lease_s=2.0) as group,
    ):
        last = time.monotonic()
        while time.monotonic() - last < float(idle_s) or not group.is_coordinating:
            message = group.take(0.2)
            if message is None:
                continue
            last = time.monotonic()
            with connection.transaction():
                connection.execute(EFFECT, (message.event.id, message.data.amount))
            message.ack().result(60)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
