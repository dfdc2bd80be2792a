"""Work that is done every now and then in the background: upkeep, metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Caretaker:
    """A background thread that runs a round every now and then, once it is started."""

    def __init__(self, interval_s: float, work: Callable[[], object]) -> None:
        self._interval_s = interval_s
        self._work = work
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._started = False
        self.last_error: str | None = None
        self._thread = threading.Thread(target=self._loop, name="penstock-upkeep", daemon=True)

    def start(self) -> None:
        """Start, the first time it is called."""
        if self._interval_s <= 0:
            return
        with self._lock:
            if not self._started and not self._stop.is_set():
                self._started = True
                self._thread.start()

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
