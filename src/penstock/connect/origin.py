"""One stream of a connector, as its author writes it: where it goes on, and what comes next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from penstock.errors import ConnectorError, PenstockError, UsageError

T = TypeVar("T")


class Item(NamedTuple):
    """A message of a source: its data, its number, and if they are known its key and time (ns)."""

    data: bytes
    point_of_ref: int
    key: bytes | None = None
    time_ns: int = 0


def silent(line: str) -> None:
    """Nobody wants to hear it."""


class End:
    """What `handle_next` returns when there will never be more."""


END: Final = End()


class Source:
    """One stream of a connector. Its methods are called by one thread, the connector's.

    `handle_next` must not wait for long: while it does, nothing is sent or acknowledged.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise UsageError("a source's stream has a name")
        self.name = name
        self.on_tell: Callable[[str], None] = silent
        """Where `tell` goes: the connector sets it."""

    def tell(self, line: str) -> None:
        """Say something to whoever looks after the connector."""
        self.on_tell(line)

    def handle_open(self) -> None:
        """Called before anything else, once."""

    def handle_reset(self, point_of_ref: int | None) -> None:
        """Go on behind this message: whenever the stream is given to this connector.

        `None`: nothing of the stream is safe yet, begin at the beginning.
        """
        raise NotImplementedError

    def handle_next(self) -> Item | tuple[bytes, int] | End | None:
        """The next message with its number, larger than all before; `None` if there is none now."""
        raise NotImplementedError

    def handle_progress(self, stream: str, point_of_ref: int) -> None:
        """Everything up to this message is safe: it will never be asked for again."""

    def handle_close(self) -> None:
        """Called after everything else, once."""


def called(name: str, function: Callable[..., T], *arguments: object) -> T:
    """What a source's own code gives; its errors are told apart from those of the connection."""
    try:
        return function(*arguments)
    except PenstockError as error:
        raise ConnectorError(f"source {name} failed: {error}") from error
    except Exception as error:
        raise ConnectorError(f"source {name} failed: {type(error).__name__}: {error}") from error
