"""Acknowledgement, timers and windows: what comes again, or later."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from penstock import (
    App,
    Context,
    Entry,
    Event,
    Record,
    WindowedEntry,
    hopping,
    tumbling,
)
from penstock.testing.apps import AppTest
from tests.app.shop import START, Note, Order, Shop


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


class Visit(Record):
    page: int


def test_windows_of_numbered_keys_expire(tmp_path: Path) -> None:
    app = App("site")
    visits = app.stream("visits", Visit, key="page")
    counts = app.table(
        "counts", key=int, value=int, default=0, window=tumbling("1 hour", expires="1 hour"),
        relative_to="clock",
    )  # fmt: skip

    @app.agent(visits, state=counts)
    def count(visit: Visit, counts: WindowedEntry[int]) -> None:
        counts.current().value += 1

    with AppTest(app, tmp_path) as run:
        run.send(visits, Visit(7), Visit(7))
        run.until_idle()
        assert [(key, value) for (key, _), value in run.table(counts).items()] == [(7, 2)]
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
