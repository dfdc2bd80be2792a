"""May a definition go on as what it is now? One table of cases, both ways."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.app.running.positions import (
    BatchPosition,
    CheckpointPosition,
    FeedPosition,
    Mover,
    SinkPosition,
    StartPosition,
    pack_position,
    unpack_position,
)
from penstock.app.running.saved import SavedDefinition, World, _unpack, find_objection
from penstock.errors import PlanChangedError


def agent(**changes: Any) -> SavedDefinition:
    usual = SavedDefinition(
        kind="an agent",
        inputs={"orders": 7},
        streams=("alerts",),
        tables=("spent",),
        timers=("timer",),
        facts={"its state": "table spent", "the windows of table spent": "tumbling 10 seconds"},
        details={"how long windows of table spent are kept": "1 hour"},
    )
    return msgspec.structs.replace(usual, **changes)


def counted(**changes: Any) -> SavedDefinition:
    """One whose state Spark keeps."""
    usual = SavedDefinition(
        kind="a derived table", inputs={"orders": 7}, tables=("counts",), plan="sum by user"
    )
    return msgspec.structs.replace(usual, **changes)


def facts(windows: str) -> dict[str, str]:
    return {"its state": "table spent", "the windows of table spent": windows}


GOES_ON: dict[str, tuple[SavedDefinition | None, SavedDefinition, World]] = {
    "nothing changed": (agent(), agent(), World()),
    "it is new": (None, agent(), World()),
    "new beside one that is gone and wrote something else": (
        None, agent(), World(gone={"old": agent(tables=("other",), streams=("others",))}),
    ),
    "windows are kept for longer": (agent(), agent(details={}), World()),
    "another input": (agent(), agent(inputs={"orders": 7, "refunds": 8}), World()),
    "an input less": (agent(inputs={"orders": 7, "refunds": 8}), agent(), World()),
    "an input was made anew": (agent(), agent(inputs={"orders": 9}), World()),
    "a timer's function is gone, and none is set": (agent(), agent(timers=()), World()),
    "a timer's function is new": (agent(), agent(timers=("timer", "more")), World()),
    "it gets a state": (agent(facts={}, tables=()), agent(), World()),
    "a fact that an earlier version did not save": (agent(facts={}), agent(), World()),
    "Spark keeps the same": (counted(), counted(), World()),
    "an input of it was made later": (counted(inputs={"orders": None}), counted(), World()),
}  # fmt: skip

REFUSED: dict[str, tuple[SavedDefinition | None, SavedDefinition, World, str]] = {
    "another kind": (
        agent(), agent(kind="a lookup"), World(),
        "it was an agent and is now a lookup: change it back, or rebuild its output from scratch: "
        "`penstock reset APP it --output clear`",
    ),
    "windows resized": (
        agent(), agent(facts=facts("tumbling 1 minute")), World(),
        "the windows of table spent changed from tumbling 10 seconds to tumbling 1 minute",
    ),
    "windows removed": (
        agent(), agent(facts=facts("none")), World(),
        "the windows of table spent changed from tumbling 10 seconds to none",
    ),
    "windows added": (
        agent(facts=facts("none")), agent(), World(),
        "the windows of table spent changed from none to tumbling 10 seconds",
    ),
    "its state is gone": (
        agent(), agent(facts={}), World(), "its state changed from table spent to none",
    ),
    "renamed, with a table": (
        None, agent(), World(gone={"old": agent(streams=())}),
        "`penstock rename APP old it`",
    ),
    "renamed, without a table": (
        None, agent(tables=()), World(gone={"old": agent(tables=())}),
        "it writes alerts, as did old",
    ),
    "a timer's function is gone, and some are set": (
        agent(), agent(timers=()), World(timers_set={"timer"}), "@it.timer",
    ),
    "of a name": (
        agent(timers=("timer", "more")), agent(), World(timers_set={"timer", "more"}),
        '@it.timer("more")',
    ),
    "of an earlier version, which did not say": (
        agent(version=1, timers=()), agent(timers=()), World(timers_set={"timer"}), "@it.timer",
    ),
    "another plan of what Spark keeps": (
        counted(), counted(plan="sum by item"), World(), "before:\nsum by user\nnow:\nsum by item",
    ),
    "an input of it was made anew": (
        counted(), counted(inputs={"orders": 9}), World(), "orders has been emptied or created",
    ),
}  # fmt: skip


@pytest.mark.row("X13", engine="embedded")
@pytest.mark.parametrize("case", GOES_ON)
def test_it_goes_on(case: str) -> None:
    assert find_objection("it", *GOES_ON[case]) is None


@pytest.mark.row("X13", engine="embedded")
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_the_way_out(case: str) -> None:
    *given, told = REFUSED[case]
    objection = find_objection("it", *given)  # type: ignore[arg-type]
    assert objection is not None
    assert told in ": ".join(objection)


@pytest.mark.parametrize(
    "case", ["another kind", "windows resized", "another plan of what Spark keeps"]
)
def test_an_older_version_is_refused_as_the_newer_was(case: str) -> None:
    before, now, world, _ = REFUSED[case]
    assert before is not None
    assert find_objection("it", now, before, world) is not None


def test_what_a_newer_penstock_saved_is_not_guessed_at() -> None:
    packed = msgspec.json.encode(agent(version=99))
    with pytest.raises(PlanChangedError, match="newer version of Penstock"):
        _unpack(packed, "it")


def test_what_an_earlier_penstock_saved_is_read() -> None:
    old = b'{"kind":"an agent","inputs":["orders"],"streams":[],"tables":["spent"],"facts":{}}'
    found = _unpack(old, "it")
    assert (found.version, found.inputs, found.tables) == (1, {"orders": None}, ("spent",))


MOVER = Mover("app/shop/a", "run")


@pytest.mark.parametrize(
    "position",
    [
        StartPosition(next={"orders": {0: 5}}, ids={"orders": 7}),
        BatchPosition(mover=MOVER, next={"orders": {0: 5}}, again={"orders": {1: [(2, 3)]}}),
        SinkPosition(mover=MOVER, next={"orders": {0: 5}}),
        CheckpointPosition(mover=MOVER, checkpoint="c", plan="p", batch=0),
        FeedPosition(mover=MOVER, taken=3),
    ],
)
def test_positions_come_back_as_they_were(position: Any) -> None:
    assert unpack_position(pack_position(position)) == position


EARLIER = '"producer":"app/shop/a","run":"run","sequence":4,"next":{"orders":{"0":5}}'
EARLIER_POSITIONS = [
    (f'{{{EARLIER},"ids":{{"orders":7}}}}',
     BatchPosition(mover=MOVER, next={"orders": {0: 5}}, ids={"orders": 7})),
    (f'{{{EARLIER},"checkpoint":"c","plan":"p"}}',
     CheckpointPosition(mover=MOVER, checkpoint="c", plan="p", batch=4, next={"orders": {0: 5}})),
    ('{"producer":"","sequence":-1,"next":{"orders":{"0":5}}}',
     StartPosition(next={"orders": {0: 5}})),
]  # fmt: skip


@pytest.mark.parametrize(("packed", "position"), EARLIER_POSITIONS)
def test_positions_of_earlier_versions_are_read(packed: str, position: Any) -> None:
    assert unpack_position(packed.encode()) == position
