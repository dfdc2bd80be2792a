"""What connectors do, told to `_system.metrics` while a listener listens."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from penstock.connect.registry import SourceRecord
from penstock.errors import PenstockError
from penstock.log.api import Log
from penstock.log.metrics import MetricWriter
from penstock.log.objects import Metric


class SourceMeter:
    """Tells of each connector stream that something came of, every so often."""

    def __init__(self, log: Log, interval_ms: int) -> None:
        self._interval_s = interval_ms / 1000
        name = f"listener/{secrets.token_hex(8)}"
        self._writer = MetricWriter(log, "listener", name)
        self._changed: dict[str, SourceRecord] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-meter", daemon=True)

    def __enter__(self) -> Self:
        if self._interval_s:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def note(self, record: SourceRecord) -> None:
        """Something came. From any thread."""
        with self._lock:
            self._changed[record.name] = record

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(self._interval_s)
            with self._lock:
                changed, self._changed = self._changed, {}
            metrics = [metric for record in changed.values() for metric in measured(record)]
            if metrics:
                with contextlib.suppress(PenstockError):  # what works must not stop for it
                    self._writer.write(metrics)


def measured(record: SourceRecord) -> Iterator[Metric]:
    """What is worth knowing of a connector stream; numbers count from its beginning."""
    labels = {"connector": record.name, "stream": record.stream}
    values = {
        "messages": record.messages, "bytes": record.bytes, "dropped": record.dropped,
        "damaged": record.damaged, "credits": record.credits, "reconnects": record.opened - 1,
        "lag_ms": record.lag_ms,
    }  # fmt: skip
    for name, value in values.items():
        if value is not None:
            yield Metric(name=f"connector.{name}", value=float(value), labels=labels)
