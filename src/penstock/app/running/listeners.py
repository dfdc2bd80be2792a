"""A listener that runs with its app: messages of source connectors become events of a stream.

The logger `penstock.listener` logs errors of connectors as warnings, and connections that open and
close as information.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from penstock.app.declaring.definitions import Listening
from penstock.app.running.batches import BatchReport
from penstock.app.running.positions import AppRun
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.log.api import Count, Log

_LOGGER = logging.getLogger("penstock.listener")


class ListenQuery:
    """Listens while the app runs; when it ends, all messages received are committed."""

    position_kind = None

    def __init__(self, log: Log, run: AppRun, definition: Listening) -> None:
        del run  # connectors claim their streams one by one
        self.name = definition.name
        self.definitions = (definition,)
        self._log = log
        stream = definition.outputs[0].name
        self._options = ListenerOptions(
            routes=[(pattern, stream) for pattern in definition.names],
            address=definition.address,
            cookie=definition.cookie,
            policy=definition.policy,
            on_damage=definition.on_damage,
            decoder=definition.decoder,
        )

    def run(self, stop: threading.Event, tell: Callable[[BatchReport], None]) -> None:
        del tell  # `penstock connector list` shows what was received
        with Listener(self._log, self._options, self._note, self._warn):
            stop.wait()

    def _note(self, line: str) -> None:
        _LOGGER.info("%s: %s", self.name, line)

    def _warn(self, line: str) -> None:
        _LOGGER.warning("%s: %s", self.name, line)

    def lag(self) -> Count:
        return Count()

    def is_idle(self) -> bool:
        """Always: the app cannot know what connectors may still send."""
        return True

    def late_rows(self) -> int:
        return 0

    def close(self) -> None:
        pass
