"""What connectors do, told to `_system.metrics` while a listener listens."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator

from penstock.connect.registry import SourceRecord
from penstock.errors import PenstockError
from penstock.log.api import Log
from penstock.log.caretaker import Caretaker
from penstock.log.metrics import MetricWriter
from penstock.log.objects import Metric


class SourceMeter:
    """Tells of each connector stream that something came of, every so often."""

    def __init__(self, log: Log, interval_ms: int) -> None:
        self._writer = MetricWriter(log, "listener", f"listener/{secrets.token_hex(8)}")
        self._changed: dict[str, SourceRecord] = {}
        self._lock = threading.Lock()
        self._caretaker = Caretaker(interval_ms / 1000, self.report)
        self._is_on = interval_ms > 0

    def start(self) -> None:
        self._caretaker.start()

    def close(self) -> None:
        """Tell once more, and end."""
        self._caretaker.close()
        with contextlib.suppress(PenstockError):  # what works must not fail for it
            self.report()

    def note(self, record: SourceRecord) -> None:
        """Something came. From any thread."""
        with self._lock:
            self._changed[record.name] = record

    def report(self) -> None:
        """Tell of everything that changed since the last time."""
        with self._lock:
            changed, self._changed = self._changed, {}
        metrics = [metric for record in changed.values() for metric in measured(record)]
        if metrics and self._is_on:
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
