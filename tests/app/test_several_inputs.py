"""An agent may read several streams: one order, one state, one position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import App, Context, Entry, Event, Record
from penstock.app.running.positions import BatchPosition, read_position
from penstock.app.running.query import QueryLimits
from penstock.errors import AppError
from penstock.log.api import Commit
from penstock.log.writing.compose import Composer, EventOptions
from penstock.testing.apps import AppTest

ON_BOTH = pytest.mark.parametrize("log", ["embedded", "kafka"], indirect=True)


class Order(Record):
    user: str
    amount: int


class Refund(Record):
    user: str
    refunded: int


class Note(Record):
    text: str


def shop(*names: str, partitions: Sequence[int] = (2, 3)) -> App:
    """What a user has spent: orders less refunds."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user", partitions=partitions[0])
    refunds = app.stream("refunds", Refund, key="user", partitions=partitions[1])
    streams: Any = [stream for stream in (orders, refunds) if stream.name in names]
    spent = app.table("spent", value=int, default=0)

    @app.agent(*streams, state=spent)
    def add_up(event: Order | Refund, spent: Entry[int]) -> None:
        spent.value += event.amount if isinstance(event, Order) else -event.refunded

    return app


BOTH = ("orders", "refunds")


@ON_BOTH
def test_an_agent_of_two_streams_has_one_state(log: str, tmp_path: Path) -> None:
    app = shop(*BOTH)
    with AppTest(app, tmp_path, log=log) as run:
        for n in range(30):
            run.send(app.streams["orders"], Order(f"u{n % 4}", 10))
            if n % 3 == 0:
                run.send(app.streams["refunds"], Refund(f"u{n % 4}", 1))
        run.until_idle()
        orders = {f"u{k}": sum(10 for n in range(30) if n % 4 == k) for k in range(4)}
        back = {f"u{k}": sum(1 for n in range(0, 30, 3) if n % 4 == k) for k in range(4)}
        assert run.table(app.tables["spent"]) == {k: orders[k] - back[k] for k in orders}


def test_they_come_in_the_order_of_commits(tmp_path: Path) -> None:
    app = App("shop")
    streams = [app.stream(name, Note, key="text", partitions=2) for name in ("one", "two")]
    told = app.stream("told", Note, partitions=1)

    @app.agent(*streams, to=told)
    def tell(note: Note) -> Note:
        return note

    with AppTest(app, tmp_path, limits=QueryLimits(tasks=1)) as run:
        run.until_idle()
        run.runner.stop()
        for n in range(20):
            run.send(streams[n % 2], Note(str(n)))
        run.restart()
        run.until_idle()
        assert [int(e.text) for e in run.events(told)] == list(range(20))


def test_an_input_that_an_older_version_does_not_have_is_not_read_again(tmp_path: Path) -> None:
    new, old = shop(*BOTH), shop("orders")
    with AppTest(new, tmp_path) as run:
        run.send(new.streams["orders"], Order("ada", 10))
        run.send(new.streams["refunds"], Refund("ada", 1))
        run.until_idle()
    with AppTest(old, tmp_path) as run:
        run.send(old.streams["orders"], Order("ada", 100))
        run.until_idle()
        position = read_position(run.log, "shop", "add_up")
        assert isinstance(position, BatchPosition)
        assert {name for name, at in position.next.items() if sum(at.values())} == {*BOTH}
    with AppTest(new, tmp_path) as run:
        run.until_idle()
        assert run.table(new.tables["spent"]) == {"ada": 109}
        run.send(new.streams["refunds"], Refund("ada", 2))
        run.until_idle()
        assert run.table(new.tables["spent"]) == {"ada": 107}


def test_events_of_one_id_in_two_streams_give_events_of_different_ids(tmp_path: Path) -> None:
    app = App("shop")
    streams = [app.stream(name, Note, ids="producer", partitions=1) for name in ("one", "two")]
    told = app.stream("told", Note)

    @app.agent(*streams, to=told)
    def tell(note: Note, context: Context) -> Note:
        return Note(str(context.uuid()))

    with AppTest(app, tmp_path) as run:
        holder = run.log.hold("test")
        composer = Composer("test", run.log.limits)
        for sequence, name in enumerate(("one", "two")):
            stream = run.log.stream(name)
            event = composer.admit(stream, Note("same"), EventOptions(id=7))
            run.log.commit(holder, sequence, Commit(parts=[composer.part(stream, [event])]))
        run.until_idle()
        found = run.whole_events(told)
        assert len({event.id for event in found}) == 2
        assert len({event.data.text for event in found}) == 2


def test_of_several_each_is_acknowledged_by_itself(tmp_path: Path) -> None:
    """Events of two streams at one place (partition and offset) are told apart."""
    app = App("shop")
    streams = [app.stream(name, Note, partitions=1) for name in ("one", "two")]
    given: list[str] = []

    @app.agent(*streams, ack="manual")
    def take(events: list[Event[Note]], context: Context) -> None:
        given.extend(event.data.text for event in events)
        for event in events:
            if event.data.text == "one" or given.count("two") > 1:
                context.ack(event)

    with AppTest(app, tmp_path) as run:
        run.until_idle()
        run.runner.stop()
        run.send(streams[0], Note("one"))
        run.send(streams[1], Note("two"))
        run.restart()
        run.until_idle()
    assert sorted(given) == ["one", "two", "two"]


def test_the_function_must_take_what_each_stream_holds() -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    refunds = app.stream("refunds", Refund, key="user")
    with pytest.raises(AppError, match="agent add takes Order, but refunds holds Refund"):

        @app.agent(orders, refunds)
        def add(order: Order) -> None: ...

    with pytest.raises(AppError, match="names the same stream twice"):

        @app.agent(orders, orders)
        def twice(order: Order) -> None: ...

    with pytest.raises(AppError, match="has no input stream: name at least one"):

        @app.agent()
        def nothing(order: Order) -> None: ...


def test_several_streams_with_one_without_a_key() -> None:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    loose = app.stream("loose", Order)
    spent = app.table("spent", value=int, default=0)
    with pytest.raises(AppError, match="has a state, but loose has no key"):

        @app.agent(orders, loose, state=spent)
        def add(order: Order, spent: Entry[int]) -> None: ...
