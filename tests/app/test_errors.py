"""What becomes of events that an agent cannot handle, and of faults around it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from penstock import (
    App,
    AppStream,
    Context,
    CreateStream,
    DeadLetter,
    Entry,
    Producer,
    Transaction,
    declare,
    read_events,
)
from penstock import open as open_log
from penstock.errors import LogBusyError, QueryFailedError
from penstock.log.letters import DEAD_CHARS_MAX
from penstock.testing.apps import AppTest
from tests.app.shop import Alert, Note, Order, Shop, some_orders
from tests.cli.test_cli import damage_the_largest_batch


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
        assert "test_errors.py" in failure
        assert "penstock/app/tasks/agents.py" not in failure
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
        assert "test_errors.py" in letter.traceback


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


def test_a_retry_is_given_the_event_as_it_came(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    seen: list[str] = []

    @app.agent(orders, retries=2, backoff="1 ms")
    def careless(order: Order) -> None:
        seen.append(order.item)
        order.item = "something else"
        if len(seen) < 3:
            raise OSError("not yet")

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        run.until_idle()
    assert seen == ["tea", "tea", "tea"]


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    counts = app.table("counts", value=int, default=0)

    @app.agent(orders, state=counts)
    def wrong(order: Order, count: Entry[int]) -> None:
        count.value = "many"  # type: ignore[assignment]

    with AppTest(app, tmp_path, tries_max=1) as run:
        run.send(orders, Order("ada", "tea"))
        assert "a value it set does not fit table counts" in str(run.until_failed())


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


def test_a_timer_that_fails_is_a_dead_letter(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders, on_error="dead-letter")
    def wait(order: Order, context: Context) -> None:
        context.set_timer(after="1 hour")

    @wait.timer
    def remind(context: Context) -> None:
        raise ValueError("nobody there")

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        run.until_idle()
        run.advance("2 hours")
        run.until_idle()
        (letter,) = [event.data for event in read_events(run.log, "wait_dead", DeadLetter)]
        assert (letter.agent, letter.stream, letter.key) == ("wait", "", "ada")
        assert letter.error == "ValueError: nobody there"
        assert "timer" in letter.data
        assert "remind" in letter.traceback


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
        with pytest.raises(QueryFailedError, match="was taken over by another run of app shop"):
            failure = None
            while failure is None:
                failure = old.failure()
                old._stop.wait(0.01)
            raise failure
        old.stop()
        assert [a.item for a in run.events(shop.alerts)] == ["tea", "jam"]


@pytest.mark.parametrize("on_damage", ["skip", "dead-letter"])
def test_what_cannot_be_read_is_left_out_if_told(tmp_path: Path, on_damage: str) -> None:
    app = App("a")
    orders = app.stream("orders", Order, on_damage=on_damage)  # type: ignore[call-overload]
    alerts = app.stream("alerts", Alert)

    @app.agent(orders, to=alerts)
    def warn(order: Order) -> Alert:
        return Alert(order.user, order.item)

    path = tmp_path / "test.db"
    with open_log(path, upkeep_interval_ms=0) as log:
        log.apply([CreateStream(declare("orders", Order))])
        with Transaction(log, "bulk") as transaction:
            for n in range(500):
                transaction.send("orders", Order(f"u{n}", f"i{n}" * 50, n))
        with Producer(log) as producer:
            producer.send("orders", Order("ada", "tea", 3))
    damage_the_largest_batch(path)
    with AppTest(app, tmp_path) as run:
        run.until_idle()
        assert run.events(alerts) == [Alert("ada", "tea")]
        if on_damage == "dead-letter":
            (letter,) = run.events(cast(AppStream[DeadLetter], app.streams["orders_dead"]))
            assert (letter.stream, letter.offset, letter.data) == ("orders", 0, "")
            assert "offsets 0 to 499 are damaged" in letter.error


def test_what_goes_wrong_with_the_log_is_no_failure_of_the_event(tmp_path: Path) -> None:
    """A table that cannot be looked at now can be a moment later: no letter is written for it."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    notes = app.stream("notes", Note)
    tries: list[str] = []

    @app.agent(orders, to=notes, on_error="dead-letter", retries=1, backoff="1 ms")
    def tell(order: Order) -> Note:
        tries.append(order.item)
        if len(tries) <= 2:
            raise LogBusyError("another process writes")
        return Note(order.item)

    with AppTest(app, tmp_path, tries_max=5) as run:
        run.send(orders, Order("ada", "tea"))
        run.until_idle()
        assert run.events(notes) == [Note("tea")]
        assert run.events("tell_dead") == []
        assert run.statuses()["tell"].restarts == 2, "it is tried again with its batch"


def test_a_dead_letter_is_no_longer_than_it_may_be(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders, on_error="dead-letter")
    def fail(order: Order) -> None:
        raise ValueError("no")

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "x" * 2 * DEAD_CHARS_MAX))
        run.until_idle()
        (letter,) = run.events("fail_dead")
        assert len(letter.data) == DEAD_CHARS_MAX
