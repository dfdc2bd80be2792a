"""Writing measurements to `_system.metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import FencedError
from penstock.log.api import Commit, Holder, Log
from penstock.log.declaring.names import METRICS
from penstock.log.declaring.objects import Metric
from penstock.log.writing.compose import Composer, EventOptions


class MetricWriter:
    """Appends measurements, and progress with them, under an ephemeral producer name."""

    def __init__(self, log: Log, source: str, producer: str) -> None:
        self._log = log
        self._producer = producer
        self._composer = Composer(source, log.limits)
        self._holder: Holder | None = None
        self._sequence = 0

    def write(
        self, metrics: Sequence[Metric], progress: Mapping[str, bytes | None] | None = None
    ) -> None:
        """Commit them. After an error the caller may try again later; nothing must stop for it."""
        if self._holder is None:
            self._holder = self._log.hold(self._producer, ephemeral=True)
        stream = self._log.stream(str(METRICS))
        admit = self._composer.admit
        events = [admit(stream, metric, EventOptions(), system=True) for metric in metrics]
        parts = [self._composer.part(stream, events)] if events else []
        commit = Commit(parts=parts, progress=progress or {})
        try:
            self._log.commit(self._holder, self._sequence, commit)
        except FencedError:  # forgotten after days without a commit: the machine was asleep
            self._holder = None
            raise
        self._sequence += 1
