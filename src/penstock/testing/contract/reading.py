"""ReadingContract: order, where reading starts, following, and Arrow batches."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import UnknownObjectError, UsageError
from penstock.log.api import Count, Log
from penstock.log.declaring.objects import (
    DropStream,
    GrowStream,
)
from penstock.log.reading.read import ReadOptions, count_from, read_batches, span_of
from penstock.log.writing.transaction import Transaction
from penstock.producer import Producer
from penstock.testing.contract.setting import (
    Harness,
    OnEngine,
    Order,
    commit,
    commit_as,
    create,
    orders,
    wait_for_clock_after,
)


class ReadingContract(OnEngine):
    # Promise 1: order

    def test_offsets_grow_and_every_event_is_read_once_in_order(self, log: Log) -> None:
        create(log, "s", partitions=3)
        with Producer(log) as producer:
            for n in range(200):
                producer.send("s", Order(f"u{n % 7}", n))
                if n % 50 == 0:
                    producer.flush()
        seen = Counter(event.data.amount for event in orders(log, "s"))
        assert seen == Counter(range(200))
        for partition in range(3):
            found = list(orders(log, "s", partitions=[partition]))
            offsets = [event.offset for event in found]
            assert offsets == sorted(set(offsets))
            for _, of_user in itertools.groupby(
                sorted(found, key=lambda e: e.data.user), key=lambda e: e.data.user
            ):
                amounts = [event.data.amount for event in of_user]
                assert amounts == sorted(amounts)

    # Promise 2: a commit is visible as a whole

    @pytest.mark.parametrize("partitions", [2, 17])
    def test_a_read_shows_one_moment(self, log: Log, partitions: int) -> None:
        create(log, "s", partitions=partitions)
        holder = log.hold("p")
        commit_as(log, holder, 0, "s", range(200))
        reading = orders(log, "s")
        seen = [next(reading).data.amount]
        commit_as(log, holder, 1, "s", range(200))
        seen += [event.data.amount for event in reading]
        assert sorted(seen) == list(range(200))

    def test_reading_can_start_and_stop_at_any_offset(self, log: Log) -> None:
        create(log, "s")
        commit(log, "p", 0, "s", range(10))
        commit(log, "p", 1, "s", range(10, 20))
        offsets = [event.offset for event in orders(log, "s")]
        for first, last in ((7, 14), (0, 10), (9, 11), (10, 20), (4, 4)):
            batches = log.read("s", 0, offsets[first], offsets[last - 1] + 1)
            found = [event.data for batch in batches for event in batch.events(Order)]
            amounts = [order.amount for order in found if isinstance(order, Order)]
            assert amounts == list(range(first, last))

    def test_events_are_counted_by_whoever_knows_its_offsets(self, log: Log) -> None:
        """A batch ends where the engine says; a count is exact, or marked as an upper bound."""
        create(log, "s")
        holder = log.hold("p")
        for sequence in range(5):
            commit_as(log, holder, sequence, "s", range(sequence * 10, sequence * 10 + 10))
        offsets = log.offsets("s")[0]
        start, seen = offsets.first, list[int]()
        while start < offsets.next:
            end = min(offsets.next, log.advance("s", 0, start, 7))
            read = [
                amount
                for batch in log.read("s", 0, start, end)
                for amount in batch.data().column("amount").to_pylist()
            ]
            assert start < end
            assert len(read) <= 7
            found = log.count("s", 0, start, end)
            assert found.events == len(read) if found.is_exact else found.events >= len(read)
            seen += read
            start = end
        assert seen == list(range(50))
        assert log.count("s", 0, offsets.next, offsets.next) == Count(0)
        assert count_from(log, "s", {}).events >= 50

    @pytest.mark.parametrize("last", [1, 5, 30])
    def test_the_last_events_are_as_many_as_were_asked_for(self, log: Log, last: int) -> None:
        """However many offsets lie between them: on Kafka, each commit takes up an offset."""
        create(log, "s", partitions=2)
        holder = log.hold("p")
        for sequence in range(20):
            commit_as(log, holder, sequence, "s", [sequence])
        span = span_of(log, "s", ReadOptions(), last=last)
        found = [
            (batch.partition, offset)
            for batch in read_batches(log, "s", ReadOptions(), span)
            for offset in batch.offsets().to_pylist()
        ]
        assert len(found) == min(last, 20)
        for partition in (0, 1):  # append times may be equal in both
            mine = [offset for at, offset in found if at == partition]
            there = [e.offset for e in orders(log, "s", partitions=[partition])]
            assert mine == there[len(there) - len(mine) :]
        assert log.retreat("s", 0, 3, 100) == 0

    def test_reading_starts_at_a_time_of_append(self, log: Log) -> None:
        create(log, "s")
        first = commit(log, "p", 0, "s", [0, 1])
        wait_for_clock_after(first.time)
        second = commit(log, "p", 1, "s", [2, 3])
        assert [e.data.amount for e in orders(log, "s", start=second.time)] == [2, 3]
        assert [e.data.amount for e in orders(log, "s", start=first.time)] == [0, 1, 2, 3]
        create(log, "t")
        first = commit(log, "p", 2, "t", [0])
        wait_for_clock_after(first.time)
        commit(log, "p", 3, "t", [1])
        after = first.time + dt.timedelta(microseconds=1)
        assert [e.data.amount for e in orders(log, "t", start=after)] == [1]
        later = second.time + dt.timedelta(hours=1)
        assert log.offset_at("s", 0, later) == log.offsets("s")[0].next

    @pytest.mark.parametrize(
        "options",
        [{"start": -1}, {"start": "first"}, {"partitions": [2]}, {"partitions": [0, -1]}],
    )
    def test_places_that_there_are_not_are_refused(self, log: Log, options: dict[str, Any]) -> None:
        create(log, "s", partitions=2)
        with pytest.raises(UsageError):
            list(orders(log, "s", **options))

    def test_events_of_one_key_can_be_read_also_across_a_growth(self, log: Log) -> None:
        create(log, "s", partitions=2)
        with Producer(log) as producer:
            for n in range(40):
                producer.send("s", Order(f"u{n % 8}", n))
        log.apply([GrowStream("s", 5)])
        with Producer(log) as producer:
            for n in range(40, 80):
                producer.send("s", Order(f"u{n % 8}", n))
        for user in range(8):
            amounts = [e.data.amount for e in orders(log, "s", key=f"u{user}")]
            assert sorted(amounts) == [n for n in range(80) if n % 8 == user]

    def test_following_is_told_of_new_events(self, harness: Harness, log: Log) -> None:
        create(log, "s")
        stop = threading.Event()
        got: list[int] = []
        all_there = threading.Event()

        def follow() -> None:
            with harness.open() as other:
                for event in orders(other, "s", follow=True, stop=stop):
                    got.append(event.data.amount)
                    if len(got) == 30:
                        all_there.set()

        thread = threading.Thread(target=follow)
        thread.start()
        for n in range(30):
            commit(log, "p", n, "s", [n])
        assert all_there.wait(30)
        stop.set()
        commit(log, "p", 30, "s", [30])
        thread.join(30)
        assert not thread.is_alive()
        assert got[:30] == list(range(30))

    def test_waiting_ends_at_its_timeout(self, log: Log) -> None:
        create(log, "s")
        assert log.wait({"s": {0: 0}}, 0.05) is False
        commit(log, "p", 0, "s", [1])
        assert log.wait({"s": {0: 0}}, 5) is True
        assert log.wait({"s": {0: log.offsets("s")[0].next}}, 0.05) is False

    def test_several_streams_are_waited_for_at_once(self, log: Log) -> None:
        create(log, "s")
        create(log, "other")
        told: list[bool] = []
        places = {"s": {0: 0}, "other": {0: 0}}
        thread = threading.Thread(target=lambda: told.append(log.wait(places, 60)))
        thread.start()
        thread.join(0.2)
        commit(log, "p", 0, "other", [1])
        thread.join(30)
        assert told == [True]
        assert log.wait({"s": {0: 0}, "other": {0: log.offsets("other")[0].next}}, 0.05) is False

    def test_who_goes_on_waiting_is_told_after_another_one_has_left(
        self, harness: Harness, log: Log
    ) -> None:
        create(log, "s")
        create(log, "other")
        told: list[bool] = []
        first = threading.Thread(target=log.wait, args=({"other": {0: 0}}, 0.6))
        second = threading.Thread(target=lambda: told.append(log.wait({"s": {0: 0}}, 60)))
        first.start()
        first.join(0.2)
        second.start()
        first.join()
        with harness.open() as writer:
            commit(writer, "p", 0, "s", [1])
        second.join(30)
        assert told == [True]

    # Promise 8: Arrow and bounded memory

    def test_reading_gives_bounded_batches_of_arrow(self, harness: Harness) -> None:
        with harness.open(batch_rows_max=1000) as log:
            create(log, "s")
            table = pa.table({"user": ["a"] * 5500, "amount": list(range(5500))})
            with Transaction(log, "p") as tx:
                tx.append("s", table)
            batches = list(read_batches(log, "s"))
            assert max(len(batch) for batch in batches) <= 1000
            columns = [batch.to_arrow() for batch in batches]
            whole = pa.Table.from_batches(columns)
            assert whole["amount"].to_pylist() == list(range(5500))
            assert whole.schema.names == [
                "user",
                "amount",
                "note",
                "_key",
                "_time",
                "_id",
                "_type",
                "_source",
                "_headers",
                "_partition",
                "_offset",
            ]
            assert len(set(whole["_id"].to_pylist())) == 5500
            some = batches[0].to_arrow(["_offset", "amount"])
            assert some.schema.names == ["_offset", "amount"]

    def test_a_follower_sees_new_partitions_and_stops_when_told(
        self, harness: Harness, log: Log
    ) -> None:
        create(log, "s", partitions=1)
        stop, enough = threading.Event(), threading.Event()
        seen: set[int] = set()

        def follow() -> None:
            with harness.open() as other:
                for event in orders(other, "s", follow=True, stop=stop):
                    seen.add(event.partition)
                    if len(seen) == 6:
                        enough.set()

        thread = threading.Thread(target=follow)
        thread.start()
        log.apply([GrowStream("s", 6)])
        with Producer(log) as producer:
            for n in range(100):
                producer.send("s", Order(f"u{n}", n)).result()
        assert enough.wait(30)
        stop.set()
        thread.join(30)
        assert not thread.is_alive()

    def test_following_one_partition_is_not_disturbed_by_others(self, log: Log) -> None:
        create(log, "s", partitions=2)
        with Producer(log) as producer:
            homes = {producer.send("s", Order(f"u{n}", n)).result().partition for n in range(20)}
        assert homes == {0, 1}
        there = log.offsets("s")
        assert log.wait({"s": {0: there[0].next}}, 0.05) is False

    def test_a_slice_knows_its_commits(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        done = [commit_as(log, holder, n, "s", [n]) for n in range(40)]
        log.maintain()
        batch = next(log.read("s", 0, 25, 27))
        assert batch.commit == done[25].commit
        assert batch.commit_of(26).commit == done[26].commit
        create(log, "t")
        whole = commit_as(log, holder, 40, "t", range(10))
        first = log.offsets("t")[0].first
        batch = next(log.read("t", 0, first + 3, first + 7))
        assert batch.commit == batch.commit_of(first + 6).commit == whole.commit

    def test_a_follower_hears_that_its_stream_is_another_one(self, log: Log) -> None:
        create(log, "s")
        holder = log.hold("p")
        commit_as(log, holder, 0, "s", range(5))
        events = orders(log, "s", follow=True)
        assert [next(events).data.amount for _ in range(5)] == list(range(5))
        log.apply([DropStream("s")])
        create(log, "s")
        commit_as(log, holder, 1, "s", range(7))
        with pytest.raises(UnknownObjectError, match="created again"):
            next(events)
