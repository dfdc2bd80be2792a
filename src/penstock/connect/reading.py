"""Draining a stream by reading it: a sink for programs that keep their own loop.

    with SinkClient("127.0.0.1:6068", Path("words"), decoder=text) as sink:
        for word in sink:
            print(word)

Penstock pushes into it with two-phase commit; what is committed waits on disk to be read.
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
from penstock.connect.codecs import Decoder
from penstock.connect.sink import SinkHost, SinkOptions
from penstock.connect.spool import Kept, Spool, SpoolSink
from penstock.errors import ClosedError, ConnectorTimeoutError, UsageError

SPOOL_BYTES_MAX = 1 << 30
T = TypeVar("T")


def _as_it_is(data: bytes) -> bytes:
    return data


class SinkClient(Generic[T]):
    """Listens at `address` while its block lasts; keeps what is not read yet in `folder`. One
    thread reads.

    A message counts as read when the next one is asked for, or when the block is left in peace: a
    program that is killed before gets it again, and no other. `last` tells its worker, key and
    time, and an `id` by which a program can know it again.
    """

    def __init__(
        self,
        address: str,
        folder: Path | str,
        *,
        decoder: Decoder[T] = cast(Decoder[T], _as_it_is),
        options: SinkOptions = SinkOptions(),
        spool_bytes_max: int = SPOOL_BYTES_MAX,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        if not is_closed(address, options.cookie):
            raise UsageError(f"anybody who reaches {address} could write: set a cookie")
        self._folder = Path(folder)
        self._decoder = decoder
        self._bytes_max = spool_bytes_max
        self._spool: Spool | None = None
        self._exits = contextlib.ExitStack()
        self._host = SinkHost(
            lambda worker: SpoolSink(self._opened(), worker), self._folder,
            msgspec.structs.replace(options, address=address), tell,
        )  # fmt: skip
        self.last: Kept | None = None
        """The message that was read last."""

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, the port it was given included."""
        return self._host.address

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as exits:
            exits.callback(self._close_spool)
            self._spool = Spool(self._folder, self._bytes_max)
            exits.enter_context(self._host)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._spool is not None:
            self._spool.confirm()
        self.close()

    def close(self) -> None:
        """End it, from any thread: a `read` that waits ends with `ClosedError`.

        The message in hand comes again, unless the block is left in peace after it.
        """
        self._exits.close()

    def _close_spool(self) -> None:
        if self._spool is not None:
            spool, self._spool = self._spool, None
            spool.close()

    def read(self, timeout: float | None = None) -> T:
        """The next message; waits for one.

        Raises `ConnectorTimeoutError` if none has come within `timeout` seconds (nothing is lost:
        the next call gets it), `ClosedError` once this is closed, and what the decoder raises for
        a message that it cannot read (the next call goes on behind it).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        spool = self._opened()
        with spool.changed:
            while (found := spool.take()) is None:
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise ConnectorTimeoutError(f"nothing came within {timeout} s")
                spool.changed.wait(left_s)
                self._opened()
        self.last = found
        return self._decoder(found.data)

    def __iter__(self) -> Iterator[T]:
        """Every message, until this is closed."""
        with contextlib.suppress(ClosedError):
            while True:
                yield self.read()

    def _opened(self) -> Spool:
        if self._spool is None:
            raise ClosedError("this sink is not open: use it within its block")
        return self._spool
