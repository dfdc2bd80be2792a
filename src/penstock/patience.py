"""Waiting for a server that is away: longer each time, and saying so once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

BACKOFF_S = 0.05
BACKOFF_S_MAX = 5.0


class Patience:
    """When `what` may be asked again: soon if all is well, later each time it is away.

    `tell` hears once that it is away and why, and once that it is back.
    """

    def __init__(
        self,
        what: str,
        tell: Callable[[str], None],
        backoff_s: float = BACKOFF_S,
        backoff_s_max: float = BACKOFF_S_MAX,
    ) -> None:
        self._what = what
        self._tell = tell
        self._least_s = backoff_s
        self._most_s = backoff_s_max
        self._wait_s = backoff_s
        self._at = 0.0
        self._is_away = False

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._at

    def is_back(self) -> None:
        """It answers; whether for long is not yet known."""
        if self._is_away:
            self._tell(f"{self._what} is back")
        self._is_away = False

    def answered(self, pause_s: float = 0.0) -> None:
        """All is well; it need not be asked again for so long."""
        self.is_back()
        self._wait_s = self._least_s
        self._at = time.monotonic() + pause_s

    def failed(self, error: Exception | str) -> float:
        """How long to wait now. Not everybody who waits comes again at the same moment."""
        if not self._is_away:
            self._tell(f"{self._what} is away ({error}): trying again")
        self._is_away = True
        wait_s = self._wait_s * random.uniform(0.5, 1.5)  # noqa: S311  no secret
        self._wait_s = min(self._wait_s * 2, self._most_s)
        self._at = time.monotonic() + wait_s
        return wait_s
