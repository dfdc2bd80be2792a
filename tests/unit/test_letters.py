"""Dead letters that are sent again: each once, and known where they went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log import open_log
from penstock.log.api import Log
from penstock.log.declaring.objects import CreateStream, declare
from penstock.log.letters import (
    DeadLetter,
    Letter,
    Resend,
    Resender,
    SentAgain,
    dead_name,
    letters_in,
)
from penstock.log.reading.read import read_batches
from penstock.log.writing.compose import EventOptions
from penstock.log.writing.transaction import Transaction
from penstock.testing.contract import Order, create, orders


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as opened:
        create(opened, "s")
        create(opened, "other")
        opened.apply([CreateStream(declare(dead_name("s"), DeadLetter))])
        yield opened


def letters(log: Log, count: int) -> list[Letter]:
    with Transaction(log, "dead") as tx:
        for n in range(count):
            tx.send(dead_name("s"), DeadLetter("a", "s", 0, n, f"{n}", None, "{}", "", "", 1))
    return [letter for batch in read_batches(log, dead_name("s")) for letter in letters_in(batch)]


def send(resender: Resender, log: Log, letter: Letter, into: str) -> None:
    wanted = [Resend(letter, Order("a", letter.offset), EventOptions())]
    resender.send(resender.compose(log.stream(into), wanted), wanted)


def test_one_letter_after_the_other_is_sent_and_known(log: Log) -> None:
    found = letters(log, 3)
    resender = Resender(log, log.stream(dead_name("s")), "tests")
    resender.open()
    for letter in found[:2]:
        send(resender, log, letter, "s")
    assert [e.data.amount for e in orders(log, "s")] == [0, 1]
    known = SentAgain(log, log.stream(dead_name("s"))).load()
    assert [known.find(letter) is not None for letter in found] == [True, True, False]


def test_it_is_known_where_each_letter_went(log: Log) -> None:
    found = letters(log, 4)
    resender = Resender(log, log.stream(dead_name("s")), "tests")
    resender.open()
    for letter, into in zip(found, ("s", "other", "other", "s"), strict=True):
        send(resender, log, letter, into)
    known = SentAgain(log, log.stream(dead_name("s"))).load()
    went = [sent.into for letter in found if (sent := known.find(letter))]
    assert went == ["s", "other", "other", "s"]
