"""Dead letters that are replayed: to the group that they come from, and to nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock import CreateStream, DeadLetter, Log, declare, read_events
from penstock.cli.main import main
from penstock.groups.control import drop_group, reset_group, show_group
from penstock.groups.group import Group
from penstock.groups.names import GroupName
from tests.groups.conftest import Order, on_both, send
from tests.groups.test_group import WAIT_S, take

pytestmark = on_both("H17")
NAME = GroupName("orders", "billing")


@pytest.fixture
def replay(log: Log, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*words: str) -> tuple[int, str]:
        code = main(["dead", *words, "--log", log.url])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def bury(log: Log, numbers: list[int]) -> None:
    with Group(log, "orders", "billing", Order) as group:
        for number in numbers:
            message = take(group)
            assert message.data.number == number
            message.reject("no such account").result(WAIT_S)


def test_a_letter_goes_to_its_group_alone(log: Log, replay: Callable[..., tuple[int, str]]) -> None:
    send(log, [("ada", 1), ("ada", 2)])
    ids = {event.data.number: event.id for event in read_events(log, "orders", Order)}
    bury(log, [1, 2])
    code, said = replay("list", "orders", "--group", "billing", "--json")
    assert code == 0, said
    row = json.loads(said.splitlines()[0])
    assert (row["of"], row["group"], row["agent"]) == ("group", "billing", None)
    assert "would replay" in replay("replay", "orders", "--all", "--dry-run")[1]
    assert not any(str(stream.name).endswith("_replayed") for stream in log.streams())
    code, said = replay("replay", "orders", "--group", "billing")
    assert code == 0, said
    assert "replayed 2 letters" in said
    assert show_group(log, NAME).replayed.events >= 2
    with Group(log, "orders", "billing", Order) as group:
        for number in (1, 2):
            message = take(group)
            assert message.data == Order("ada", number)
            assert message.event.id == ids[number], "effects keyed by the id happen once"
            assert message.deliveries == 1
            message.ack().result(WAIT_S)
        assert group.take(0.3) is None
    assert len(list(read_events(log, "orders", Order))) == 2, "others saw it again"
    assert "already" in replay("replay", "orders", "--all")[1]
    with Group(log, "orders", "billing", Order) as group:
        assert group.take(0.3) is None


def test_a_running_group_sees_what_is_replayed(
    log: Log, replay: Callable[..., tuple[int, str]]
) -> None:
    send(log, [("ada", 1)])
    with Group(log, "orders", "billing", Order) as group:
        take(group).reject("no").result(WAIT_S)
        data = '{"user": "ada", "number": 7}'
        code, said = replay("replay", "orders", "0:0", "--data", data)
        assert code == 0, said
        again = take(group)
        assert again.data.number == 7
        again.reject("still no").result(WAIT_S)
        letters = [event.data for event in read_events(log, "orders_dead", DeadLetter)]
        assert [letter.stream for letter in letters] == ["orders", NAME.replays]
        place = json.loads(replay("list", "orders", "--open", "--json")[1])["place"]
        assert replay("replay", "orders", place)[0] == 0
        take(group).ack().result(WAIT_S)


def test_what_was_replayed_outlives_a_reset_and_not_a_drop(
    log: Log, replay: Callable[..., tuple[int, str]]
) -> None:
    send(log, [("ada", 1), ("bob", 2)])
    with Group(log, "orders", "billing", Order) as group:
        for _ in range(2):
            take(group).reject("no").result(WAIT_S)
    assert replay("replay", "orders", "--all")[0] == 0
    with Group(log, "orders", "billing", Order) as group:
        first = take(group)
        first.ack().result(WAIT_S)
    reset_group(log, NAME, "latest")
    with Group(log, "orders", "billing", Order) as group:
        other = take(group)
        assert {first.data.number, other.data.number} == {1, 2}
        assert group.take(0.3) is None
    drop_group(log, NAME)
    assert NAME.replays not in [str(stream.name) for stream in log.streams()]
    with Group(log, "orders", "billing", Order) as group:
        assert sorted([take(group).data.number, take(group).data.number]) == [1, 2]
        assert group.take(0.3) is None


def test_a_stream_of_that_name_is_not_written_to(
    log: Log, replay: Callable[..., tuple[int, str]]
) -> None:
    log.apply([CreateStream(declare(NAME.replays, Order))])
    send(log, [("ada", 1)])
    bury(log, [1])
    code, said = replay("replay", "orders", "0:0")
    assert code != 0
    assert "a stream of that name exists already" in said
    assert list(read_events(log, NAME.replays, Order)) == []
    drop_group(log, NAME)
    code, said = replay("replay", "orders", "0:0")
    assert code != 0
    assert "has no group billing" in said
