"""CommitContract and transactions: all or none, numbered, fenced, with their progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any, NoReturn

import msgspec
import pyarrow as pa
import pytest

from penstock import failpoints
from penstock.errors import (
    CommitOutcomeUnknownError,
    FencedError,
    LimitError,
    LogBusyError,
    PieceError,
    SequenceError,
    TransactionStateError,
    UnknownObjectError,
)
from penstock.log.api import Commit, Committed, Log
from penstock.log.declaring.objects import DropStream
from penstock.log.writing.transaction import Transaction
from penstock.producer import Producer, ProducerOptions
from penstock.records.event import partition_of
from penstock.testing.contract.setting import (
    Harness,
    OnEngine,
    Order,
    commit,
    commit_as,
    commit_in_doubt,
    create,
    make_part,
    orders,
)
from penstock.testing.workload import heard, judge


class CommitContract(OnEngine):
    # Promise 2: only committed events are visible, all or none

    @pytest.mark.row("H19")
    def test_a_commit_spans_streams_and_shows_as_a_whole(self, harness: Harness, log: Log) -> None:
        """At once in each partition; in all of them within `moments_s`."""
        create(log, "a", partitions=2)
        create(log, "b")
        done = threading.Event()
        wrong: list[str] = []

        def in_a(other: Log) -> Counter[tuple[int, int]]:
            return Counter((event.partition, event.data.amount) for event in orders(other, "a"))

        def watch() -> None:
            with harness.open() as other:
                while not done.is_set():
                    b = sum(1 for _ in orders(other, "b"))
                    deadline = time.monotonic() + self.moments_s
                    while (found := in_a(other)).total() < 4 * b and time.monotonic() < deadline:
                        time.sleep(0.001)
                    if found.total() < 4 * b:
                        wrong.append(f"{b} in b, and only {found.total()} in a")
                    for (partition, number), count in found.items():
                        if count != homes[partition]:
                            wrong.append(f"{count} of commit {number} in partition {partition}")

        users = [f"u{m}" for m in range(4)]
        homes = Counter(partition_of(user.encode(), 2) for user in users)
        thread = threading.Thread(target=watch)
        thread.start()
        for n in range(20):
            with Transaction(log, "p") as tx:
                for user in users:
                    tx.send("a", Order(user, n))
                tx.send("b", Order("x", n))
        done.set()
        thread.join(30)
        assert not wrong

    @pytest.mark.row("H19")
    def test_a_rolled_back_transaction_leaves_nothing(self, log: Log) -> None:
        create(log, "s")
        with pytest.raises(ZeroDivisionError), Transaction(log, "p") as tx:
            tx.send("s", Order("a", 1))
            tx.save("k", b"v")
            raise ZeroDivisionError
        assert tx.state == "rolled back"
        assert list(orders(log, "s")) == []
        assert log.progress("k") is None

    @pytest.mark.row("H19")
    def test_a_transaction_that_is_dropped_never_happened(self, harness: Harness, log: Log) -> None:
        create(log, "s")
        with harness.open(transaction_memory_bytes_max=100) as channel:
            tx = Transaction(channel, "p").__enter__()
            for n in range(50):
                tx.send("s", Order("a", n))
        commit(log, "p", 5, "s", [99])
        log.maintain()
        assert [e.data.amount for e in orders(log, "s")] == [99]

    @pytest.mark.row("H19")
    def test_a_transaction_larger_than_its_memory_is_still_one(self, harness: Harness) -> None:
        with harness.open(transaction_memory_bytes_max=2000) as log:
            create(log, "s", partitions=2)
            with Transaction(log, "p") as tx:
                ids = [tx.send("s", Order(f"u{n % 3}", n)) for n in range(300)]
                assert list(orders(log, "s")) == []
            found = list(orders(log, "s"))
            assert sorted(e.data.amount for e in found) == list(range(300))
            assert {e.id for e in found} == set(ids)
            for user in ("u0", "u1", "u2"):
                amounts = [e.data.amount for e in found if e.data.user == user]
                assert amounts == sorted(amounts)

    def test_a_transaction_keeps_the_order_of_events_and_columns(self, log: Log) -> None:
        create(log, "s")
        with Transaction(log, "p") as tx:
            tx.send("s", Order("a", 1))
            tx.append("s", pa.table({"user": ["a"], "amount": [2]}))
            tx.send("s", Order("a", 3))
        assert [e.data.amount for e in orders(log, "s")] == [1, 2, 3]

    @pytest.mark.row("H19")
    def test_what_a_transaction_without_a_name_staged_is_swept_once_it_is_rolled_back(
        self, harness: Harness
    ) -> None:
        with harness.open(transaction_memory_bytes_max=2000) as log:
            create(log, "s")
            with Transaction(log) as tx:
                for n in range(20):
                    tx.send("s", Order("a", n))
                assert log.maintain().pieces_swept == 0
                tx.roll_back()
            assert log.maintain().pieces_swept > 0

    def test_a_finished_transaction_takes_nothing_more(self, log: Log) -> None:
        create(log, "s")
        with Transaction(log, "p") as tx:
            tx.send("s", Order("a", 1))
        for step in (tx.commit, tx.roll_back, lambda: tx.send("s", Order("a", 2))):
            with pytest.raises(TransactionStateError):
                step()

    # Promise 3: numbered commits and fencing

    def test_committing_the_latest_name_again_changes_nothing(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        first = commit_as(log, holder, 4, "s", [1, 2])
        again = commit_as(log, holder, 4, "s", [7, 8, 9])
        assert again == msgspec.structs.replace(first, repeated=True)
        assert [e.data.amount for e in orders(log, "s")] == [1, 2]
        assert log.last_commit("p") == first

    def test_the_outcome_is_found_by_the_next_holder(self, log: Log) -> None:
        create(log, "s")
        first = commit_as(log, log.hold("p"), 4, "s", [1])
        again = commit_as(log, log.hold("p"), 4, "s", [1])
        assert again == msgspec.structs.replace(first, repeated=True)

    def test_an_older_sequence_is_refused_and_one_may_be_skipped(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        commit_as(log, holder, 4, "s", [1])
        commit_as(log, holder, 9, "s", [2])
        for old in (0, 4, 8):
            with pytest.raises(SequenceError):
                commit_as(log, holder, old, "s", [3])
        assert [e.data.amount for e in orders(log, "s")] == [1, 2]

    @pytest.mark.row("H1")
    def test_opening_a_producer_fences_its_older_holder(self, harness: Harness, log: Log) -> None:
        create(log, "s")
        old = log.hold("p")
        part = make_part(log, "s", [1])
        piece = log.stage(old, 0, part)
        with harness.open() as other:
            new = other.hold("p")
            assert new.epoch > old.epoch
        for attempt in (
            lambda: log.commit(old, 0, Commit(parts=[part])),
            lambda: log.commit(old, 0, Commit(pieces=[piece])),
            lambda: log.stage(old, 0, part),
        ):
            with pytest.raises(FencedError):
                attempt()
        with pytest.raises(PieceError):
            log.commit(new, 0, Commit(pieces=[piece]))
        commit_as(log, new, 0, "s", [2])
        assert [e.data.amount for e in orders(log, "s")] == [2]

    def test_two_producers_do_not_disturb_each_other(self, log: Log) -> None:
        create(log, "s")
        one, two = log.hold("one"), log.hold("two")
        commit_as(log, one, 5, "s", [1])
        commit_as(log, two, 1, "s", [2])
        commit_as(log, one, 6, "s", [3])
        assert [e.data.amount for e in orders(log, "s")] == [1, 2, 3]

    # Promise 4: durability (the engine's own tests prove it under kill and loss of power)

    @pytest.mark.row("H10")
    @pytest.mark.parametrize("acks", ["write", "majority", "all"])
    def test_every_kind_of_acks_commits(self, harness: Harness, log: Log, acks: str) -> None:
        create(log, "s", acks=acks)
        assert log.stream("s").spec.acks == acks
        commit(log, "p", 0, "s", [1])
        with harness.open() as other:
            assert [e.data.amount for e in orders(other, "s")] == [1]

    @pytest.mark.row("H10")
    def test_what_was_acknowledged_survives_kill_9(self, harness: Harness, log: Log) -> None:
        """A process is killed right after COMMIT, before it can report anything."""
        environment = {**os.environ, failpoints.ENVIRONMENT: "commit.committed=kill@12"}
        command = [sys.executable, "-m", "penstock.testing.workload", harness.url, "--seed", "5"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert judge(log, heard(done.stdout.splitlines()), seed=5) == []

    # Promise 5: an unknown outcome is never called a failure

    def test_a_commit_whose_outcome_is_unknown_can_be_tried_again(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        commit_in_doubt(log, holder, 0, "s", [1])
        again = commit_as(log, holder, 0, "s", [1])
        assert again.repeated
        assert [e.data.amount for e in orders(log, "s")] == [1]

    def test_a_commit_in_doubt_is_found_by_a_fenced_holder(
        self, harness: Harness, log: Log
    ) -> None:
        create(log, "s")
        holder = log.hold("p")
        commit_in_doubt(log, holder, 0, "s", [1])
        with harness.open() as other:
            assert commit_as(other, other.hold("p"), 0, "s", [2]).repeated
        assert commit_as(log, holder, 0, "s", [1]).repeated
        assert [e.data.amount for e in orders(log, "s")] == [1]

    def test_a_commit_in_doubt_stays_so_behind_a_later_one(
        self, harness: Harness, log: Log
    ) -> None:
        create(log, "s")
        holder = log.hold("p")
        commit_in_doubt(log, holder, 0, "s", [1])
        with harness.open() as other:
            commit_as(other, other.hold("p"), 1, "s", [2])
        log.hold("p")  # until then, a session on Kafka remembers its own commits
        with pytest.raises(CommitOutcomeUnknownError, match="may or may not"):
            commit_as(log, holder, 0, "s", [1])

    def test_a_transaction_of_unknown_outcome_is_committed_again(self, log: Log) -> None:
        create(log, "s")
        with pytest.raises(CommitOutcomeUnknownError), Transaction(log, "p") as tx:
            tx.send("s", Order("a", 1))
            failpoints.arm("commit.committed", "raise")
        failpoints.disarm()
        assert tx.state == "unknown"
        with pytest.raises(TransactionStateError, match="commit again"):
            tx.roll_back()
        assert tx.commit().repeated
        assert [e.data.amount for e in orders(log, "s")] == [1]

    def test_a_transaction_that_is_interrupted_while_it_commits_may_have_happened(
        self, log: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create(log, "s")
        real = log.commit

        def interrupt(*given: Any) -> NoReturn:
            real(*given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(log, "commit", interrupt)
            with pytest.raises(KeyboardInterrupt), Transaction(log, "p") as tx:
                tx.send("s", Order("a", 1))
        assert tx.state == "unknown"
        assert tx.commit().repeated
        assert [e.data.amount for e in orders(log, "s")] == [1]

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_transaction_that_was_postponed_is_committed_later(
        self, log: Log, monkeypatch: pytest.MonkeyPatch, inside: bool
    ) -> None:
        create(log, "s")

        def busy(*given: Any) -> NoReturn:  # noqa: ARG001  as commit takes them
            raise LogBusyError

        with monkeypatch.context() as patch:
            patch.setattr(log, "commit", busy)
            with pytest.raises(LogBusyError), Transaction(log, "p") as tx:
                tx.send("s", Order("a", 1))
                if inside:
                    tx.commit()
        assert tx.state == "open"
        assert not tx.commit().repeated
        assert [e.data.amount for e in orders(log, "s")] == [1]

    # Promise 6: progress

    def test_progress_is_saved_with_the_commit_and_never_stale(
        self, harness: Harness, log: Log
    ) -> None:
        create(log, "s")
        old = log.hold("p")
        log.commit(old, 0, Commit(progress={"a/1": b"x", "a/2": b"y", "b": b"z"}))
        with harness.open() as other:
            new = other.hold("p")
            assert other.progress("a/1") == b"x"
            other.commit(new, 1, Commit(progress={"a/1": b"new", "a/2": None}))
        assert log.progress("a/1") == b"new"
        assert log.progress("a/2") is None
        assert log.progress_items("a/") == {"a/1": b"new"}
        with pytest.raises(FencedError):
            log.commit(old, 2, Commit(progress={"a/1": b"late"}))
        assert log.progress("a/1") == b"new"

    def test_a_refused_commit_saves_no_progress(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        commit_as(log, holder, 3, "s", [1])
        with pytest.raises(SequenceError):
            log.commit(holder, 2, Commit(progress={"k": b"v"}))
        assert log.progress("k") is None

    def test_what_is_too_large_is_neither_staged_nor_committed(self, harness: Harness) -> None:
        limits = {"commit_bytes_max": 2000, "progress_value_bytes_max": 10}
        with harness.open(**limits) as log:
            create(log, "s")
            holder = log.hold("p")
            part = make_part(log, "s", range(200))
            for wrong in (
                lambda: log.commit(holder, 0, Commit(parts=[part])),
                lambda: log.stage(holder, 0, part),
            ):
                with pytest.raises(LimitError, match="commit_bytes_max"):
                    wrong()
            with pytest.raises(LimitError, match="progress_value_bytes_max"):
                log.commit(holder, 0, Commit(progress={"k": b"x" * 11}))
            log.commit(holder, 0, Commit(progress={"k": b"x" * 10}))
            assert list(orders(log, "s")) == []

    # Threads

    @pytest.mark.row("H14")
    def test_many_threads_commit_at_once(self, log: Log) -> None:
        create(log, "s")

        def work(number: int) -> None:
            holder = log.hold(f"p{number}")
            for n in range(10):
                commit_as(log, holder, n, "s", [number * 100 + n])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        amounts = [e.data.amount for e in orders(log, "s")]
        assert sorted(amounts) == sorted(p * 100 + n for p in range(16) for n in range(10))
        for p in range(16):
            mine = [a for a in amounts if a // 100 == p]
            assert mine == sorted(mine)

    @pytest.mark.row("H14")
    def test_a_commit_knows_its_places_although_others_write_there_too(self, log: Log) -> None:
        create(log, "s")
        done: dict[int, Committed] = {}

        def work(number: int) -> None:
            amounts = pa.array([number] * 3000)
            rows = {"user": ["u"] * 3000, "amount": amounts, "note": ["x" * 700] * 3000}
            with Transaction(log, f"p{number}") as tx:
                tx.append("s", pa.table(rows))
                done[number] = tx.commit()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        found: dict[int, list[int]] = {}
        for event in orders(log, "s"):
            found.setdefault(event.data.amount, []).append(event.offset)
        for number in range(4):
            ranges = done[number].placements[0].ranges
            told = [offset for _, first, rows in ranges for offset in range(first, first + rows)]
            assert told == found[number]

    def test_a_failing_commit_does_not_harm_its_neighbours(self, log: Log) -> None:
        create(log, "s")
        fenced, good = log.hold("p"), log.hold("q")
        log.hold("p")
        failed: list[Exception] = []

        def bad() -> None:
            for n in range(30):
                try:
                    commit_as(log, fenced, n, "s", [1000 + n])
                except FencedError as error:
                    failed.append(error)

        thread = threading.Thread(target=bad)
        thread.start()
        for n in range(30):
            commit_as(log, good, n, "s", [n])
        thread.join(60)
        assert len(failed) == 30
        assert [e.data.amount for e in orders(log, "s")] == list(range(30))

    def test_two_transactions_of_one_holder_do_not_swallow_each_other(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        first = Transaction(log, holder).__enter__()
        second = Transaction(log, holder).__enter__()
        first.send("s", Order("a", 1))
        second.send("s", Order("a", 2))
        first.commit()
        with pytest.raises(SequenceError, match="nothing of this one"):
            second.commit()
        assert second.state == "rolled back"
        assert [e.data.amount for e in orders(log, "s")] == [1]

    def test_a_send_that_fails_leaves_the_transaction_as_it_was(self, harness: Harness) -> None:
        with harness.open(transaction_memory_bytes_max=3000) as log:
            create(log, "s")
            with Transaction(log, "p") as tx:
                for n in range(10):
                    if n == 5:
                        failpoints.arm("stage.begun", "raise")
                    try:
                        tx.send("s", Order("a", n))
                    except failpoints.FailpointError:
                        tx.send("s", Order("a", n))
            failpoints.disarm()
            assert [e.data.amount for e in orders(log, "s")] == list(range(10))

    @pytest.mark.row("H14")
    def test_a_future_cannot_be_called_back(self, log: Log) -> None:
        create(log, "s")
        with Producer(log, ProducerOptions(batch_delay_ms=100)) as producer:
            future = producer.send("s", Order("a", 1))
            assert not future.cancel()
            places = [future.result(), producer.send("s", Order("a", 2)).result()]
        assert [place.offset for place in places] == [e.offset for e in orders(log, "s")]

    def test_the_latest_commit_can_be_repeated_after_its_stream_is_gone(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        part = make_part(log, "s", [1])
        first = log.commit(holder, 3, Commit(parts=[part]))
        log.apply([DropStream("s")])
        wanted = msgspec.structs.replace(first, repeated=True)
        assert log.commit(holder, 3, Commit(parts=[part])) == wanted
        with pytest.raises(UnknownObjectError):
            log.commit(holder, 4, Commit(parts=[part]))
        with pytest.raises((UnknownObjectError, SequenceError)):
            log.commit(holder, 2, Commit(parts=[part]))
        log.hold("p")
        with pytest.raises(FencedError):
            log.commit(holder, 3, Commit(parts=[part]))

    def test_records_mappings_and_deletes_share_a_commit(self, log: Log) -> None:
        create(log, "t", table=True)
        with Transaction(log, "p") as tx:
            tx.send("t", Order("a", 1))
            tx.send("t", {"user": "b", "amount": 2})
            tx.send("t", None, key="a")
        assert [(e.key, e.data) for e in orders(log, "t")] == [
            (b"a", Order("a", 1)),
            (b"b", Order("b", 2)),
            (b"a", None),
        ]
