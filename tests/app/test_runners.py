"""Runners and what feeds them: taking over, starting again, going on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock import (
    AlterStream,
    App,
    AppStream,
    Channel,
)
from penstock.app.query import Query
from penstock.app.reset import reset_query
from penstock.errors import FencedError, PenstockError, UsageError
from penstock.testing.apps import AppTest
from tests.app.shop import Alert, Order, Shop, some_orders


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


def test_a_query_that_was_taken_over_does_not_start_again(tmp_path: Path) -> None:
    """Not even when it was down at that moment, and nobody could fence it."""
    app, orders = counting("a", "b")
    with AppTest(app, tmp_path) as run:
        run.send(orders, *some_orders(10))
        run.until_idle()
        (old,) = [kept.query for kept in run.runner._kept if isinstance(kept.query, Query)]
        run._only = ["a"]
        run.restart()
        run.until_idle()
        with pytest.raises(FencedError, match="taken over"):
            old.start()


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
@pytest.mark.parametrize("step", ["commit.blobs", "commit.committed"])
def test_a_feed_gets_over_a_failed_commit(tmp_path: Path, kind: str, step: str) -> None:
    """One that did not happen, and one that did without anybody knowing."""
    app = App("shop")
    orders = app.stream("orders", Order)
    channel: Channel[Order] = Channel()
    is_armed = threading.Event()

    def items() -> Iterator[Order]:
        is_armed.wait(30)
        yield from some_orders(2500)

    app.feed(channel if kind == "channel" else items(), to=orders)
    with AppTest(app, tmp_path) as run, run.fault(step, at=2):
        is_armed.set()
        for order in some_orders(2500 if kind == "channel" else 0):
            channel.send(order)
        run.until_idle()
        assert len(run.events(orders)) == 2500


class Flaky:
    """Orders that can be read again and again; the first time they fail in the middle."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __iter__(self) -> Iterator[Order]:
        for number, order in enumerate(some_orders(2500)):
            if number == 1500 and self.times:
                self.times -= 1
                raise OSError("the disk has a hiccup")
            yield order


def test_a_feed_has_no_latest(tmp_path: Path) -> None:
    shop = Shop()
    shop.app.feed(some_orders(3), to=shop.orders)
    with AppTest(shop.app, tmp_path) as run:
        run.until_idle()
        run.runner.stop()
        (feed,) = [name for name in shop.app.definitions if "feed" in name]
        with pytest.raises(UsageError, match="leave out --from latest"):
            reset_query(run.log, shop.app.name, feed, start="latest")


def test_a_feed_that_fails_in_the_middle_is_read_again(tmp_path: Path) -> None:
    shop = Shop()
    shop.app.feed(Flaky(1), to=shop.orders)
    with AppTest(shop.app, tmp_path) as run:
        run.until_idle()
        assert len(run.events(shop.orders)) == 2500


def test_a_feed_that_cannot_be_read_again_does_not_seem_to_be_at_its_end(tmp_path: Path) -> None:
    shop = Shop()
    shop.app.feed(iter(Flaky(1)), to=shop.orders)
    with AppTest(shop.app, tmp_path) as run:
        with pytest.raises(PenstockError, match="cannot be read again from its start"):
            run.until_idle()
        assert len(run.events(shop.orders)) == 1500, "what it gave is not lost"


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
