"""Waiting for an unavailable server: longer each time, and reporting it once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

BACKOFF_S = 0.05
BACKOFF_S_MAX = 5.0

Tell = Callable[[str], None]
"""Tells people what is happening, a line at a time."""


class Patience:
    """When to try `what` again: soon if all is well, later each time it is unavailable.

    `tell` is called once when it becomes unavailable, with the reason, and once when it is back.
    """

    def __init__(
        self,
        what: str,
        tell: Tell,
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

    def note_return(self) -> None:
        """Note that it answers, though perhaps not for long."""
        if self._is_away:
            self._tell(f"{self._what} is available again")
        self._is_away = False

    def note_answer(self, pause_s: float = 0.0) -> None:
        """Note that all is well; the next attempt is due after this pause."""
        self.note_return()
        self._wait_s = self._least_s
        self._at = time.monotonic() + pause_s

    def note_failure(self, error: Exception | str) -> float:
        """Note a failure; return how long to wait: a random time, to spread out those who wait."""
        if not self._is_away:
            self._tell(f"{self._what} is not available ({error}): retrying")
        self._is_away = True
        wait_s = self._wait_s * random.uniform(0.5, 1.5)  # noqa: S311  no secret
        self._wait_s = min(self._wait_s * 2, self._most_s)
        self._at = time.monotonic() + wait_s
        return wait_s
