"""What does not depend on how events are put into batches, and how large those are."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from penstock import (
    AlterStream,
    App,
    AppStream,
    Context,
    CreateStream,
    DeadLetter,
    DropStream,
    Entry,
    Event,
    Log,
    Producer,
    Record,
    TableView,
)
from penstock.app.declaring.plan import plan
from penstock.app.running.backends import InlineBackend, InlineExecutor
from penstock.app.running.building import build
from penstock.app.running.query import Executor, Query, QueryLimits
from penstock.app.tasks.task import BatchOrder, Outcome, Work
from penstock.errors import QueryFailedError
from penstock.log.api import Pin
from penstock.testing.apps import AppTest
from penstock.testing.processes import wait_until
from tests.app.shop import Note, Order, some_orders

ONE = QueryLimits(batch_rows_max=1)


class Customer(Record):
    user: str
    city: str


@pytest.mark.parametrize("limits", [QueryLimits(), ONE], ids=["together", "one by one"])
def test_a_value_that_is_the_default_is_no_entry(tmp_path: Path, limits: QueryLimits) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    sums = app.table("sums", value=int, default=0)
    sets = app.table("sets", value=set[str])

    @app.agent(orders, state=sums)
    def add(order: Order, total: Entry[int]) -> None:
        total.value += order.amount

    @app.agent(orders, state=sets)
    def toggle(order: Order, items: Entry[set[str]]) -> None:
        items.value ^= {order.item}

    with AppTest(app, tmp_path, limits=limits) as run:
        run.send(orders, Order("ada", "tea", 5), Order("ada", "tea", -5), Order("bob", "jam", 1))
        run.until_idle()
        assert run.table(sums) == {"bob": 1}
        assert run.table(sets) == {"bob": {"jam"}}
        run.send(orders, Order("bob", "jam", -1))
        run.until_idle()
        assert run.table(sums) == {}
        assert run.table(sets) == {}


def test_two_agents_have_uuids_of_their_own(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    notes = app.stream("notes", Note)
    for name in ("one", "other"):

        @app.agent(orders, to=notes, name=name)
        def tell(order: Order, context: Context) -> Note:
            return Note(str(context.uuid()))

    with AppTest(app, tmp_path) as run:
        run.send(orders, *some_orders(10))
        run.until_idle()
        assert len({note.text for note in run.events(notes)}) == 20


def test_only_what_was_given_can_be_acknowledged(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    before: list[Event[Order]] = []

    @app.agent(orders, ack="manual")
    def late(event: Event[Order], context: Context) -> None:
        before.append(event)
        context.ack(before[0])

    with AppTest(app, tmp_path, tries_max=1) as run:
        run.send(orders, Order("ada", "tea"), Order("ada", "jam"))
        assert "was not passed to this call" in str(run.until_failed())


def test_lists_are_acknowledged_one_by_one(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=1)
    calls: list[list[str]] = []

    @app.agent(orders, ack="manual")
    def handle(events: list[Event[Order]], context: Context) -> None:
        calls.append([event.data.item for event in events])
        for event in events[: -1 if len(events) > 1 else None]:
            context.ack(event)

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "a"), Order("ada", "b"), Order("ada", "c"))
        run.until_idle(60)
    assert calls[-1] == ["c"]


def test_what_a_generator_gave_does_not_wait_for_the_rest(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    more = threading.Event()

    def live() -> Iterator[Order]:
        yield from some_orders(3)
        more.wait(60)
        yield from some_orders(2)

    app.feed(live(), to=orders)
    with AppTest(app, tmp_path) as run:
        wait_until(lambda: len(run.events(orders)) == 3, 30, "the first three")
        more.set()
        run.until_idle()
        assert len(run.events(orders)) == 5
        run.restart()
        with pytest.raises(
            QueryFailedError, match="cannot be read from the beginning a second time"
        ):
            run.until_idle()


def test_a_stream_that_others_fill_as_a_table_can_be_looked_up(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    customers = app.stream("customers", Customer, key="user", table=True)
    known = orders.lookup(customers)
    with AppTest(app, tmp_path) as run:
        run.send(customers, Customer("ada", "London"))
        run.send(orders, Order("ada", "tea"), Order("bob", "tea"))
        run.until_idle()
        found = {e.user: e.customers for e in run.events(known.name)}
        assert found == {"ada": found["ada"], "bob": None}
        assert found["ada"].city == "London"


def test_dead_letters_are_found_by_name(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders, on_error="dead-letter")
    def fail(order: Order) -> None:
        raise ValueError("no")

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        run.until_idle()
        (letter,) = run.events("fail_dead")
        assert isinstance(letter, DeadLetter)
        assert letter.error == "ValueError: no"


# How large a batch is


class Sizes:
    """An app whose agent notes how many events each batch had."""

    def __init__(self, partitions: int = 1) -> None:
        self.app = App("shop")
        self.orders: AppStream[Order] = self.app.stream(
            "orders", Order, key="user", partitions=partitions
        )
        self.spent = self.app.table("spent", value=int, default=0)
        self.batches: list[int] = []
        self.pause_s = 0.0
        now: list[dt.datetime] = []

        @self.app.agent(self.orders, state=self.spent)
        def add(order: Order, spent: Entry[int], context: Context) -> None:
            if now != [context.now]:
                now[:] = [context.now]
                self.batches.append(0)
            self.batches[-1] += 1
            spent.value += order.amount
            time.sleep(self.pause_s)


def test_slow_functions_get_fewer_events_at_a_time(tmp_path: Path) -> None:
    sizes = Sizes()
    sizes.pause_s = 0.002
    limits = QueryLimits(batch_ms_target=100)
    with AppTest(sizes.app, tmp_path, limits=limits) as run:
        run.send(sizes.orders, *some_orders(600))
        run.until_idle()
    assert sum(sizes.batches) == 600
    assert max(sizes.batches[1:]) <= 60


def test_quick_functions_get_more(tmp_path: Path) -> None:
    sizes = Sizes()
    with AppTest(sizes.app, tmp_path) as run:
        run.runner.stop()
        run.send(sizes.orders, *some_orders(20_000))
        run.restart()
        run.until_idle()
    assert sizes.batches[0] == 256
    assert len(sizes.batches) <= 5


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_batch_that_no_task_can_hold_is_cut(tmp_path: Path, partitions: int) -> None:
    sizes = Sizes(partitions)
    limits = QueryLimits(batch_bytes_max=100_000)
    with AppTest(sizes.app, tmp_path, limits=limits) as run:
        run.runner.stop()
        run.send(sizes.orders, *some_orders(5000))
        big = "x" * 60_000
        run.send(sizes.orders, *(Order(f"u{n % 7}", big, 1) for n in range(40)))
        run.restart()
        run.until_idle()
        total = sum(order.amount for order in some_orders(5000)) + 40
        assert sum(run.table(sizes.spent).values()) == total
        query = run.runner._kept[0].query
        assert isinstance(query, Query)
        assert query._pace.rows <= 3
    assert max(sizes.batches) > 100
    assert sizes.batches[-1] <= 3 * partitions


def test_an_event_that_is_larger_than_a_batch_may_be_is_handled(tmp_path: Path) -> None:
    sizes = Sizes(partitions=3)
    with AppTest(sizes.app, tmp_path, limits=QueryLimits(batch_bytes_max=1000)) as run:
        run.runner.stop()
        run.send(sizes.orders, *(Order(f"u{n}", "x" * 10_000, 1) for n in range(20)))
        run.restart()
        run.until_idle()
        assert run.table(sizes.spent) == {f"u{n}": 1 for n in range(20)}


# What retention has removed


@pytest.mark.parametrize("on_gone", ["stop", "skip"])
def test_events_that_are_gone(tmp_path: Path, on_gone: str) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=1, on_gone=on_gone)  # type: ignore[call-overload]
    spent = app.table("spent", value=int, default=0)

    @app.agent(orders, state=spent)
    def add(order: Order, spent: Entry[int]) -> None:
        spent.value += order.amount

    with AppTest(app, tmp_path, tries_max=1) as run:
        run.send(orders, Order("ada", "tea", 1))
        run.until_idle()
        run.runner.stop()
        run.send(orders, Order("ada", "tea", 10))
        spec = run.log.stream("orders").spec
        run.log.apply([AlterStream(msgspec.structs.replace(spec, retention_ms=1))])
        while (gone := run.log.offsets("orders")[0].first) < 2:
            run.log.maintain()
        run.log.apply([AlterStream(spec)])
        run.send(orders, Order("ada", "tea", 100), Order("ada", "tea", 1000))
        left = [event.data.amount for event in run.whole_events(orders)]
        run._start()
        if on_gone == "stop":
            told = str(run.until_failed())
            assert f"removed everything before offset {gone}" in told
            assert "on_gone='skip'" in told
        else:
            run.until_idle()
            assert run.table(spent) == {"ada": 1 + sum(left)}


@pytest.mark.parametrize("how", ["retention", "made anew"])
def test_what_was_not_acknowledged_and_is_gone_holds_nothing_up(tmp_path: Path, how: str) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=1, on_gone="skip")
    calls: list[str] = []
    is_free = threading.Event()

    @app.agent(orders, ack="manual")
    def call(order: Order, context: Context) -> None:
        calls.append(order.item)
        if is_free.is_set():
            context.ack()

    with AppTest(app, tmp_path, tries_max=1) as run:
        run.send(orders, Order("ada", "gone"))
        wait_until(lambda: "gone" in calls, 30, "the first call")
        run.runner.stop()
        spec = run.log.stream("orders").spec
        if how == "made anew":
            run.log.apply([DropStream("orders"), CreateStream(spec)])
        else:
            run.log.apply([AlterStream(msgspec.structs.replace(spec, retention_ms=1))])
            while run.log.offsets("orders")[0].first < 1:
                run.log.maintain()
            run.log.apply([AlterStream(spec)])
        calls.clear()
        is_free.set()
        run.send(orders, Order("ada", "new"))
        run._start()
        run.until_idle(30)
    assert calls == ["new"]


# What a batch sees, and what it leaves behind


def test_what_was_not_acknowledged_is_not_lost_with_the_next_batch(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=1)
    calls: list[str] = []
    is_free = threading.Event()

    @app.agent(orders, ack="manual")
    def call(order: Order, context: Context) -> None:
        calls.append(order.item)
        if order.item != "busy" or is_free.is_set():
            context.ack()

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "busy"))
        wait_until(lambda: "busy" in calls, 30, "the first call")
        for n in range(5):  # batches of their own, before it is tried again
            run.send(orders, Order("bob", f"item {n}"))
            wait_until(lambda n=n: f"item {n}" in calls, 30, "the next batch")  # type: ignore[misc]
        is_free.set()
        run.until_idle(60)
    assert calls.count("busy") >= 2
    assert calls[-1] == "busy"


def test_what_is_left_unacknowledged_is_bounded(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=1)

    @app.agent(orders, ack="manual")
    def never(order: Order, context: Context) -> None:
        """Says nothing."""

    limits = QueryLimits(unacknowledged_max=3)
    with AppTest(app, tmp_path, limits=limits, tries_max=1) as run:
        run.runner.stop()
        run.send(orders, *some_orders(4))
        run.restart()
        assert "left more than 3 events of orders, partition 0" in str(run.until_failed())


@pytest.mark.parametrize("fails", [True, False])
def test_a_batch_lets_go_of_its_pinned_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """However it ends: what was pinned could not be cleared away."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    customers = app.table("customers", value=Customer)

    @app.agent(orders, reads=customers)
    def look(order: Order, customers: TableView[Customer]) -> None:
        if fails:
            raise ValueError("no")

    pinned: list[object] = []
    with AppTest(app, tmp_path, tries_max=2) as run:
        kind = type(run.log)
        pin, unpin = kind.pin, kind.unpin

        def noted(log: Log, *arguments: float) -> Pin:
            pinned.append(found := pin(log, *arguments))
            return found

        def released(log: Log, found: Pin) -> None:
            unpin(log, found)
            pinned.remove(found)

        monkeypatch.setattr(kind, "pin", noted)
        monkeypatch.setattr(kind, "unpin", released)
        run.send(orders, *some_orders(3))
        if fails:
            run.until_failed()
        else:
            run.until_idle()
            assert run.statuses()["look"].batches
        assert pinned == []


class Meddler(InlineExecutor):
    """Changes a table between the pin of a batch and the moment it is looked at."""

    def run(self, batch: BatchOrder) -> list[Outcome]:
        with Producer(self._log) as producer:
            producer.send("customers", Customer("ada", "too late"), key="ada").result()
        return super().run(batch)


class MeddlingBackend(InlineBackend):
    def executor(self, log: Log, works: Sequence[Work]) -> Executor:
        return Meddler(log, works)


def test_tables_are_looked_at_as_of_the_pinned_moment(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    customers = app.table("customers", value=Customer)
    known = orders.lookup(customers)
    notes = app.stream("notes", Note)

    @app.agent(orders, reads=customers, to=notes)
    def tell(order: Order, customers: TableView[Customer]) -> Note:
        found = customers.get(order.user)
        return Note("none" if found is None else found.city)

    with AppTest(app, tmp_path) as run:
        run.runner.stop()
        run.send(customers, Customer("ada", "London"), key="ada")
        run.send(orders, Order("ada", "tea"))
        runner = build(run.log, plan(app), MeddlingBackend(), options=run._options)
        runner.start()
        assert runner.until_idle(60)
        runner.stop()
        assert [event.customers.city for event in run.events(known.name)] == ["London"]
        assert run.events(notes) == [Note("London")]
