"""Periodic background work: upkeep, metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Caretaker:
    """A background thread that runs a round of work at intervals, once it is started."""

    def __init__(self, interval_s: float, work: Callable[[], object]) -> None:
        self._interval_s = interval_s
        self._work = work
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._started = False
        self.last_error: str | None = None
        self._thread = threading.Thread(target=self._loop, name="penstock-upkeep", daemon=True)

    def start(self) -> None:
        """Start, unless it is running.

        Never raises: callers have other work to do. If no thread can be started, `last_error` says
        so, and the next call tries again.
        """
        if self._interval_s <= 0:
            return
        with self._lock:
            if self._started or self._stop.is_set():
                return
            try:
                self._thread.start()
                self._started = True
                self.last_error = None
            except RuntimeError as error:
                self.last_error = f"upkeep could not be started: {error}"

    def _loop(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._work()
                self.last_error = None
            except Exception as error:
                self.last_error = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            started = self._started
        if started:
            self._thread.join(30)
