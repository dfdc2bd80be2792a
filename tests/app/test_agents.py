"""What agents do, on a real log and without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    App,
    CreateStream,
    Emit,
    Entry,
    Event,
    GrowStream,
    Log,
    Producer,
    Record,
    TableView,
    declare,
)
from penstock import open as open_log
from penstock.app.running.query import Query, QueryLimits
from penstock.app.running.reports import agent_rows
from penstock.app.tasks.task import derived_id
from penstock.testing.apps import AppTest
from tests.app.shop import Alert, Note, Order, Shop, some_orders


def on_both(row: str) -> pytest.MarkDecorator:
    """A test on either engine: it takes the URL of a log as `log`."""
    engines = ("embedded", "kafka")
    marked = [pytest.param(e, marks=pytest.mark.row(row, engine=e), id=e) for e in engines]
    return pytest.mark.parametrize("log", marked, indirect=True)


@pytest.mark.row("F1", engine="embedded")
@pytest.mark.row("X7")
def test_an_agent_sends_and_keeps_state(tmp_path: Path) -> None:
    shop = Shop()
    with AppTest(shop.app, tmp_path) as run:
        run.send(shop.orders, Order("ada", "tea"), Order("ada", "tea"), Order("bob", "tea"))
        run.until_idle()
        assert sorted((a.user, a.item) for a in run.events(shop.alerts)) == [
            ("ada", "tea"),
            ("bob", "tea"),
        ]
        assert run.table(shop.seen) == {"ada": {"tea"}, "bob": {"tea"}}
        run.send(shop.orders, Order("ada", "jam"), Order("ada", "tea"))
        run.until_idle()
        assert run.table(shop.seen)["ada"] == {"tea", "jam"}
        assert len(run.events(shop.alerts)) == 3


@pytest.mark.row("F1", engine="embedded")
def test_input_output_and_table_move_in_one_commit(tmp_path: Path) -> None:
    """Whatever moment one looks at, what was sent and what is kept agree with the position."""
    shop = Shop(partitions=1)
    with AppTest(shop.app, tmp_path, limits=QueryLimits(batch_rows_max=10)) as run:
        run.send(shop.orders, *[Order("ada", f"i{n}") for n in range(100)])
        run.until_idle()
        sent = run.whole_events(shop.alerts)
        kept = run.whole_events(shop.seen)
        commits: dict[int, int] = {}
        for batch in run.log.read("alerts", 0, 0):
            commits |= {offset: batch.commit_of(offset).commit for offset in range(100)}
        of_table: dict[int, int] = {}
        for batch in run.log.read("seen", 0, 0):
            of_table |= {offset: batch.commit_of(offset).commit for offset in range(100)}
        assert [e.data.item for e in sent] == [f"i{n}" for n in range(100)]
        assert [e.data.value for e in kept] == sorted(
            (f"i{n}" for n in range(100)), key=lambda item: (int(item[1:]) // 10, item)
        )
        assert sorted(commits.values()) == sorted(of_table.values())


@on_both("F11")
def test_the_changelog_of_a_set_tells_actions(log: str, tmp_path: Path) -> None:
    app = App("chat")

    class Join(Record):
        topic: str
        account: str
        leave: bool = False

    joins = app.stream("joins", Join, key="topic")
    members = app.table("members", value=set[str])

    @app.agent(joins, state=members)
    def follow(join: Join, members: Entry[set[str]]) -> None:
        if join.leave:
            members.value.discard(join.account)
        else:
            members.value.add(join.account)

    with AppTest(app, tmp_path, log=log) as run:
        run.send(joins, Join("tea", "ada"))
        run.until_idle()
        run.send(joins, Join("tea", "bob"))
        run.until_idle()
        run.send(joins, Join("tea", "ada", leave=True))
        run.until_idle()
        told = [(e.key, e.data.action, e.data.value) for e in run.whole_events(members)]
        assert told == [
            (b"tea", "add", "ada"),
            (b"tea", "add", "bob"),
            (b"tea", "remove", "ada"),
        ]
        assert run.table(members) == {"tea": {"bob"}}


def test_order_of_a_key_and_ids_that_stay_the_same(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=3)
    copies = app.stream("copies", Order, key="user", partitions=2)

    @app.agent(orders, to=copies)
    def copy(order: Order) -> Order:
        return order

    with AppTest(app, tmp_path, limits=QueryLimits(batch_rows_max=20)) as run:
        run.send(orders, *some_orders(300))
        run.until_idle()
        found = run.whole_events(copies)
        given = {derived_id("shop.copy", event.id, 0) for event in run.whole_events(orders)}
        assert len(given) == 300
        assert {event.id for event in found} == given, "an id depends on nothing but the input's"
        for user in {order.user for order in some_orders(300)}:
            amounts = [e.data.amount for e in found if e.data.user == user]
            assert amounts == sorted(amounts)
        assert all(event.source == "shop.copy" for event in found)


@on_both("F10")
def test_where_an_agent_is_can_be_asked(log: str, tmp_path: Path) -> None:
    shop = Shop(partitions=3)
    with AppTest(shop.app, tmp_path, log=log) as run:
        run.send(shop.orders, *some_orders(50))
        run.until_idle()
        rows = [row for row in agent_rows(run.log) if row.agent == "first_seen"]
        assert [row.partition for row in rows] == [0, 1, 2]
        ends = {p: offsets.next for p, offsets in run.log.offsets("orders").items()}
        assert {row.partition: row.offset for row in rows} == ends
        assert all(row.lag == 0 for row in rows)
        assert any(":" in row.worker for row in rows)


@on_both("F10")
def test_a_key_is_handled_once_though_its_stream_grew(log: str, tmp_path: Path) -> None:
    """After growth a key's events are in two partitions; still one task has its entry."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    counts = app.table("counts", value=int, default=0)

    @app.agent(orders, state=counts)
    def count(order: Order, count: Entry[int]) -> None:
        count.value += 1

    with AppTest(app, tmp_path, log=log) as run:
        run.until_idle()
        run.runner.stop()
        run.send(orders, *some_orders(70))
        run.log.apply([GrowStream("orders", 4)])
        run.send(orders, *some_orders(70))
        run.restart()
        run.until_idle()
        assert run.table(counts) == {f"u{n}": 20 for n in range(7)}


def test_a_stream_that_grows_while_a_batch_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sees events of a new partition knows that keys are in more than one."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=1)
    counts = app.table("counts", value=int, default=0)

    @app.agent(orders, state=counts)
    def count(order: Order, count: Entry[int]) -> None:
        count.value += 1

    with AppTest(app, tmp_path) as run:
        run.until_idle()
        run.runner.stop()
        run.send(orders, *some_orders(70))
        choosing: list[bool] = []
        kind, choose = type(run.log), Query._choose

        def chosen(query: Query) -> Any:
            choosing.append(True)
            return choose(query)

        def growing(asked: Any) -> Any:
            def ask(log: Log, stream: str) -> Any:
                found = asked(log, stream)
                if choosing == [True]:
                    choosing.append(True)
                    run.log.apply([GrowStream("orders", 4)])
                    run.send(orders, *some_orders(70))
                return found

            return ask

        monkeypatch.setattr(Query, "_choose", chosen)
        monkeypatch.setattr(kind, "offsets", growing(kind.offsets))
        monkeypatch.setattr(kind, "stream", growing(kind.stream))
        run.restart()
        run.until_idle()
        assert run.log.stream("orders").partitions == 4
        assert run.table(counts) == {f"u{n}": 20 for n in range(7)}
        assert run.statuses()["count"].rows_in == 140, "each is counted by one of those who read it"


def test_a_key_keeps_its_order_though_its_stream_grew(tmp_path: Path) -> None:
    """Also where growth has moved it to a partition before the one where it was."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=2)
    amounts = app.table("amounts", value=list[int])

    @app.agent(orders, state=amounts)
    def note(order: Order, seen: Entry[list[int]]) -> None:
        seen.value.append(order.amount)

    with AppTest(app, tmp_path) as run:
        run.until_idle()
        run.runner.stop()
        run.send(orders, *[Order(f"u{n % 7}", "tea", n) for n in range(70)])
        run.log.apply([GrowStream("orders", 3)])
        run.send(orders, *[Order(f"u{n % 7}", "tea", n) for n in range(70, 140)])
        run.restart()
        run.until_idle()
        assert run.table(amounts) == {f"u{n}": list(range(n, 140, 7)) for n in range(7)}


def test_several_outputs_go_by_class_or_by_name(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    alerts = app.stream("alerts", Alert, key="user")
    notes = app.stream("notes", Note)
    spare = app.stream("spare", Note)

    @app.agent(orders, to=[alerts, notes, spare])
    def split(order: Order) -> Iterator[Alert | Emit]:
        yield Alert(order.user, order.item)
        yield notes.new(Note("one"), key=order.user, headers={"trace": "7"})
        yield spare.new(Note("two"))

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        run.until_idle()
        assert run.events(alerts) == [Alert("ada", "tea")]
        (note,) = run.whole_events(notes)
        assert (note.data, note.key, note.headers) == (Note("one"), b"ada", {"trace": "7"})
        assert run.events(spare) == [Note("two")]


def test_lists_of_events(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    sizes = app.stream("sizes", Note)
    totals = app.table("totals", value=int, default=0)

    @app.agent(orders, to=sizes, batch_rows=4)
    def measure(orders: list[Order]) -> Note:
        return Note(str(len(orders)))

    @app.agent(orders, state=totals)
    def add_up(orders: list[Event[Order]], total: Entry[int]) -> None:
        assert len({event.key for event in orders}) == 1
        total.value += sum(event.data.amount for event in orders)

    with AppTest(app, tmp_path) as run:
        run.runner.stop()
        run.send(orders, *some_orders(10))
        run.restart()
        run.until_idle()
        assert [note.text for note in run.events(sizes)] == ["4", "4", "2"]
        expected: dict[str, int] = {}
        for order in some_orders(10):
            expected[order.user] = expected.get(order.user, 0) + order.amount
        assert run.table(totals) == {k: v for k, v in expected.items() if v}


def test_an_agent_reads_a_table_it_does_not_write(tmp_path: Path) -> None:
    """The subscribe/publish example: one agent keeps who subscribed, another tells them."""
    app = App("chat")

    class Ask(Record):
        topic: str
        account: str

    asks = app.stream("asks", Ask, key="topic")
    posts = app.stream("posts", Alert, key="user")
    told = app.stream("told", Note)
    subscribers = app.table("subscribers", value=set[str])

    @app.agent(asks, state=subscribers)
    def subscribe(ask: Ask, members: Entry[set[str]]) -> None:
        members.value.add(ask.account)

    @app.agent(posts, reads=subscribers, to=told)
    def publish(post: Alert, subscribers: TableView[set[str]]) -> Iterator[Note]:
        for account in sorted(subscribers.get(post.user) or ()):
            yield Note(f"{account}: {post.item}")

    with AppTest(app, tmp_path) as run:
        run.send(asks, Ask("tea", "ada"), Ask("tea", "bob"))
        run.until_idle()
        run.send(posts, Alert("tea", "hot!"), Alert("jam", "nobody listens"))
        run.until_idle()
        assert [note.text for note in run.events(told)] == ["ada: hot!", "bob: hot!"]


def test_a_set_that_nobody_touched_is_no_change(tmp_path: Path) -> None:
    """Sets have no order, and another process another one; an entry must not change by that."""
    script = """
import sys
from pathlib import Path
from tests.app.shop import Order, Shop
from penstock.testing.apps import AppTest
shop = Shop(partitions=1)
with AppTest(shop.app, Path(sys.argv[1]), tries_max=1) as run:
    run.runner.stop()
    run.send(shop.orders, *[Order(*text.split("/")) for text in sys.argv[2:]])
    run.restart()
    run.until_idle()
    print(len(run.events(shop.seen)))
"""
    items = [f"ada/i{n}" for n in range(12)]
    told = []
    for seed, orders in (("1", items), ("2", ["ada/i1", "bob/tea"]), ("3", ["ada/i2", "eve/tea"])):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), *orders], capture_output=True, text=True,
            check=True, env={**os.environ, "PYTHONHASHSEED": seed}, timeout=60,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        told.append(int(done.stdout))
    assert told == [12, 13, 14]


def test_what_shares_a_query_with_an_agent_on_a_grown_stream(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    by_item = orders.group_by("item")
    names = app.table("names", value=str)
    wide = orders.lookup(names)
    counts = app.table("counts", value=int, default=0)

    @app.agent(orders, state=counts)
    def count(order: Order, count: Entry[int]) -> None:
        count.value += 1

    with AppTest(app, tmp_path) as run:
        run.log.apply([GrowStream("orders", 4)])
        run.send(orders, *some_orders(50))
        run.until_idle()
        assert len(run.events(by_item)) == len(run.events(wide)) == 50
        assert sum(run.table(counts).values()) == 50


def test_a_deleted_entry(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    counts = app.table("counts", value=int, default=0)

    @app.agent(orders, state=counts)
    def handle(order: Order, count: Entry[int]) -> None:
        if order.item == "set":
            count.value = 5
        elif order.item == "delete":
            count.delete()
        elif order.item == "replace":
            count.delete()
            count.value = 7

    with AppTest(app, tmp_path) as run:
        for items, expected in (
            (["set"], {"ada": 5}),
            (["delete", "look"], {}),
            (["set"], {"ada": 5}),
            (["replace"], {"ada": 7}),
            (["delete", "set"], {"ada": 5}),
        ):
            run.send(orders, *[Order("ada", item) for item in items])
            run.until_idle()
            assert run.table(counts) == expected, items


def test_batches_that_upkeep_has_merged_are_read_in_order_of_commit(tmp_path: Path) -> None:
    """A stretch of a merged batch knows the commits of its own events alone."""
    app = App("counting")
    orders = app.stream("orders", Order, key="user", partitions=2)
    notes = app.stream("notes", Note)

    @app.agent(orders, to=notes)
    def note(order: Order) -> Note:
        return Note(f"{order.user}:{order.amount}")

    with open_log(tmp_path / "test.db", upkeep_interval_ms=0) as log:
        log.apply([CreateStream(declare("orders", Order, key="user", partitions=2))])
        with Producer(log) as producer:
            for n in range(90):
                producer.send("orders", Order(f"u{n % 5}", "tea", n))
                producer.flush()
        log.apply([GrowStream("orders", 3)])
        assert log.maintain().batches_merged
    with AppTest(app, tmp_path, limits=QueryLimits(batch_rows_max=21)) as run:
        run.until_idle()
        found = [note.text for note in run.events(notes)]
    for user in range(5):
        mine = [text for text in found if text.startswith(f"u{user}:")]
        assert mine == [f"u{user}:{n}" for n in range(user, 90, 5)]
