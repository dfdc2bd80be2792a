"""What agents do, on a real log and without Spark."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import (
    AlterStream,
    App,
    AppStream,
    Channel,
    Context,
    Emit,
    Entry,
    Event,
    GrowStream,
    Record,
    TableView,
    WindowedEntry,
    hopping,
    tumbling,
)
from penstock.app.query import Query, QueryLimits
from penstock.app.reports import agent_rows
from penstock.app.reset import reset_query
from penstock.errors import QueryFailedError
from penstock.testing.apps import AppTest

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Order(Record):
    user: str
    item: str
    amount: int = 1


class Alert(Record):
    user: str
    item: str


class Note(Record):
    text: str


class Shop:
    """The app that most of these tests vary."""

    def __init__(self, partitions: int = 2) -> None:
        self.app = App("shop")
        self.orders = self.app.stream("orders", Order, key="user", partitions=partitions)
        self.alerts = self.app.stream("alerts", Alert, key="user")
        self.seen = self.app.table("seen", value=set[str])

        @self.app.agent(self.orders, state=self.seen, to=self.alerts)
        def first_seen(order: Order, seen: Entry[set[str]]) -> Iterator[Alert]:
            if order.item not in seen.value:
                seen.value.add(order.item)
                yield Alert(order.user, order.item)


def some_orders(count: int) -> list[Order]:
    return [Order(f"u{n % 7}", f"i{n % 5}", n) for n in range(count)]


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


@pytest.mark.row("F11", engine="embedded")
def test_the_changelog_of_a_set_tells_actions(tmp_path: Path) -> None:
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

    with AppTest(app, tmp_path) as run:
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
        assert len({event.id for event in found}) == 300
        for user in {order.user for order in some_orders(300)}:
            amounts = [e.data.amount for e in found if e.data.user == user]
            assert amounts == sorted(amounts)
        assert all(event.source == "shop.copy" for event in found)


@pytest.mark.row("F10", engine="embedded")
def test_where_an_agent_is_can_be_asked(tmp_path: Path) -> None:
    shop = Shop(partitions=3)
    with AppTest(shop.app, tmp_path) as run:
        run.send(shop.orders, *some_orders(50))
        run.until_idle()
        rows = [row for row in agent_rows(run.log) if row.agent == "first_seen"]
        assert [row.partition for row in rows] == [0, 1, 2]
        ends = {p: offsets.next for p, offsets in run.log.offsets("orders").items()}
        assert {row.partition: row.offset for row in rows} == ends
        assert all(row.lag == 0 for row in rows)
        assert any(":" in row.worker for row in rows)


@pytest.mark.row("F10", engine="embedded")
def test_a_key_is_handled_once_though_its_stream_grew(tmp_path: Path) -> None:
    """After growth a key's events are in two partitions; still one task has its entry."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    counts = app.table("counts", value=int, default=0)

    @app.agent(orders, state=counts)
    def count(order: Order, count: Entry[int]) -> None:
        count.value += 1

    with AppTest(app, tmp_path) as run:
        run.until_idle()
        run.runner.stop()
        run.send(orders, *some_orders(70))
        run.log.apply([GrowStream("orders", 4)])
        run.send(orders, *some_orders(70))
        run.restart()
        run.until_idle()
        assert run.table(counts) == {f"u{n}": 20 for n in range(7)}


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


# Errors


def failing(on_error: str, retries: int = 0) -> tuple[App, AppStream[Order], AppStream[Alert]]:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    alerts = app.stream("alerts", Alert, key="user")
    counts = app.table("counts", value=list[str])

    @app.agent(orders, state=counts, to=alerts, on_error=on_error, retries=retries, backoff="1 ms")  # type: ignore[arg-type]
    def handle(order: Order, count: Entry[list[str]]) -> Iterator[Alert]:
        count.value.append(order.item)
        yield Alert(order.user, order.item)
        if order.item == "poison":
            raise ValueError("cannot eat this")

    return app, orders, alerts


def test_stop_names_the_event_and_shows_the_users_traceback(tmp_path: Path) -> None:
    app, orders, alerts = failing("stop")
    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        run.until_idle()
        run.send(orders, Order("ada", "jam"), Order("ada", "poison"))
        failure = str(run.until_failed())
        assert (
            "handle failed at orders, partition 0, offset 2: ValueError: cannot eat this" in failure
        )
        assert "test_agents.py" in failure
        assert "penstock/app/agents.py" not in failure
        assert run.statuses()["handle"].restarts == 2
        assert len(run.events(alerts)) == 1, "nothing of a failed batch is visible"


def test_skip_undoes_what_the_failed_call_did(tmp_path: Path) -> None:
    app, orders, alerts = failing("skip")
    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"), Order("ada", "poison"), Order("ada", "jam"))
        run.until_idle()
        assert [a.item for a in run.events(alerts)] == ["tea", "jam"]
        assert run.table(app.tables["counts"]) == {"ada": ["tea", "jam"]}
        assert run.statuses()["handle"].rows_skipped == 1


def test_dead_letters_tell_everything(tmp_path: Path) -> None:
    app, orders, alerts = failing("dead-letter", retries=2)
    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "poison", 5), Order("bob", "tea"))
        run.until_idle()
        assert [a.user for a in run.events(alerts)] == ["bob"]
        letters: list[Any] = run.events(app.streams["handle_dead"])
        (letter,) = letters
        assert (letter.agent, letter.stream, letter.offset, letter.key) == (
            "handle", "orders", 0, "ada",
        )  # fmt: skip
        assert letter.tries == 3
        assert letter.error == "ValueError: cannot eat this"
        assert letter.data == '{"user":"ada","item":"poison","amount":5}'
        assert "test_agents.py" in letter.traceback


def test_a_retry_starts_from_the_value_before(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    counts = app.table("counts", value=int, default=0)
    tries: list[int] = []

    @app.agent(orders, state=counts, retries=3, backoff="1 ms")
    def flaky(order: Order, count: Entry[int]) -> None:
        count.value += 1
        tries.append(count.value)
        if len(tries) < 3:
            raise OSError("not yet")

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        run.until_idle()
        assert tries == [1, 1, 1]
        assert run.table(counts) == {"ada": 1}


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    counts = app.table("counts", value=int, default=0)

    @app.agent(orders, state=counts)
    def wrong(order: Order, count: Entry[int]) -> None:
        count.value = "many"  # type: ignore[assignment]

    with AppTest(app, tmp_path, tries_max=1) as run:
        run.send(orders, Order("ada", "tea"))
        assert "what it left in table counts is not what the table holds" in str(run.until_failed())


# Acknowledgement, timers, windows


def test_what_is_not_acknowledged_comes_again(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    calls: list[str] = []

    @app.agent(orders, ack="manual")
    def call(order: Order, context: Context) -> None:
        calls.append(order.item)
        if order.item != "busy" or calls.count("busy") == 3:
            context.ack()

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"), Order("ada", "busy"), Order("ada", "jam"))
        run.until_idle(60)
        assert calls.count("busy") == 3
        assert calls.count("tea") == calls.count("jam") == 1


def test_what_is_not_acknowledged_survives_a_restart(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    calls: list[str] = []
    ready: list[bool] = []

    @app.agent(orders, ack="manual")
    def call(order: Order, context: Context) -> None:
        calls.append(order.item)
        if ready:
            context.ack()

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        while not calls:
            run.runner.until_idle(0.01)
        run.runner.stop()
        ready.append(True)
        seen = len(calls)
        run.restart()
        run.until_idle(60)
        assert calls[seen:] == ["tea"]


def test_timers_wake_a_key(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    notes = app.stream("notes", Note)
    waiting = app.table("waiting", value=int, default=0)

    @app.agent(orders, state=waiting, to=notes)
    def watch(order: Order, waiting: Entry[int], context: Context) -> None:
        waiting.value += 1
        if order.item == "cancel":
            context.cancel_timer()
        else:
            context.set_timer(after="1 hour")

    @watch.timer
    def remind(waiting: Entry[int], context: Context) -> Note:
        return Note(f"{context.key!s} waits for {waiting.value}")

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"), Order("bob", "tea"), Order("bob", "cancel"))
        run.until_idle()
        assert run.events(notes) == []
        run.restart()
        run.advance("2 hours")
        run.until_idle()
        assert run.events(notes) == [Note("ada waits for 1")]
        run.advance("2 hours")
        run.until_idle()
        assert len(run.events(notes)) == 1


@pytest.mark.row("F11", engine="embedded")
def test_windowed_entries(tmp_path: Path) -> None:
    class View(Record):
        page: str
        user: str
        at: dt.datetime

    app = App("site")
    views = app.stream("views", View, key="page", time="at")
    visitors = app.table("visitors", value=set[str], window=tumbling("1 hour"))
    counts = app.table("counts", value=int, default=0, window=hopping("1 hour", "30 minutes"))
    notes = app.stream("notes", Note)

    @app.agent(views, state=visitors, to=notes)
    def visit(view: View, visitors: WindowedEntry[set[str]]) -> Note:
        visitors.current().value.add(view.user)
        return Note(f"{len(visitors.current().value)} after {len(visitors.delta('1 hour').value)}")

    @app.agent(views, state=counts)
    def count(view: View, counts: WindowedEntry[int]) -> None:
        for _, entry in counts.windows():
            entry.value += 1

    hour = 3_600_000
    first = int(START.timestamp() * 1000)
    with AppTest(app, tmp_path) as run:
        for minutes, user in ((0, "ada"), (10, "bob"), (70, "ada")):
            run.send(views, View("home", user, START + dt.timedelta(minutes=minutes)))
        run.until_idle()
        assert run.table(visitors) == {
            ("home", first): {"ada", "bob"},
            ("home", first + hour): {"ada"},
        }
        assert [note.text for note in run.events(notes)] == ["1 after 0", "2 after 0", "1 after 2"]
        assert run.table(counts) == {
            ("home", first - hour // 2): 2,
            ("home", first): 2,
            ("home", first + hour // 2): 1,
            ("home", first + hour): 1,
        }


def test_windows_relative_to_the_clock_expire(tmp_path: Path) -> None:
    app = App("site")
    views = app.stream("views", Order, key="user")
    counts = app.table(
        "counts", value=int, default=0, window=tumbling("1 hour", expires="1 hour"),
        relative_to="clock",
    )  # fmt: skip

    @app.agent(views, state=counts)
    def count(view: Order, counts: WindowedEntry[int]) -> None:
        counts.current().value += 1
        assert counts.now().value == counts.current().value

    with AppTest(app, tmp_path) as run:
        run.send(views, Order("ada", "x"))
        run.until_idle()
        assert list(run.table(counts).values()) == [1]
        run.advance("3 hours")
        run.until_idle()
        assert run.table(counts) == {}


def test_changes_of_a_table_call_an_agent(tmp_path: Path) -> None:
    shop = Shop()
    told = shop.app.stream("told", Note)

    @shop.app.agent(shop.seen.changes, to=told)
    def on_change(change: Event[Record], context: Context) -> Note:
        data = change.data
        return Note(f"{(change.key or b'').decode()} {data.action} {data.value}")  # type: ignore[attr-defined]

    with AppTest(shop.app, tmp_path) as run:
        run.send(shop.orders, Order("ada", "tea"))
        run.until_idle()
        assert run.events(told) == [Note("ada add tea")]


# Sources in this process


def test_an_iterable_fills_a_stream_once(tmp_path: Path) -> None:
    shop = Shop()
    shop.app.feed(some_orders(2500), to=shop.orders)
    with AppTest(shop.app, tmp_path) as run:
        run.until_idle()
        assert len(run.events(shop.orders)) == 2500
        run.restart()
        run.until_idle()
        assert len(run.events(shop.orders)) == 2500


def test_a_channel_is_read_while_the_app_runs(tmp_path: Path) -> None:
    shop = Shop()
    channel: Channel[Order] = Channel()
    shop.app.feed(channel, to=shop.orders)
    with AppTest(shop.app, tmp_path) as run:
        channel.send(Order("ada", "tea"))
        run.until_idle()
        assert run.events(shop.alerts) == [Alert("ada", "tea")]
        channel.send(Order("bob", "tea"))
        run.until_idle()
        assert len(run.events(shop.alerts)) == 2
        channel.close()


# Getting over faults


@pytest.mark.row("X7")
@pytest.mark.parametrize(
    "name", ["stage.begun", "stage.committed", "commit.index", "commit.table", "commit.committed",
             "publish.pieces"]
)  # fmt: skip
def test_a_fault_changes_nothing_in_the_end(tmp_path: Path, name: str) -> None:
    shop = Shop()
    with AppTest(shop.app, tmp_path, tries_max=5) as run:
        run.send(shop.orders, *some_orders(50))
        with run.fault(name, at=2):
            run.send(shop.orders, *some_orders(100))
            run.until_idle()
        assert len(run.events(shop.alerts)) == 35
        assert run.table(shop.seen) == {f"u{u}": {f"i{i}" for i in range(5)} for u in range(7)}


def test_a_second_runner_takes_over(tmp_path: Path) -> None:
    shop = Shop()
    with AppTest(shop.app, tmp_path) as run:
        run.send(shop.orders, Order("ada", "tea"))
        run.until_idle()
        old = run.runner
        run._start()
        run.send(shop.orders, Order("ada", "jam"))
        run.until_idle()
        with pytest.raises(QueryFailedError, match="was opened again"):
            failure = None
            while failure is None:
                failure = old.failure()
                old._stop.wait(0.01)
            raise failure
        old.stop()
        assert [a.item for a in run.events(shop.alerts)] == ["tea", "jam"]


# What two reviews found


def test_a_set_that_nobody_touched_is_no_change(tmp_path: Path) -> None:
    """Sets have no order, and another process another one; an entry must not change by that."""
    script = """
import sys
from pathlib import Path
from tests.app.test_agents import Order, Shop
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


def counting(*names: str) -> tuple[App, AppStream[Order]]:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    for name in names:
        out = app.stream(f"of_{name}", Order, key="user")

        @app.agent(orders, to=out, name=name)
        def copy(order: Order) -> Order:
            return order

    return app, orders


def test_runners_that_group_otherwise_do_not_both_run(tmp_path: Path) -> None:
    """Before anything was handled, too: who runs what is said first."""
    app, orders = counting("a", "b")
    more, _ = counting("a", "b", "c")
    with AppTest(app, tmp_path) as run:
        old = run.runner
        run.app = more
        run._start()
        run.send(orders, *some_orders(10))
        run.until_idle()
        while old.failure() is None:
            old._stop.wait(0.01)
        old.stop()
        for name in ("a", "b", "c"):
            assert len(run.events(more.streams[f"of_{name}"])) == 10
        run._only = ["a"]
        run.restart()
        run.send(orders, *some_orders(5))
        run.until_idle()
        run._only = []
        run.restart()
        run.until_idle()
        for name in ("a", "b", "c"):
            assert len(run.events(more.streams[f"of_{name}"])) == 15


def test_a_new_definition_starts_at_the_beginning(tmp_path: Path) -> None:
    app, orders = counting("a")
    more, _ = counting("a", "b")
    with AppTest(app, tmp_path) as run:
        run.send(orders, *some_orders(10))
        run.until_idle()
        run.app = more
        run.restart()
        run.send(orders, *some_orders(5))
        run.until_idle()
        assert [len(run.events(more.streams[f"of_{n}"])) for n in ("a", "b")] == [15, 15]


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


def test_a_reader_of_a_stream_that_was_cleared_starts_again(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    mid = app.stream("mid", Order, key="user")
    out = app.stream("out", Order, key="user")

    @app.agent(orders, to=mid)
    def up(order: Order) -> Order:
        return order

    @app.agent(mid, to=out)
    def down(order: Order) -> Order:
        return order

    with AppTest(app, tmp_path) as run:
        run.send(orders, *some_orders(6))
        run.until_idle()
        run.runner.stop()
        reset_query(run.log, "shop", "up", output="clear", outputs=("mid",), inputs=("orders",))
        run.restart()
        run.until_idle()
        assert len(run.events(out)) == 12, "what was there, and what the reset gives anew"


@pytest.mark.parametrize("kind", ["generator", "channel"])
def test_a_feed_gets_over_a_failed_commit(tmp_path: Path, kind: str) -> None:
    shop = Shop()
    channel: Channel[Order] = Channel()
    for order in some_orders(2500):
        channel.send(order)
    source = channel if kind == "channel" else (order for order in some_orders(2500))
    shop.app.feed(source, to=shop.orders)
    with AppTest(shop.app, tmp_path) as run, run.fault("commit.blobs", at=2):
        run.until_idle()
        assert len(run.events(shop.orders)) == 2500


def test_two_agents_with_windows_that_expire(tmp_path: Path) -> None:
    app = App("site")
    views = app.stream("views", Order, key="user")
    tables = [
        app.table(
            f"t{n}", value=int, default=0, window=tumbling("1 hour", expires=expires),
            relative_to="clock",
        )
        for n, expires in enumerate(["1 hour", "30 days"])
    ]  # fmt: skip
    for n, table in enumerate(tables):

        @app.agent(views, state=table, name=f"a{n}")
        def count(view: Order, counts: WindowedEntry[int]) -> None:
            counts.current().value += 1

    @app.agent(views)
    def plain(view: Order) -> None: ...

    with AppTest(app, tmp_path) as run:
        run.send(views, Order("ada", "x"))
        run.until_idle()
        run.advance("3 hours")
        run.until_idle()
        assert [len(run.table(table)) for table in tables] == [0, 1]


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


def test_a_failed_try_leaves_no_trace(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    notes = app.stream("notes", Note)
    marks: list[str] = []

    @app.agent(orders, to=notes, retries=1, backoff="1 ms", on_error="skip")
    def flaky(order: Order, context: Context) -> None:
        marks.append(str(context.uuid()))
        order.item += "!"
        assert order.item == "tea!"
        if len(marks) == 1:
            context.set_timer(after="1 hour")
            raise OSError("not yet")

    @flaky.timer
    def remind(context: Context) -> Note:
        return Note("never")

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        run.until_idle()
        assert len(marks) == 2
        assert len(set(marks)) == 1
        run.advance("2 hours")
        run.until_idle()
        assert run.events(notes) == []


@pytest.mark.parametrize("what", ["empty key", "wrong type", "wrong state", "naive timer"])
def test_on_error_covers_what_a_call_gives(tmp_path: Path, what: str) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    alerts = app.stream("alerts", Alert, key="user")
    counts = app.table("counts", value=int, default=0)

    @app.agent(orders, state=counts, to=alerts, on_error="dead-letter")
    def handle(order: Order, count: Entry[int], context: Context) -> Iterator[Alert]:
        count.value += 1
        if order.item == "poison":
            match what:
                case "empty key":
                    yield Alert("", "x")
                case "wrong type":
                    yield Alert("ada", 7)  # type: ignore[arg-type]
                case "wrong state":
                    count.value = "many"  # type: ignore[assignment]
                case "naive timer":
                    context.set_timer(dt.datetime(2026, 1, 1))
        yield Alert(order.user, order.item)

    @handle.timer
    def remind(count: Entry[int], context: Context) -> None: ...

    with AppTest(app, tmp_path, tries_max=1) as run:
        run.send(orders, Order("ada", "tea"), Order("ada", "poison"), Order("ada", "jam"))
        run.until_idle()
        assert [alert.item for alert in run.events(alerts)] == ["tea", "jam"]
        assert run.table(counts) == {"ada": 2}
        assert len(run.events(app.streams["handle_dead"])) == 1


def test_settings_of_a_stream_are_brought_up_to_date(tmp_path: Path) -> None:
    def build(partitions: int, retention_ms: int | None = None) -> App:
        app = App("shop")
        app.stream("orders", Order, key="user", partitions=partitions, retention_ms=retention_ms)
        return app

    with AppTest(build(partitions=1), tmp_path):
        pass
    with AppTest(build(partitions=3, retention_ms=1000), tmp_path) as run:
        stream = run.log.stream("orders")
        assert (stream.partitions, stream.spec.retention_ms) == (3, 1000)
    with AppTest(build(partitions=3, retention_ms=1000), tmp_path) as run:
        assert run.log.stream("orders").version == stream.version


def test_an_idle_query_on_an_expired_stream_rests(tmp_path: Path) -> None:
    shop = Shop(partitions=1)
    with AppTest(shop.app, tmp_path) as run:
        run.runner.stop()
        run.send(shop.orders, *some_orders(10))
        spec = run.log.stream("orders").spec
        run.log.apply([AlterStream(msgspec.structs.replace(spec, retention_ms=1))])
        while run.log.offsets("orders")[0].first < 10:
            run.log.maintain()
        query = run.runner._kept[0].query
        assert isinstance(query, Query)
        run.restart()
        fresh = run.runner._kept[0].query
        assert isinstance(fresh, Query)
        run.until_idle()
        assert not fresh.wait(0.05), "there is nothing to do"
