"""Sources on a listener, and sinks on a host, for tests of real systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import Log, read_events
from penstock.connect.listener import Listener, ListenerOptions
from penstock.connect.registry import records
from penstock.connect.sink import Sink, SinkHost
from penstock.connect.source import ConnectorOptions, Source, SourceConnector
from penstock.errors import ConnectorError
from penstock.testing.processes import wait_until

RAW = ListenerOptions(routes=[("*", "raw")])
QUICK = ConnectorOptions(backoff_s=0.05, backoff_s_max=0.2)
Make = Callable[[str], Sink]


@contextmanager
def running(log: Log, *sources: Source) -> Iterator[SourceConnector]:
    with Listener(log, RAW) as listener:
        address = "{}:{}".format(*listener.address)
        with SourceConnector(address, sources, QUICK) as connector:
            yield connector
            connector.check()


def stored(log: Log) -> int:
    return sum(record.messages for record in records(log))


def texts(log: Log) -> list[str]:
    events: list[Any] = list(read_events(log, "raw"))
    return [event.data.decode() for event in events]


@contextmanager
def hosted(make: Make, folder: Path, told: list[str] | None = None) -> Iterator[str]:
    tell = print if told is None else told.append
    with SinkHost(make, folder, tell=tell) as host:
        yield "{}:{}".format(*host.address)


@contextmanager
def refused(told: list[str], why: str) -> Iterator[None]:
    """The host ends the connection and tells why."""
    with pytest.raises(ConnectorError):
        yield
    wait_until(lambda: any(why in line for line in told), 30, why)
