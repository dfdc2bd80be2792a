"""Source connectors: messages of two programs into the embedded log."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
from bench.result import Result
from penstock.connect.listener import Listener, ListenerOptions
from penstock.connect.registry import records
from penstock.connect.source import END, Source, SourceConnector

BYTES = 100
WANTED = 100_000


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


def main(address: str, count: int, name: str) -> None:
    with SourceConnector(address, [Constant(name, count)]) as connector:
        connector.finish(600)


BENCHMARKS: dict[str, Callable[[Path, bool], list[Result]]] = {"connectors": ingest}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
