"""A broker that is there and says nothing: that is an error, in time, and no empty log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import pytest

from penstock import Log, ReadOptions, Transaction, aio, read_events
from penstock import open as open_log
from penstock.errors import LogUnreachableError
from penstock.testing.brokers import Brokers
from penstock.testing.contract import Order, create


@pytest.fixture
def silent(kafka_jars: Path, tmp_path: Path) -> Iterator[Brokers]:
    """A broker of its own: one that was frozen takes long to be itself again."""
    with Brokers(1, tmp_path / "kafka") as brokers:
        yield brokers


@pytest.fixture
def log(silent: Brokers, tmp_path: Path) -> Iterator[Log]:
    with open_log(silent.url, create=True, cache=str(tmp_path / "cache")) as patient:
        create(patient, "t", table=True)
        with Transaction(patient, "p") as tx:
            tx.send("t", Order("a", 1))
            tx.save("k", b"1")
        other = str(tmp_path / "other")
        with open_log(
            silent.url, cache=other, upkeep_interval_ms=0, broker_timeout_ms=3000
        ) as opened:
            yield opened


def test_a_broker_that_does_not_answer_is_not_taken_for_an_empty_log(
    log: Log, silent: Brokers
) -> None:
    loop = asyncio.new_event_loop()
    following: AsyncGenerator[object, None] = aio.read_events(
        log, "t", options=ReadOptions(follow=True)
    )
    loop.run_until_complete(anext(following))
    questions: list[Callable[[], object]] = [
        lambda: log.offsets("t"),
        lambda: log.progress("k"),
        lambda: list(read_events(log, "t")),
        lambda: loop.run_until_complete(anext(following)),
    ]
    silent.pause(0)
    for ask in questions:
        with pytest.raises(LogUnreachableError):
            ask()
    loop.close()
