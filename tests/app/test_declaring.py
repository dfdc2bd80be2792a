"""What is wrong with an app is found before anything runs, with its file and line."""

from __future__ import annotations

import datetime as dt
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from penstock import App, Context, Entry, Event, Record, TableView, hopping, session, tumbling
from penstock.app.declaring.plan import plan
from penstock.errors import AppError, UsageError


class Order(Record):
    user: str
    amount: int


class Alert(Record):
    user: str


def here() -> str:
    """The line that calls this."""
    frame = inspect.stack()[1]
    return f"test_declaring.py:{frame.lineno}"


def test_declaring_loads_no_spark() -> None:
    script = "import penstock, sys; penstock.App('x'); assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_two_definitions_of_one_name() -> None:
    app = App("shop")
    app.stream("orders", Order)
    first = here().replace(str(int(here().split(":")[1])), "")
    with pytest.raises(
        AppError, match=r"test_declaring\.py:\d+: orders is already declared"
    ) as told:
        app.stream("orders", Order)
    assert str(told.value).count("test_declaring.py:") == 2, first


def test_a_stream_of_another_app() -> None:
    one, other = App("one"), App("other")
    orders = other.stream("orders", Order, key="user")
    with pytest.raises(AppError, match="uses orders, which is not declared on app one"):

        @one.agent(orders)
        def handle(order: Order) -> None: ...


def test_something_that_is_no_stream() -> None:
    app = App("shop")
    with pytest.raises(AppError, match="neither a stream nor a table"):

        @app.agent("orders")  # type: ignore[arg-type]
        def handle(order: Order) -> None: ...


def test_a_state_needs_a_key() -> None:
    app = App("shop")
    orders = app.stream("orders", Order)
    seen = app.table("seen", value=int, default=0)
    with pytest.raises(AppError, match=r"agent count has a state, but orders has no key.*group_by"):

        @app.agent(orders, state=seen)
        def count(order: Order, seen: Entry[int]) -> None: ...


def test_a_derived_table_needs_a_key() -> None:
    app = App("shop")
    orders = app.stream("orders", Order)
    with pytest.raises(AppError, match="has no key"):

        @app.derive_table(orders, key=())
        def table(orders: object) -> object: ...


def test_a_table_has_one_writer() -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    seen = app.table("seen", value=int, default=0)

    @app.agent(orders, state=seen)
    def one(order: Order, seen: Entry[int]) -> None: ...

    @app.agent(orders, state=seen)
    def other(order: Order, seen: Entry[int]) -> None: ...

    with pytest.raises(
        AppError, match=r"test_declaring\.py:\d+: other writes table seen.*one writer"
    ):
        plan(app)


def test_a_cycle_in_which_a_definition_would_wait_for_itself() -> None:
    """A window closes when later events have come; here these come only of what it closes."""
    app = App("shop")
    orders = app.stream("orders", Timed, key="user", time="at", watermark="1 minute")
    late = app.stream("late", Timed, key="user", time="at")

    @app.derive(orders, window=tumbling("1 minute"), late=late)
    def counted(orders: object) -> object:
        return orders

    @app.agent(late, to=orders)
    def back(order: Timed) -> Iterator[Timed]:
        yield order

    with pytest.raises(AppError, match=r"counted → back → counted is a cycle in which counted"):
        plan(app)


def wrong_entry(app: App) -> None:
    orders = app.stream("orders", Order, key="user")
    seen = app.table("seen", value=set[str])

    @app.agent(orders, state=seen)
    def count(order: Order, seen: Entry[int]) -> None: ...


def entry_without_default(app: App) -> None:
    orders = app.stream("orders", Order, key="user")
    last = app.table("last", value=int)

    @app.agent(orders, state=last)
    def count(order: Order, last: Entry[int]) -> None: ...


def wrong_record(app: App) -> None:
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders)
    def count(order: Alert) -> None: ...


def wrong_output(app: App) -> None:
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders, to=app.stream("more", Order))
    def count(order: Order) -> Iterator[Alert]:
        yield Alert("x")


def output_of_several_streams(app: App) -> None:
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders, to=[app.stream("one", Alert), app.stream("other", Alert)])
    def count(order: Order) -> Iterator[Alert]:
        yield Alert("x")


def no_parameter_for_the_state(app: App) -> None:
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders, state=app.table("seen", value=int, default=0))
    def count(order: Order) -> None: ...


def parameter_without_meaning(app: App) -> None:
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders)
    def count(order: Order, more: int) -> None: ...


def windowed_entry_expected(app: App) -> None:
    orders = app.stream("orders", Order, key="user")
    seen = app.table("seen", value=int, default=0, window=tumbling("1 hour"))

    @app.agent(orders, state=seen)
    def count(order: Order, seen: Entry[int]) -> None: ...


def sessions_of_an_agent(app: App) -> None:
    app.table("seen", value=int, window=session("1 hour"))


def optional_value(app: App) -> None:
    app.table("seen", value=int | None)  # type: ignore[arg-type]


def bad_name(app: App) -> None:
    app.stream("a.b.c", Order)


def unknown_field(app: App) -> None:
    app.stream("orders", Order, key="nobody")


def watermark_without_time(app: App) -> None:
    app.stream("orders", Order, watermark="1 minute")


def join_without_watermark(app: App) -> None:
    orders = app.stream("orders", Order, key="user")
    orders.join(orders, on="user", within="1 hour")


class Timed(Record):
    user: str
    at: dt.datetime


def late_of_another_record(app: App) -> None:
    orders = app.stream("orders", Timed, time="at")
    late = app.stream("late", Order)

    @app.derive_table(orders, key="user", window=tumbling("1 minute"), late=late)
    def counts(orders: object, window: object) -> object: ...


def late_without_record(app: App) -> None:
    orders = app.stream("orders", Timed, time="at")
    late = app.stream("late")

    @app.derive_table(orders, key="user", window=tumbling("1 minute"), late=late)
    def counts(orders: object, window: object) -> object: ...


def late_of_another_app(app: App) -> None:
    orders = app.stream("orders", Timed, time="at")
    late = App("other").stream("late", Timed)

    @app.derive_table(orders, key="user", window=tumbling("1 minute"), late=late)
    def counts(orders: object, window: object) -> object: ...


def window_without_time(app: App) -> None:
    orders = app.stream("orders", Order, key="user")

    @app.derive_table(orders, key="user", window=tumbling("1 minute"))
    def counts(orders: object, window: object) -> object: ...


def derived_from_nothing(app: App) -> None:
    @app.derive()
    def nothing() -> object: ...


def async_generator(app: App) -> None:
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders)
    async def watch(order: Order) -> AsyncIterator[Alert]:
        yield Alert(order.user)


def two_outputs_of_one_class(app: App) -> None:
    orders = app.stream("orders", Order, key="user")
    some, others = (app.stream(name, Alert) for name in ("some", "others"))

    @app.agent(orders, to=[some, others])
    def watch(order: Order):  # type: ignore[no-untyped-def]
        yield Alert(order.user)


def lookup_of_a_stream(app: App) -> None:
    orders = app.stream("orders", Order, key="user")
    orders.lookup(app.stream("alerts", Alert, key="user"))


MISTAKES: list[tuple[Callable[[App], None], str]] = [
    (wrong_entry, r"is annotated as .*Entry\[int\], but table seen holds set\[str\]"),
    (entry_without_default, "holds int, or None until a value is set"),
    (wrong_record, "takes Alert, but orders holds Order"),
    (wrong_output, "yields Alert, which none of its output streams holds"),
    (output_of_several_streams, "yields Alert, which several of its streams hold: choose one"),
    (no_parameter_for_the_state, "has no parameter for its table seen"),
    (parameter_without_meaning, "has a parameter 'more' that nothing is passed to"),
    (windowed_entry_expected, r"annotate it as WindowedEntry\["),
    (sessions_of_an_agent, "session windows, which only derived streams"),
    (optional_value, "cannot be None"),
    (bad_name, "more than one dot"),
    (unknown_field, "no field 'nobody'"),
    (watermark_without_time, "has a watermark but no time field"),
    (join_without_watermark, "lacks a time field or a watermark"),
    (window_without_time, "has windows, but orders has no time field"),
    (late_of_another_record, "late has a field amount, but late events have no field"),
    (late_without_record, "the stream late for late events has no record"),
    (late_of_another_app, "late is a stream of another app"),
    (derived_from_nothing, "nothing has no input"),
    (async_generator, "is async"),
    (two_outputs_of_one_class, "has no return annotation"),
    (lookup_of_a_stream, "is a stream, not a table"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=lambda m: getattr(m, "__name__", ""))
def test_mistakes_are_named_with_file_and_line(
    mistake: Callable[[App], None], message: str
) -> None:
    with pytest.raises(AppError, match=message) as told:
        mistake(App("shop"))
    file, line = str(told.value).split(": ")[0].rsplit(":", 1)
    first = mistake.__code__.co_firstlineno
    assert file.endswith("tests/app/test_declaring.py")
    assert first <= int(line) <= first + 12


def test_an_agent_is_still_its_function() -> None:
    """Agents can be tested without Spark, and without a log."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    alerts = app.stream("alerts", Alert, key="user")
    spent = app.table("spent", value=int, default=0)

    @app.agent(orders, state=spent, to=alerts)
    def watch(order: Order, spent: Entry[int]) -> Iterator[Alert]:
        spent.value += order.amount
        if spent.value > 10:
            yield Alert(order.user)

    entry = Entry(8)
    assert list(watch(Order("ada", 1), entry)) == []
    assert list(watch(Order("ada", 2), entry)) == [Alert("ada")]
    assert entry.value == 11


def test_what_an_agent_may_take() -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    spent = app.table("spent", value=int, default=0)
    names = app.table("names", value=str)

    @app.agent(orders, state=spent, reads=names)
    def watch(
        order: Event[Order], spent: Entry[int], names: TableView[str], context: Context
    ) -> None: ...

    assert watch.signature.arguments == ("event", "entry", "view", "context")

    @app.agent(orders)
    def lists(orders: list[Order]) -> None: ...

    assert lists.signature.is_batch


def test_lengths_of_windows() -> None:
    with pytest.raises(UsageError, match="longer than zero"):
        tumbling("0 s")
    with pytest.raises(UsageError, match="longer than the window"):
        hopping("1 minute", "2 minutes")
    with pytest.raises(UsageError, match="not a duration"):
        tumbling("a while")
    assert str(hopping("10 minutes", "1 minute")) == "hopping 10 minutes, every 1 minute"


def test_a_derived_stream_is_still_its_function() -> None:
    """What a function of DataFrames gives can be looked at alone."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user")

    @app.derive(orders, key="user", record=Order)
    def large(orders: list[int]) -> list[int]:
        return [amount for amount in orders if amount > 10]

    @app.derive_table(large, key="user")
    def latest(orders: list[int]) -> list[int]:
        return orders[-1:]

    assert large([5, 20]) == [20]
    assert latest([5, 20]) == [20]
    assert large.name == "large"


def test_an_agent_that_takes_a_context_can_be_called_alone() -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")

    @app.agent(orders, ack="manual")
    def watch(order: Order, context: Context) -> None:
        context.set_timer(after="1 minute")
        context.ack()

    context = Context()
    watch(Order("ada", 1), context)
    assert context.acknowledged
    assert context.uuid() != context.uuid()
