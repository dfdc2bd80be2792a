"""A definition that changes between two runs goes on, or is refused with the way out."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import App, Context, Entry, WindowedEntry, hopping, tumbling
from penstock.app.declaring.plan import plan
from penstock.app.declaring.windows import Windows
from penstock.app.running.backends import InlineBackend
from penstock.app.running.rename import rename_definition
from penstock.app.running.reset import reset_query
from penstock.app.running.saved import saved_key
from penstock.app.running.standby import at_work
from penstock.app.running.streams import make_streams
from penstock.errors import AppError, PlanChangedError, UnknownObjectError, UsageError
from penstock.log.api import Commit
from penstock.log.writing.transaction import Transaction
from penstock.testing.apps import AppTest
from tests.app.shop import Alert, Order, some_orders

ON_BOTH = pytest.mark.parametrize(
    "log",
    [
        pytest.param(engine, marks=pytest.mark.row("X13", engine=engine))
        for engine in ("embedded", "kafka")
    ],
    indirect=True,
)


def shop(
    name: str = "spend",
    *,
    table: str = "spent",
    key: type = str,
    window: Windows | None = None,
    relative_to: Any = "event",
    with_timer: bool = False,
    app_name: str = "shop",
) -> App:
    """An agent that adds up what a user spends, and tells of each order."""
    app = App(app_name)
    orders = app.stream("orders", Order, key="amount" if key is int else "user", partitions=2)
    alerts = app.stream("alerts", Alert, key="user")
    options = {} if window is None else {"window": window, "relative_to": relative_to}
    spent = app.table(table, key=key, value=int, default=0, **options)

    if window is not None:

        @app.agent(orders, state=spent, name=name)
        def windowed(order: Order, spent: WindowedEntry[int]) -> None:
            spent.current().value += 1

        return app

    @app.agent(orders, state=spent, to=alerts, name=name)
    def spend(order: Order, spent: Entry[int], context: Context) -> Alert:
        spent.value += 1
        if with_timer:
            context.set_timer(context.now + dt.timedelta(hours=1))
        return Alert(order.user, order.item)

    if with_timer:

        @spend.timer
        def forget(spent: Entry[int], context: Context) -> None:
            spent.delete()

    return app


def teller(name: str) -> App:
    """An agent without a table."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=2)
    alerts = app.stream("alerts", Alert, key="user")

    @app.agent(orders, to=alerts, name=name)
    def tell(order: Order) -> Alert:
        return Alert(order.user, order.item)

    return app


def looked_up() -> App:
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=2)
    spent = app.stream("spent", Alert, key="user", table=True)
    orders.lookup(spent, name="spend")
    return app


def joined(how: Any) -> App:
    app = App("shop")
    left = app.table("left", value=int)
    right = app.table("right", value=int)
    left.join(right, how=how, name="both")
    return app


@ON_BOTH
def test_a_renamed_agent_goes_on_where_it_was_once_that_is_said(log: str, tmp_path: Path) -> None:
    with AppTest(shop("spend"), tmp_path, log=log) as run:
        run.send(run.app.streams["orders"], *some_orders(14))
        run.until_idle()
        run.runner.stop()
        run.app = shop("spending")
        with pytest.raises(PlanChangedError, match="`penstock rename APP spend spending`") as told:
            run._start()
        assert "spending: it writes table spent and alerts, as did spend" in str(told.value)
        rename_definition(run.log, "shop", "spend", "spending")
        run._start()
        run.send(run.app.streams["orders"], *some_orders(14))
        run.until_idle()
        assert run.table(run.app.tables["spent"]) == {f"u{n}": 4 for n in range(7)}
        assert len(run.events("alerts")) == 28
        run.app = shop("spend")  # the older version again
        with pytest.raises(PlanChangedError, match="`penstock rename APP spending spend`"):
            run.restart()


def test_a_renamed_agent_takes_its_timers_along(tmp_path: Path) -> None:
    with AppTest(shop("spend", with_timer=True), tmp_path) as run:
        run.send(run.app.streams["orders"], *some_orders(14))
        run.until_idle()
        run.runner.stop()
        run.app = shop("spending", with_timer=True)
        assert rename_definition(run.log, "shop", "spend", "spending").timers == 7
        run._start()
        run.until_idle()
        assert len(run.table(run.app.tables["spent"])) == 7
        run.advance("2 hours")
        run.until_idle()
        assert run.table(run.app.tables["spent"]) == {}
        assert [entry for page in run.log.snapshot("spend_timers") for entry in page] == []


def test_a_renamed_definition_without_a_table_would_send_everything_again(tmp_path: Path) -> None:
    with AppTest(teller("tell"), tmp_path) as run:
        run.send(run.app.streams["orders"], *some_orders(10))
        run.until_idle()
        run.runner.stop()
        run.app = teller("say")
        with pytest.raises(PlanChangedError, match="say: it writes alerts, as did tell"):
            run._start()
        reset_query(run.log, "shop", "tell")  # this is the other way out
        run._start()
        run.until_idle()
        assert len(run.events("alerts")) == 20


MINUTE = tumbling("1 minute")
CHANGES: list[tuple[str, Callable[[], App], Callable[[], App], str]] = [
    ("the size of windows", lambda: shop(window=tumbling("10 s")), lambda: shop(window=MINUTE),
     "the windows of table spent changed from tumbling 10 seconds to tumbling 1 minute"),
    ("and back", lambda: shop(window=MINUTE), lambda: shop(window=tumbling("10 s")),
     "from tumbling 1 minute to tumbling 10 seconds"),
    ("how they overlap", lambda: shop(window=MINUTE),
     lambda: shop(window=hopping("1 minute", "10 s")),
     "to hopping 1 minute, every 10 seconds"),
    ("windows where there were none", shop, lambda: shop(window=MINUTE),
     "the windows of table spent changed from none to tumbling 1 minute"),
    ("no windows any more", lambda: shop(window=MINUTE), shop,
     "the windows of table spent changed from tumbling 1 minute to none"),
    ("what they go by", lambda: shop(window=MINUTE),
     lambda: shop(window=MINUTE, relative_to="clock"),
     "what the windows of table spent go by changed from event to clock"),
    ("another table", shop, lambda: shop(table="other"),
     "its state changed from table spent to table other"),
    ("another kind", shop, looked_up, "it was an agent and is now a lookup"),
    ("another join", lambda: joined("left"), lambda: joined("outer"),
     "what it joins changed from left and right (left) to left and right (outer)"),
]  # fmt: skip


@pytest.mark.row("X13", engine="embedded")
@pytest.mark.parametrize(
    ("before", "after", "told"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES]
)
def test_a_change_that_does_not_fit_what_is_kept_is_refused(
    tmp_path: Path, before: Callable[[], App], after: Callable[[], App], told: str
) -> None:
    with AppTest(before(), tmp_path) as run:
        run.until_idle()
        run.runner.stop()
        run.app = after()
        with pytest.raises(PlanChangedError, match=re.escape(told)) as refused:
            run._start()
        assert "--output clear`" in str(refused.value)
        assert "test_changes.py:" in str(refused.value), "it says where"
        run.app = before()
        run._start()
        run.until_idle()


def test_how_long_windows_are_kept_may_change(tmp_path: Path) -> None:
    with AppTest(shop(window=tumbling("1 minute")), tmp_path) as run:
        run.until_idle()
        run.app = shop(window=tumbling("1 minute", expires="1 day"))
        run.restart()
        run.until_idle()


def test_a_definition_that_was_removed_goes_on_when_it_comes_back(tmp_path: Path) -> None:
    with AppTest(shop(), tmp_path) as run:
        run.send(run.app.streams["orders"], *some_orders(14))
        run.until_idle()
        run.app = App("shop")
        run.restart()
        run.app = shop()
        run.restart()
        run.until_idle()
        assert len(run.events("alerts")) == 14


def test_a_position_of_an_earlier_version_has_no_record_and_is_taken_as_it_is(
    tmp_path: Path,
) -> None:
    with AppTest(shop(), tmp_path) as run:
        run.until_idle()
        run.runner.stop()
        holder = run.log.hold("test")
        run.log.commit(holder, 0, Commit(progress={saved_key("shop", "spend"): None}))
        run.app = shop(window=tumbling("1 minute"))
        run._start()
        run.until_idle()
        saved = msgspec.json.decode(run.log.progress(saved_key("shop", "spend")) or b"")
        assert saved["facts"]["the windows of table spent"] == "tumbling 1 minute"


def test_renaming_what_cannot_be(tmp_path: Path) -> None:
    with AppTest(shop(), tmp_path) as run:
        run.until_idle()
        with pytest.raises(
            UnknownObjectError, match="has never run a definition other: it has run"
        ):
            rename_definition(run.log, "shop", "other", "new")
        with pytest.raises(UsageError, match="has already run spend"):
            rename_definition(run.log, "shop", "spend", "spend")
        run.runner.stop()
        with at_work(run.log, plan(run.app), InlineBackend()):
            with pytest.raises(
                UsageError, match=r"app shop is running \(process .*\): stop it first"
            ):
                rename_definition(run.log, "shop", "spend", "new")


def test_a_table_has_one_writer(tmp_path: Path) -> None:
    """Another app that fills the same table is refused, and so is whoever writes past the app."""
    with AppTest(shop(), tmp_path) as run:
        assert run.log.stream("spent").spec.writer == "app/shop"
        with pytest.raises(UsageError, match="only app/shop may write to table"):
            with Transaction(run.log, "by-hand") as tx:
                tx.put("spent", "ada", {"value": 1})
        with pytest.raises(AppError, match=r"--writer app/other"):
            make_streams(run.log, plan(shop(app_name="other")))
