"""Waiting for a log that cannot take what a command writes: saying so and why, not for ever."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Self, TypeVar

from penstock.cli.output import note
from penstock.errors import CommitOutcomeUnknownError, DeliveryTimeoutError, PenstockError
from penstock.log.declaring.quantities import format_duration
from penstock.producer import Producer

T = TypeVar("T")
QUIET_S = 2.0
"""How long nothing is said."""
PAUSE_S = 0.1
PAUSE_S_MAX = 2.0
TIMEOUT = "30s"


class Attempts:
    """Tries again what the log may be able to do later, until `timeout_ms` have passed.

    Says after two seconds that it waits, and why as soon as that is known. A try that has begun is
    waited for, whatever the timeout. For a `with` block.
    """

    def __init__(self, url: str, timeout_ms: int, tell: Callable[[str], None] = note) -> None:
        self.timeout_ms = timeout_ms
        self._url = url
        self._tell = tell
        self._told: str | None = None
        self._since: float | None = None
        self._over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="waiting", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def until_done(self, work: Callable[[], T]) -> T:
        """What `work` returns, in the end.

        Raises what waiting does not help at once; what it might help, when the time is over, with
        the reason, and as an unknown outcome if it has been one.
        """
        begun = time.monotonic()
        pause_s, is_unknown = PAUSE_S, False
        while True:
            try:
                self._since = time.monotonic()
                return work()
            except PenstockError as error:
                is_unknown = is_unknown or isinstance(error, CommitOutcomeUnknownError)
                waited_ms = (time.monotonic() - begun) * 1000
                if not error.retriable or waited_ms + pause_s * 1000 >= self.timeout_ms:
                    raise self._error_at_end(error, waited_ms, is_unknown) from error.__cause__
                self._say_why(error)
            finally:
                self._since = None
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    def until_sent(self, producer: Producer, futures: Sequence[Future[T]]) -> None:
        """Wait until a producer, which tries again by itself, has committed or given up."""
        while wait(futures, timeout=QUIET_S).not_done:
            if producer.trouble is not None:
                self._say_why(producer.trouble)
            else:
                self._say(f"waiting for {self._url}: no answer yet …")

    def explain(self, error: PenstockError) -> PenstockError:
        """A producer's giving up, as the command line speaks of it."""
        cause = error.__cause__
        if isinstance(error, DeliveryTimeoutError) and isinstance(cause, PenstockError):
            return self._error_at_end(cause, self.timeout_ms, is_unknown=False)
        return error

    def _error_at_end(
        self, error: PenstockError, waited_ms: float, is_unknown: bool
    ) -> PenstockError:
        if not error.retriable and not is_unknown:
            return error
        seconds = max(1, round(max(waited_ms, self.timeout_ms) / 1000))
        waited = f"gave up after {format_duration(seconds * 1000)} (--timeout)"
        if is_unknown and not isinstance(error, CommitOutcomeUnknownError):
            return CommitOutcomeUnknownError(
                f"it is not known whether this was published: {error}; {waited}"
            )
        told = copy.copy(error)
        told.args = (f"{error}; {waited}",)
        return told

    def _say_why(self, error: Exception) -> None:
        self._say(f"waiting: {error}; retrying for up to {format_duration(self.timeout_ms)} …")

    def _say(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._tell(text)

    def _watch(self) -> None:
        """In a thread of its own."""
        while not self._over.wait(QUIET_S / 4):
            since = self._since
            if since is not None and time.monotonic() - since > QUIET_S:
                self._say(f"waiting for {self._url}: no answer yet …")
