"""TableContract: the latest value per key, now, at a pinned moment, and as a whole."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest

from penstock.errors import (
    LimitError,
    PinExpiredError,
    UsageError,
)
from penstock.log.api import Commit, Log
from penstock.log.declaring.objects import AlterStream
from penstock.log.reading.read import read_changes, read_events
from penstock.log.reading.table import Table
from penstock.log.writing.transaction import Transaction
from penstock.testing.contract.setting import (
    Harness,
    OnEngine,
    Order,
    commit,
    create,
    make_part,
)


class TableContract(OnEngine):
    # TableContract

    def test_a_table_keeps_the_latest_value_per_key(self, log: Log) -> None:
        create(log, "t", table=True, partitions=2)
        with Transaction(log, "p") as tx:
            for n in range(30):
                tx.send("t", Order(f"u{n % 10}", n))
        table = Table(log, "t", Order)
        assert table.get("u3") == Order("u3", 23)
        with Transaction(log, "p") as tx:
            tx.send("t", None, key="u3")
            tx.send("t", Order("u4", 99))
            tx.send("t", None, key="u5")
            tx.send("t", Order("u5", 1, "again"))
        assert table.get_many(["u3", "u4", "u5", "nobody"]) == [
            None,
            Order("u4", 99),
            Order("u5", 1, "again"),
            None,
        ]
        keys = [key for key, _ in table.items()]
        assert keys == [f"u{n}".encode() for n in range(10) if n != 3]
        wanted = {e.key: e.data for e in read_changes(log, "t", Order)}
        assert dict(table.items()) == {k: v for k, v in wanted.items() if v is not None}
        with pytest.raises(UsageError, match="read_changes"):
            read_events(log, "t", Order)

    @pytest.mark.row("X8")
    def test_a_table_is_written_by_its_writer_alone(self, log: Log) -> None:
        create(log, "t", table=True, writer="group/orders/billing")
        with Transaction(log, "group/orders/billing") as tx:
            tx.put("t", "ada", Order("ada", 1))
        with Transaction(log, "group/orders/billing/part") as tx:
            tx.put("t", "bob", Order("bob", 2))
        for other in ("group/orders/billing2", "group/orders", "p"):
            refused = pytest.raises(UsageError, match="only group/orders/billing may write")
            with refused, Transaction(log, other) as tx:
                tx.put("t", "ada", Order("ada", 3))
            holder = log.hold(other)
            with pytest.raises(UsageError, match="only group/orders/billing may write"):
                log.stage(holder, 10, make_part(log, "t", [4]))
        assert Table(log, "t", Order).get("ada") == Order("ada", 1)
        with pytest.raises(UsageError, match="only a table has a writer"):
            create(log, "s", writer="app/shop")
        spec = msgspec.structs.replace(log.stream("t").spec, writer=None)
        log.apply([AlterStream(spec)])
        with Transaction(log, "p") as tx:
            tx.put("t", "ada", Order("ada", 5))
        assert Table(log, "t", Order).get("ada") == Order("ada", 5)

    def test_a_table_is_read_in_pages_in_order_of_key(self, log: Log) -> None:
        create(log, "t", table=True, partitions=3)
        with Transaction(log, "p") as tx:
            for n in range(25):
                tx.send("t", Order(f"u{n:02}", n))
        table = Table(log, "t", Order)
        pages = [table.page(limit=10)]
        while pages[-1]:
            pages.append(table.page(after=pages[-1][-1][0], limit=10))
        assert [len(page) for page in pages] == [10, 10, 5, 0]
        assert [value.amount for page in pages for _, value in page] == list(range(25))
        with pytest.raises(LimitError, match="page_rows_max"):
            table.page(limit=10**9)

    def test_a_pinned_moment_stays_readable(self, harness: Harness, log: Log) -> None:
        create(log, "t", table=True)
        commit(log, "p", 0, "t", [1, 2, 3])
        pin = log.pin()
        with Transaction(log, "q") as tx:
            tx.send("t", Order("u1", 100))
            tx.send("t", None, key="u2")
            tx.send("t", Order("new", 5))
        second = log.pin()
        with Transaction(log, "q") as tx:
            tx.send("t", Order("u1", 200))
            tx.send("t", Order("u2", 300))
        log.maintain()
        with harness.open() as other:
            table = Table(other, "t", Order)
            keys = ["u1", "u2", "u3", "new"]
            amounts = [
                [None if v is None else v.amount for v in table.get_many(keys, at=at)]
                for at in (pin, second, None)
            ]
            assert amounts == [[1, 2, 3, None], [100, None, 3, 5], [200, 300, 3, 5]]
            assert [(k, v.amount) for k, v in table.page(at=pin)] == [
                (b"u1", 1),
                (b"u2", 2),
                (b"u3", 3),
            ]
            assert [(k, v.amount) for k, v in table.page(at=second, after="new")] == [
                (b"u1", 100),
                (b"u3", 3),
            ]
        log.unpin(pin)
        with pytest.raises(PinExpiredError):
            log.get("t", [b"u1"], pin)
        for wrong in (0, -1, 25 * 3600):
            with pytest.raises(UsageError, match="a pin can last"):
                log.pin(wrong)
        commit(log, "p", 1, "t", [11])
        assert Table(log, "t", Order).get("u1") == Order("u1", 11), "the latest, as before"

    def test_a_snapshot_is_of_one_moment(self, log: Log) -> None:
        create(log, "t", table=True)
        rows = [f"k{n:05}" for n in range(9000)]
        with Transaction(log, "p") as tx:
            tx.append("t", pa.table({"user": rows, "amount": [1] * len(rows)}))
        entries = Table(log, "t", Order).items()
        first = next(entries)
        with Transaction(log, "p") as tx:
            tx.append("t", pa.table({"user": rows, "amount": [2] * len(rows)}))
        amounts = [value.amount for _, value in [first, *entries]]
        assert amounts == [1] * len(rows)

    def test_staged_changes_reach_the_table(self, log: Log) -> None:
        create(log, "t", table=True)
        holder = log.hold("q")
        piece = log.stage(holder, 0, make_part(log, "t", [1, 2]))
        assert log.get("t", [b"u1"]) == [None]
        log.commit(holder, 0, Commit(pieces=[piece]))
        assert Table(log, "t", Order).get("u1") == Order("u1", 1)

    def test_a_table_needs_keys_and_only_tables_are_read_as_such(self, log: Log) -> None:
        create(log, "t", table=True, key=None)
        create(log, "s")
        with Transaction(log, "p") as tx, pytest.raises(UsageError, match="needs a key"):
            tx.send("t", Order("a", 1))
        with pytest.raises(UsageError, match="not a table"):
            log.get("s", [b"a"])
