"""`penstock group`, as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock import CreateStream, Group, Producer, Record, declare
from penstock.cli.main import main


class Order(Record):
    user: str
    number: int


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    path = str(tmp_path / "log.db")
    with penstock.open(path, create=True) as log:
        log.apply([CreateStream(declare("orders", Order, key="user"))])
        with Producer(log) as producer:
            for n in range(5):
                producer.send("orders", Order(f"u{n}", n))
        with Group(log, "orders", "billing", Order) as group:
            message = group.take(30)
            assert message is not None
            message.ack().result(30)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["group", *words, "--log", path])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.row("H17", engine="embedded")
def test_a_group_from_the_command_line(run: Callable[..., tuple[int, str, str]]) -> None:
    assert "not running" in run("list")[1]
    assert "4 unacknowledged messages" in run("show", "orders", "billing")[1]
    found = json.loads(run("show", "orders", "billing", "--json")[1])
    assert found["lag"] == {"events": 4, "is_exact": True}
    assert found["partitions"][0]["floor"] == 1
    assert run("pause", "orders", "billing")[1] == "paused orders/billing\n"
    assert "paused" in run("list", "orders")[1]
    assert run("resume", "orders", "billing")[0] == 0
    assert "1 → 0" in run("reset", "orders", "billing", "--from", "earliest", "--dry-run")[1]
    assert run("reset", "orders", "billing", "--from", "3", "--yes")[0] == 0
    assert "2 unacknowledged messages" in run("show", "orders", "billing")[1]
    assert run("drop", "orders", "billing", "--yes")[0] == 0
    assert "there are no groups" in run("list")[2]


def test_what_is_not_there(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = run("show", "orders", "shipping")
    assert code != 0
    assert "stream orders has no group shipping; it has: billing" in error
    code, _, error = run("show", "order", "billing")
    assert code != 0
    assert "orders" in error


@pytest.mark.row("H17", engine="embedded")
def test_a_group_is_created_before_it_is_used(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("create", "orders", "shipping", "--from", "latest")[1] == "created orders/shipping\n"
    found = json.loads(run("show", "orders", "shipping", "--json")[1])
    assert found["lag"]["events"] == 0
    code, _, error = run("create", "orders", "shipping")
    assert code != 0
    assert "penstock group reset orders shipping" in error


@pytest.mark.row("H17", engine="embedded")
def test_messages_are_taken_and_acknowledged(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, error = run("take", "orders", "billing", "-n", "2", "--peek", "--json")
    assert code == 0, error
    peeked = [json.loads(line)["data"]["number"] for line in out.splitlines()]
    assert peeked == [1, 2]
    lines = run("take", "orders", "billing", "-n", "2", "--json")[1].splitlines()
    taken = [json.loads(line) for line in lines]
    assert [message["data"]["number"] for message in taken] == peeked, "they were given back"
    assert [message["deliveries"] for message in taken] == [1, 1]
    assert run("take", "orders", "billing", "-n", "9")[1].count("\n") == 2
    code, out, error = run("take", "orders", "billing", "--wait", "100ms")
    assert (code, out) == (0, "")
    assert "no message to hand out" in error


def test_a_group_that_is_not_there_is_not_made(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = run("take", "orders", "biling")
    assert code != 0
    assert "it has: billing" in error


def test_what_is_taken_elsewhere_is_refused(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.taking.COORDINATED_S", 0.2)
    with penstock.open(str(tmp_path / "log.db")) as log:
        with Group(log, "orders", "billing", Order) as group:
            assert group.take(30) is not None
            code, _, error = run("take", "orders", "billing")
    assert code != 0
    assert "is coordinated by" in error
