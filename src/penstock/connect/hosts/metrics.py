"""Metrics of connectors, written to `_system.metrics` while a listener is running."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator

from penstock.connect.hosts.registry import SourceRecord
from penstock.errors import PenstockError
from penstock.log.api import Log
from penstock.log.declaring.objects import Metric
from penstock.log.engine.caretaker import Caretaker
from penstock.log.metrics import MetricWriter


class SourceMeter:
    """Reports periodically on each connector stream that received something."""

    def __init__(self, log: Log, interval_ms: int) -> None:
        self._writer = MetricWriter(log, "listener", f"listener/{secrets.token_hex(8)}")
        self._changed: dict[str, SourceRecord] = {}
        self._lock = threading.Lock()
        self._caretaker = Caretaker(interval_ms / 1000, self.report)
        self._is_on = interval_ms > 0

    def start(self) -> None:
        self._caretaker.start()

    def close(self) -> None:
        """Report a last time, and stop."""
        self._caretaker.close()
        with contextlib.suppress(PenstockError):  # metrics must not make anything else fail
            self.report()

    def note(self, record: SourceRecord) -> None:
        """Note that a stream received something. Safe to call from any thread."""
        with self._lock:
            self._changed[record.name] = record

    def report(self) -> None:
        """Report everything that has changed since the last report."""
        with self._lock:
            changed, self._changed = self._changed, {}
        metrics = [metric for record in changed.values() for metric in measure(record)]
        if metrics and self._is_on:
            self._writer.write(metrics)


def measure(record: SourceRecord) -> Iterator[Metric]:
    """The metrics of a connector stream; counters start at its beginning."""
    labels = {"connector": record.name, "stream": record.stream}
    values = {
        "messages": record.messages, "bytes": record.bytes, "dropped": record.dropped,
        "damaged": record.damaged, "credits": record.credits, "reconnects": record.opened - 1,
        "lag_ms": record.lag_ms,
    }  # fmt: skip
    for name, value in values.items():
        if value is not None:
            yield Metric(name=f"connector.{name}", value=float(value), labels=labels)
