"""Runners and what feeds them: taking over, starting again, going on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from penstock import (
    AlterStream,
    App,
    AppStream,
    Channel,
    Context,
    CreateStream,
    Log,
    declare,
)
from penstock import open as open_log
from penstock.app.declaring.plan import plan
from penstock.app.running.building import take_over
from penstock.app.running.positions import (
    BatchPosition,
    Mover,
    Position,
    SinkPosition,
    StartPosition,
    pack_position,
    producer_name,
    progress_key,
)
from penstock.app.running.query import Query
from penstock.app.running.reports import Beat, Reporter, beat_key, beats
from penstock.app.running.reset import reset_query
from penstock.app.running.runner import Runner, RunnerOptions
from penstock.app.running.takeover import claim
from penstock.errors import FencedError, PenstockError, UsageError
from penstock.log.api import Commit, Holder
from penstock.testing.apps import AppTest
from penstock.testing.processes import wait_until
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


def test_a_feed_numbers_its_events_for_a_stream_that_takes_ids_from_its_producer(
    tmp_path: Path,
) -> None:
    """In whatever batches they come: no two have the same, and none is taken for another."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=1)
    channel: Channel[Order] = Channel()
    app.feed(channel, to=orders)
    with open_log(tmp_path / "test.db") as log:
        log.apply([CreateStream(declare("orders", Order, key="user", ids="producer"))])
    with AppTest(app, tmp_path) as run:
        for count in (3, 1, 2):
            for order in some_orders(count):
                channel.send(order)
            run.until_idle()
        assert [event.id for event in run.whole_events(orders)] == [str(n) for n in range(6)]
        channel.close()


def test_failures_with_batches_in_between_are_no_reason_to_give_up(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    tries: list[int] = []

    @app.agent(orders)
    def handle(order: Order) -> None:
        tries.append(order.amount)
        if tries.count(order.amount) < 3:
            raise ValueError("not yet")

    with AppTest(app, tmp_path, tries_max=3) as run:
        for number in range(4):
            run.send(orders, Order("ada", "tea", number))
            run.until_idle()
        assert run.statuses()["handle"].restarts == 8


def test_waiting_for_another_try_has_a_limit(tmp_path: Path) -> None:
    options = RunnerOptions(backoff_ms=500, backoff_ms_max=3000)
    with open_log(tmp_path / "test.db", create=True) as log:
        runner = Runner(log, plan(App("shop")), [], options, lambda: True)
        assert 0.4 <= runner._backoff_s(1) <= 0.6
        assert 0.8 <= runner._backoff_s(2) <= 1.2
        assert 2.4 <= runner._backoff_s(60) <= 3.6


def test_what_was_not_acknowledged_is_not_lost_to_another_grouping(tmp_path: Path) -> None:
    """A new version that acknowledges by itself could share a query, but is not at its place."""
    calls: list[str] = []

    def version(ack: Literal["auto", "manual"]) -> tuple[App, AppStream[Order]]:
        app = App("shop")
        orders = app.stream("orders", Order, key="user")

        @app.agent(orders)
        def one(order: Order) -> None:
            calls.append("one")

        @app.agent(orders, ack=ack)
        def other(order: Order, context: Context) -> None:
            calls.append("other")

        return app, orders

    app, orders = version("manual")
    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        wait_until(lambda: {*calls} == {"one", "other"}, 30, "both being called")
    calls.clear()
    app, _ = version("auto")
    with AppTest(app, tmp_path) as run:
        run.until_idle(60)
    assert calls == ["other"]


def test_a_position_is_read_again_once_nobody_can_move_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs it commits between the first look and being fenced: nothing is done twice."""
    producer = producer_name("shop", "a")
    seen: list[Position | None] = []

    def at(offset: int) -> Commit:
        position = BatchPosition(mover=Mover(producer, "run"), next={"orders": {0: offset}})
        return Commit(progress={progress_key("shop", "a"): pack_position(position)})

    def decide(found: Mapping[str, Position | None]) -> Mapping[str, Position | None]:
        seen.append(found["a"])
        return found

    with open_log(tmp_path / "test.db", create=True) as log:
        runner, hold = log.hold(producer), type(log).hold
        log.commit(runner, 0, at(1))

        def late(log: Log, name: str, **more: bool) -> Holder:
            if name == producer:
                log.commit(runner, 1, at(2))
            return hold(log, name, **more)

        monkeypatch.setattr(type(log), "hold", late)
        claim(log, "shop", ["a"], decide, {})
    (found,) = seen
    assert isinstance(found, BatchPosition)
    assert found.next == {"orders": {0: 2}}


def test_what_comes_while_queries_are_asked_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may send to another that was asked before it: all together are not idle then."""
    app, orders = counting("a")
    with AppTest(app, tmp_path) as run:
        run.until_idle()
        run.runner.stop()
        assert run.runner.is_idle()

        def is_idle() -> bool:
            run.send(orders, Order("ada", "tea"))
            return True

        monkeypatch.setattr(run.runner._kept[0].query, "is_idle", is_idle)
        assert not run.runner.is_idle()


def test_who_is_alive_is_known_by_recent_signs_of_life(tmp_path: Path) -> None:
    """Of a process of this machine, by whether it is there."""
    now = time.time_ns() // 1000
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    here, there, recently = socket.gethostname(), "elsewhere", now - 5_000_000
    signs = {
        "this": (here, os.getpid(), recently), "ended": (here, ended.pid, recently),
        "another": (there, ended.pid, recently), "quiet": (there, 1, now - 60_000_000),
        "stuck": (here, os.getpid(), now - 60_000_000),
    }  # fmt: skip
    with open_log(tmp_path / "test.db", create=True) as log:
        made = {
            beat_key("shop", name): msgspec.json.encode(
                Beat(runner=name, host=host, pid=pid, started_us=0, time_us=at, queries={})
            )
            for name, (host, pid, at) in signs.items()
        }
        log.commit(log.hold("signs"), 0, Commit(progress=made))
        assert sorted(beat.runner for beat in beats(log)["shop"]) == ["another", "this"]


def test_a_runner_that_stops_leaves_no_sign_of_life(tmp_path: Path) -> None:
    app, _ = counting("a")
    with AppTest(app, tmp_path) as run:
        reporter = Reporter(run.runner, 20)
        reporter.start()
        wait_until(lambda: "shop" in beats(run.log), 30, "a sign of life")
        reporter.stop()
        assert run.log.progress_items("runner/") == {}


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
        with pytest.raises(UsageError, match="omit --from latest"):
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
        with pytest.raises(PenstockError, match="cannot be read from the beginning a second time"):
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


@pytest.mark.parametrize("kind", [BatchPosition, SinkPosition])
def test_a_sink_goes_on_from_a_position_without_books(kind: Any) -> None:
    """One that was reset, or that an earlier version saved before the sink had decided."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    app.sink(orders, "127.0.0.1:1", name="out")
    found = take_over(kind(next={"orders": {0: 5}}), app.definitions["out"])
    assert isinstance(found, SinkPosition)
    assert found.next == {"orders": {0: 5}}
    started = take_over(StartPosition(next={"orders": {0: 7}}), app.definitions["out"])
    assert isinstance(started, SinkPosition)
    assert started.next == {"orders": {0: 7}}
