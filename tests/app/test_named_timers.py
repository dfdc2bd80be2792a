"""A key may have several timers, each with a name and a function."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import App, Context, Entry
from penstock.app.running.rename import rename_definition
from penstock.app.tasks.timers import TimerKey, unpack_timer
from penstock.errors import PlanChangedError, UsageError
from penstock.testing.apps import AppTest
from tests.app.shop import Note, Order


def cart(name: str = "collect", *, with_reminder: bool = True) -> App:
    """A cart that is reminded of after a minute, and forgotten after an hour."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=2)
    notes = app.stream("notes", Note)
    carts = app.table("carts", value=int, default=0)

    @app.agent(orders, state=carts, to=notes, name=name)
    def collect(order: Order, cart: Entry[int], context: Context) -> None:
        cart.value += order.amount
        context.set_timer(after="1 hour")
        if order.item == "bought":
            context.cancel_timer("reminder")
        elif with_reminder:
            context.set_timer(after="1 minute", name="reminder")

    @collect.timer
    def forget(cart: Entry[int], context: Context) -> Note:
        cart.delete()
        return Note(f"forgotten {context.key!s}")

    if with_reminder:

        @collect.timer("reminder")
        def remind(cart: Entry[int], context: Context) -> Note:
            return Note(f"{context.key!s} has {cart.value}")

    return app


def texts(run: AppTest) -> list[str]:
    return sorted(event.text for event in run.events("notes"))


@pytest.mark.parametrize("log", ["embedded", "kafka"], indirect=True)
def test_a_key_has_a_timer_of_each_name(log: str, tmp_path: Path) -> None:
    app = cart()
    with AppTest(app, tmp_path, log=log) as run:
        run.send(app.streams["orders"], Order("ada", "tea", 2), Order("bob", "tea", 3))
        run.send(app.streams["orders"], Order("bob", "bought", 0))
        run.until_idle()
        assert texts(run) == []
        run.advance("2 minutes")
        run.until_idle()
        assert texts(run) == ["ada has 2"]
        run.restart()
        run.advance("2 hours")
        run.until_idle()
        assert texts(run) == ["ada has 2", "forgotten ada", "forgotten bob"]
        assert run.table(app.tables["carts"]) == {}


def test_timers_of_a_name_that_is_gone_are_not_passed_over(tmp_path: Path) -> None:
    app = cart()
    with AppTest(app, tmp_path) as run:
        run.send(app.streams["orders"], Order("ada", "tea", 2))
        run.until_idle()
        run.app = cart(with_reminder=False)
        with pytest.raises(PlanChangedError, match=r'@collect\.timer\("reminder"\)'):
            run.restart()
        run.app = app
        run._start()
        run.advance("2 minutes")
        run.until_idle()
        run.app = cart(with_reminder=False)
        run.restart()
        run.until_idle()
        assert texts(run) == ["ada has 2"]


def test_a_renamed_agent_takes_all_its_timers_along(tmp_path: Path) -> None:
    with AppTest(cart(), tmp_path) as run:
        run.send(run.app.streams["orders"], Order("ada", "tea", 2))
        run.until_idle()
        run.runner.stop()
        run.app = cart("gather")
        assert rename_definition(run.log, "shop", "collect", "gather").timers == 2
        run._start()
        run.advance("2 hours")
        run.until_idle()
        # Both were due, the one that forgets the cart after the other.
        assert texts(run) == ["ada has 2", "forgotten ada"]


def test_a_timer_without_a_function_is_an_error_of_the_agent(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders)
    def wait(order: Order, context: Context) -> None:
        context.set_timer(after="1 minute", name="never")

    with AppTest(app, tmp_path) as run:
        run.send(orders, Order("ada", "tea"))
        assert '@wait.timer("never")' in str(run.until_failed())


def test_a_name_is_checked() -> None:
    for wrong in ("", "a b", "x\0y", "ä" * 101):
        with pytest.raises(UsageError, match="invalid timer name"):
            Context().set_timer(after="1 minute", name=wrong)


def test_timers_are_found_again_by_what_they_are_called() -> None:
    keys = [b"", b"ada", b"a\0b", b"a@1", bytes(range(256))]
    for key in keys:
        for name in (None, "timer", "reminder", "t"):
            timer = TimerKey(key, name)
            assert unpack_timer(timer.pack()) == timer
    packed = {TimerKey(key, name).pack() for key in keys for name in (None, "timer", "reminder")}
    assert len(packed) == 3 * len(keys)
    assert TimerKey(b"ada").pack() == b"tada", "as earlier versions wrote it"
