"""Connectors: messages of two programs into the embedded log, and of a stream into a sink."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock
from bench.result import Result
from penstock.connect.clients.source import END, Source, SourceConnector
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.registry import records
from penstock.connect.push.delivery import Delivery
from penstock.connect.push.remote import RemoteSink
from penstock.connect.push.worker import DialOptions

BYTES = 100
WANTED = 100_000
ROWS = 65_536


class Constant(Source):
    """So many messages of one kind."""

    def __init__(self, name: str, until: int) -> None:
        super().__init__(name)
        self._until = until
        self._next = 0
        self._data = b"x" * BYTES

    def handle_reset(self, point_of_ref: int | None) -> None:
        self._next = 0 if point_of_ref is None else point_of_ref + 1

    def handle_next(self) -> Any:
        if self._next >= self._until:
            return END
        self._next += 1
        return self._data, self._next - 1


def ingest(folder: Path, quick: bool) -> list[Result]:
    """Two connectors, each a process of its own, beside the listener's."""
    count = 200_000 if quick else 3_000_000
    with penstock.open(str(folder / "log.db"), upkeep_interval_ms=0) as log:
        spec = penstock.declare("raw", content="bytes", partitions=2)
        log.apply([penstock.CreateStream(spec)])
        with Listener(log, ListenerOptions(routes=[("*", "raw")])) as listener:
            address = "{}:{}".format(*listener.address)
            command = [sys.executable, "-m", "bench.connect", address, str(count)]
            sources = [subprocess.Popen([*command, name]) for name in ("a", "b")]
            while sum(record.messages for record in records(log)) == 0:
                time.sleep(0.01)
            began, before = time.monotonic(), sum(r.messages for r in records(log))
            for source in sources:
                if source.wait(600):
                    raise RuntimeError("a source failed")
            took_s = time.monotonic() - began
        rows = 2 * count - before
    return [
        Result(
            what=f"Two connectors into the embedded log, {2 * count:,} messages of {BYTES} bytes",
            measured=f"{rows / took_s:,.0f} messages/s",
            beside=f"{WANTED:,} messages/s wanted",
            ratio=rows / took_s / WANTED,
            at_least=1.0,
        )
    ]


def deliver(folder: Path, quick: bool) -> list[Result]:
    """A stream into files, by two workers, with two-phase commit; the sink is another process."""
    count = 100_000 if quick else 2_000_000
    state = folder / "sink"
    command = [sys.executable, "-m", "penstock.cli", "connect", "file-sink", str(state)]
    with penstock.open(str(folder / "log.db"), upkeep_interval_ms=0) as log:
        spec = penstock.declare("raw", content="bytes", partitions=2)
        log.apply([penstock.CreateStream(spec)])
        with penstock.Producer(log) as producer:
            for first in range(0, count, ROWS):
                rows = min(ROWS, count - first)
                keys = pa.array([b"%d" % n for n in range(rows)], pa.binary())
                data = pa.repeat(pa.scalar(b"x" * BYTES), rows)
                producer.append("raw", pa.record_batch({"data": data, "_key": keys}))
        sink = subprocess.Popen(
            [*command, "--at", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert sink.stdout is not None
            address = sink.stdout.readline().split()[-1]
            target = RemoteSink("bench", address, 2, DialOptions(), "")
            began = time.monotonic()
            delivered = Delivery(log, target, "raw", "stream").deliver()
            took_s = time.monotonic() - began
        finally:
            sink.kill()
            sink.communicate()
    assert delivered == count
    return [
        Result(
            what=f"The embedded log into a file sink, {count:,} messages of {BYTES} bytes",
            measured=f"{count / took_s:,.0f} messages/s",
            beside="two workers, one transaction",
        )
    ]


def main(address: str, count: int, name: str) -> None:
    with SourceConnector(address, [Constant(name, count)]) as connector:
        connector.finish(600)


BENCHMARKS: dict[str, Callable[[Path, bool], list[Result]]] = {
    "connectors": ingest,
    "sinks": deliver,
}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
