"""A listener that runs with its app: what source connectors send becomes events of a stream.

What connectors do wrong is a warning of the logger `penstock.listener`, who comes and goes is
information.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from penstock.app.definitions import Listening
from penstock.app.step import Step
from penstock.connect.listener import Listener, ListenerOptions
from penstock.log.api import Count, Log

_LOGGER = logging.getLogger("penstock.listener")


class ListenQuery:
    """Listens while the app runs; what has come is safe when it ends."""

    def __init__(self, log: Log, definition: Listening) -> None:
        self.name = definition.name
        self.definitions = (definition,)
        self._log = log
        stream = definition.outputs[0].name
        self._options = ListenerOptions(
            routes=[(pattern, stream) for pattern in definition.names],
            address=definition.address, cookie=definition.cookie, policy=definition.policy,
            on_damage=definition.on_damage, decoder=definition.decoder,
        )  # fmt: skip

    def run(self, stop: threading.Event, tell: Callable[[Step], None]) -> None:
        del tell  # what came is in `penstock connector list`
        with Listener(self._log, self._options, self._note, self._warn):
            stop.wait()

    def _note(self, line: str) -> None:
        _LOGGER.info("%s: %s", self.name, line)

    def _warn(self, line: str) -> None:
        _LOGGER.warning("%s: %s", self.name, line)

    def lag(self) -> Count:
        return Count()

    def is_idle(self) -> bool:
        """What connectors may still send is not for the app to know."""
        return True

    def late_rows(self) -> int:
        return 0

    def close(self) -> None:
        pass
