"""A log on each engine, and what the tests of groups share."""

from __future__ import annotations

import os
import random
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import CreateStream, Log, Producer, Record, declare
from penstock import open as open_log
from penstock.testing.brokers import Brokers


class Order(Record):
    user: str
    number: int


def make_stream(log: Log, partitions: int = 2) -> None:
    log.apply([CreateStream(declare("orders", Order, key="user", partitions=partitions))])


def send(log: Log, orders: list[tuple[str, int]]) -> None:
    with Producer(log) as producer:
        for done in [producer.send("orders", Order(user, number)) for user, number in orders]:
            done.result(60)


def on_both(*rows: str) -> pytest.MarkDecorator:
    """Run the tests of a module on both engines, as proof of these rows."""
    engines = [
        pytest.param(engine, marks=pytest.mark.row(*rows, engine=engine))
        for engine in ("embedded", "kafka")
    ]
    return pytest.mark.parametrize("url", engines, indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "embedded":
        return str(tmp_path / "log.db")
    broker: Brokers = request.getfixturevalue("broker")
    return f"{broker.url}/g{secrets.token_hex(4)}"


@pytest.fixture
def log(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with open_log(url, create=True) as opened:
        make_stream(opened)
        yield opened


@pytest.fixture
def seed() -> int:
    """A new seed for every run, printed when a test fails; PENSTOCK_SEED replays one."""
    chosen = int(os.environ.get("PENSTOCK_SEED", random.SystemRandom().randrange(10**6)))
    sys.stdout.write(f"seed {chosen}: replay with PENSTOCK_SEED={chosen}\n")
    return chosen
