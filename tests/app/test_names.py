"""Names that mean the same, or something of ours: what an app may call its things."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import App, Context, Entry, WindowedEntry, tumbling
from penstock.app.declaring.plan import plan
from penstock.errors import AppError, PlanChangedError
from penstock.testing.apps import AppTest
from tests.app.shop import Note, Order


def test_a_definition_called_claims_starts_again(tmp_path: Path) -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    seen = app.table("seen", value=int, default=0)

    @app.agent(orders, state=seen, name="claims")
    def count(order: Order, seen: Entry[int]) -> None:
        seen.value += 1

    for n in range(1, 4):
        with AppTest(app, tmp_path) as run:
            run.send(orders, Order("ada", "tea"))
            run.until_idle()
            assert run.table(seen) == {"ada": n}


@pytest.mark.parametrize("name", ["orders", "default.orders"])
def test_a_stream_has_one_name_however_it_is_written(tmp_path: Path, name: str) -> None:
    app = App("shop")
    orders = app.stream(name, Order, key="user")
    seen = app.table(name.replace("orders", "seen"), value=int, default=0)

    @app.agent(orders, state=seen)
    def count(order: Order, seen: Entry[int]) -> None:
        seen.value += 1

    with pytest.raises(AppError, match="orders is already declared"):
        app.stream("default.orders", Order)
    for n in range(1, 4):
        with AppTest(app, tmp_path) as run:
            run.send(orders, Order("ada", "tea"))
            run.until_idle()
            assert run.table(seen) == {"ada": n}


def test_the_table_of_an_agent_s_timers_is_nobody_else_s() -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    app.table("remind_timers", value=int)

    @app.agent(orders)
    def remind(order: Order, context: Context) -> None: ...

    plan(app)  # without timers there is no such table

    @remind.timer
    def on_timer(context: Context) -> None: ...

    with pytest.raises(AppError, match=r"test_names.py:\d+: the name remind_timers is taken"):
        plan(app)


class Timing:
    """An agent whose windows expire, with a function for timers or without."""

    def __init__(self, *, timer: bool, expires: str | None = "1 hour") -> None:
        self.app = App("shop")
        self.orders = self.app.stream("orders", Order, key="user")
        self.notes = self.app.stream("notes", Note)
        window = tumbling("1 hour", expires=expires)
        counts = self.app.table("counts", value=int, default=0, window=window)

        @self.app.agent(self.orders, state=counts, to=self.notes)
        def remind(order: Order, counts: WindowedEntry[int], context: Context) -> None:
            counts.current().value += 1
            if timer:
                context.set_timer(after="1 minute")

        if timer:

            @remind.timer
            def on_timer(counts: WindowedEntry[int], context: Context) -> Note:
                return Note("due")


@pytest.mark.parametrize("expires", ["1 hour", None])
def test_timers_whose_function_is_gone_are_not_passed_over(
    tmp_path: Path, expires: str | None
) -> None:
    before = Timing(timer=True, expires=expires)
    with AppTest(before.app, tmp_path) as run:
        run.send(before.orders, Order("ada", "tea"))
        run.until_idle()
    after = Timing(timer=False, expires=expires)
    with pytest.raises(
        PlanChangedError, match="timers that are set but no longer a function"
    ) as refused:
        AppTest(after.app, tmp_path).__enter__()
    assert "@remind.timer" in str(refused.value)
    with AppTest(before.app, tmp_path) as run:
        run.advance("2 minutes")
        run.until_idle()
        assert run.events(before.notes) == [Note("due")]
    with AppTest(after.app, tmp_path) as run:
        run.until_idle()


def test_keys_that_are_no_numbers_are_refused_where_numbers_are_wanted() -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    seen = app.table("seen", key=int, value=int, default=0)
    with pytest.raises(AppError, match=r"test_names.py:\d+: agent count .* keys are int .*is str"):

        @app.agent(orders, state=seen)
        def count(order: Order, seen: Entry[int]) -> None: ...
