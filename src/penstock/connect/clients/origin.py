"""One stream of a connector, as its author implements it: where it resumes, and what is next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from penstock.errors import ConnectorError, PenstockError, UsageError

T = TypeVar("T")


class Item(NamedTuple):
    """A message of a source: its data and number and, if known, its key and time (ns)."""

    data: bytes
    point_of_ref: int
    key: bytes | None = None
    time_ns: int = 0


def silent(line: str) -> None:
    """Ignore the line."""


class End:
    """Returned by `handle_next` when there will never be another message."""


END: Final = End()


class Source:
    """One stream of a connector. Its methods are called by one thread, the connector's.

    `handle_next` must not wait for long: while it does, nothing is sent or acknowledged.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise UsageError("a source needs a name for its stream")
        self.name = name
        self.on_tell: Callable[[str], None] = silent
        """The function that `tell` calls; set by the connector."""

    def tell(self, line: str) -> None:
        """Report something to the operator of the connector."""
        self.on_tell(line)

    def handle_open(self) -> None:
        """Called before anything else, once."""

    def handle_reset(self, point_of_ref: int | None) -> None:
        """Resume after this message; called whenever the stream is granted to this connector.

        `None` means that nothing of the stream is safe yet: start at the beginning.
        """
        raise NotImplementedError

    def handle_next(self) -> Item | tuple[bytes, int] | End | None:
        """The next message with its number, larger than all before; `None` if there is none yet."""
        raise NotImplementedError

    def handle_progress(self, stream: str, point_of_ref: int) -> None:
        """Called when everything up to this message is safe and will never be requested again."""

    def handle_close(self) -> None:
        """Called after everything else, once."""


def call_source(name: str, function: Callable[..., T], *arguments: object) -> T:
    """Call a source's own code; its errors are distinguished from those of the connection."""
    try:
        return function(*arguments)
    except PenstockError as error:
        raise ConnectorError(f"source {name} failed: {error}") from error
    except Exception as error:
        raise ConnectorError(f"source {name} failed: {type(error).__name__}: {error}") from error
