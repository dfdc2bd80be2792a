"""TransactionContract: transactions of many clients on producers that stay open."""

from __future__ import annotations

import contextlib
import time

import pytest

from penstock.errors import ClosedError, SequenceError, TransactionStateError
from penstock.log.api import Log
from penstock.log.writing.pool import TransactionPool
from penstock.testing.contract.setting import Harness, OnEngine, Order, create, orders


class TransactionContract(OnEngine):
    @pytest.mark.row("H19")
    def test_a_named_transaction_happens_once(self, harness: Harness, log: Log) -> None:
        """Whatever process is asked: another pool, of another opening of the log, takes over."""
        create(log, "s")
        with harness.open() as other, TransactionPool(log) as here, TransactionPool(other) as there:
            assert here.last_commit("till") is None
            for pool in (here, there, here, here):
                with pool.transaction(("till", 7)) as tx:
                    tx.send("s", Order("a", 7))
            done = there.last_commit("till")
            assert done is not None
            assert done.sequence == 7
            with there.transaction(("till", 8)) as tx:
                tx.send("s", Order("a", 8))
            with contextlib.suppress(SequenceError), here.transaction(("till", 7)) as tx:
                tx.send("s", Order("a", 7))  # refused where it is known that there is a later one
            with here.transaction(("till", 9)) as tx:
                tx.send("s", Order("a", 9))
            assert [event.data.amount for event in orders(log, "s")] == [7, 8, 9]

    @pytest.mark.row("H19")
    def test_unnamed_transactions_share_producers(self, log: Log) -> None:
        create(log, "s")
        held: set[str] = set()
        with TransactionPool(log) as pool:
            for n in range(6):
                with contextlib.suppress(ZeroDivisionError), pool.transaction() as tx:
                    tx.send("s", Order("a", n))
                    held.add(tx.holder.producer)
                    if n % 3 == 2:
                        raise ZeroDivisionError
            assert len(held) == 1
            with pool.transaction() as outer, pool.transaction() as inner:
                outer.send("s", Order("a", 10))
                inner.send("s", Order("a", 11))
            open_ = pool.transaction()
            tx = open_.__enter__()
            tx.send("s", Order("a", 12))
        with pytest.raises(ClosedError):
            open_.__exit__(None, None, None)
        assert [event.data.amount for event in orders(log, "s")] == [0, 1, 3, 4, 11, 10]

    @pytest.mark.row("H19")
    def test_a_transaction_that_is_open_for_too_long_never_happened(self, log: Log) -> None:
        create(log, "s")
        with TransactionPool(log, timeout_s=0.05) as pool:
            with pytest.raises(TransactionStateError, match=r"more than 0\.05 s"):
                with pool.transaction() as tx:
                    tx.send("s", Order("a", 1))
                    time.sleep(0.1)
            assert tx.state == "rolled back"
            with pool.transaction(timeout_s=60) as tx:
                tx.send("s", Order("a", 2))
        assert [event.data.amount for event in orders(log, "s")] == [2]

    @pytest.mark.row("H19")
    def test_a_pool_that_was_idle_for_long_goes_on(
        self, harness: Harness, log: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The log has forgotten its producers meanwhile: they are opened again."""
        create(log, "s")
        monkeypatch.setattr(self.producers_kept_us, -1_000_000)
        with TransactionPool(log) as pool, harness.open() as other:
            for n, name in enumerate((None, ("till", 1), None, ("till", 2), None)):
                with pool.transaction(name) as tx:
                    tx.send("s", Order("a", n))
                other.maintain()
        assert [event.data.amount for event in orders(log, "s")] == list(range(5))
