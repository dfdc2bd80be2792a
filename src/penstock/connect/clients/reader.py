"""Consuming a stream by reading it: a sink for programs that keep their own loop.

    with SinkClient("127.0.0.1:6068", Path("words"), decoder=text) as sink:
        for word in sink:
            print(word)

Penstock pushes into it with two-phase commit; committed messages wait on disk to be read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

import msgspec

from penstock.connect.addresses import is_closed
from penstock.connect.clients.codecs import Decoder
from penstock.connect.hosts.inbox import Inbox, ReadMessage
from penstock.connect.hosts.sink_host import SinkHost, SinkOptions
from penstock.connect.hosts.spool import SPOOL_BYTES_MAX
from penstock.errors import ClosedError, ConnectorTimeoutError, UsageError

T = TypeVar("T")


def _pass_through(data: bytes) -> bytes:
    return data


class SinkClient(Generic[T]):
    """Listens at `address` for the duration of its block, and keeps unread messages in `folder`.
    Only one thread may read. The folder is the target: if it is lost, so are its messages.

    A message counts as read when the next one is requested, or when the block is left without an
    exception: a program that is killed before that gets this message again, and no other. `last`
    has its worker, key and time, and an `id` by which a program can recognise it.
    """

    def __init__(
        self,
        address: str,
        folder: Path | str,
        *,
        decoder: Decoder[T] = cast(Decoder[T], _pass_through),
        options: SinkOptions = SinkOptions(),
        spool_bytes_max: int = SPOOL_BYTES_MAX,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        if not is_closed(address, options.cookie):
            raise UsageError(f"anyone who can reach {address} could write: set a cookie")
        self._folder = Path(folder)
        self._decoder = decoder
        self._inbox: Inbox | None = None
        self._exits = contextlib.ExitStack()
        options = msgspec.structs.replace(options, address=address, spool_bytes_max=spool_bytes_max)
        self._host = SinkHost(None, self._folder, options, tell)
        self.last: ReadMessage | None = None
        """The message read last."""

    @property
    def address(self) -> tuple[str, int]:
        """The address it listens at, including the port that was assigned."""
        return self._host.address

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as exits:
            exits.enter_context(self._host)
            exits.callback(self._close_inbox)
            self._inbox = Inbox(self._host.spool, self._folder)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._inbox is not None:
            self._inbox.confirm()
        self.close()

    def close(self) -> None:
        """Close the sink, from any thread: a waiting `read` raises `ClosedError`.

        The message read last is delivered again, unless the block then ends without an exception.
        """
        self._exits.close()

    def _close_inbox(self) -> None:
        with self._host.spool.changed:
            if self._inbox is not None:
                inbox, self._inbox = self._inbox, None
                inbox.close()
            self._host.spool.changed.notify_all()

    def read(self, timeout: float | None = None) -> T:
        """Return the next message, waiting for one if necessary.

        Raises `ConnectorTimeoutError` if none has arrived within `timeout` seconds (nothing is
        lost: the next call gets it), `ClosedError` once the sink is closed, and whatever the
        decoder raises for a message that it cannot decode (the next call continues after it).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        changed = self._host.spool.changed
        with changed:
            while (found := self._open_inbox().take()) is None:
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise ConnectorTimeoutError(f"no message arrived within {timeout} s")
                changed.wait(left_s)
        self.last = found
        return self._decoder(found.data)

    def __iter__(self) -> Iterator[T]:
        """Iterate over all messages, until the sink is closed."""
        with contextlib.suppress(ClosedError):
            while True:
                yield self.read()

    def _open_inbox(self) -> Inbox:
        if self._inbox is None:
            raise ClosedError("the sink is not open: use it inside its `with` block")
        return self._inbox
