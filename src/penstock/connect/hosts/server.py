"""A listening port with a thread for each connection: what the listener and sinks share.

An error ends only the connection it occurs on; on leaving the server's block, each connection
finishes what it is doing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from penstock.connect.addresses import announce, listening_at
from penstock.connect.hosts.sockets import connections_for, set_up
from penstock.connect.protocol import effects, wire
from penstock.connect.protocol.effects import PASSING, Close, Send
from penstock.errors import UsageError

TICK_S = 0.5
"""How often a waiting thread checks whether it should stop."""
LINGER_S = 1.0
"""How long a peer may take to close the connection after the last frame to it."""
REFUSE_S = 0.1
"""The same for a peer that is rejected: others are waiting behind it."""
READ_BYTES = 1 << 18
GATHER_BYTES = 1 << 22


class Server:
    """Listens for the duration of its block. `make` returns the connection for a socket."""

    def __init__(
        self,
        address: str,
        connections_max: int,
        make: Callable[[socket.socket, str], Connection],
        tell: Callable[[str], None],
    ) -> None:
        host, port, self._name = listening_at(address)
        self._where = (host, port)
        self._announced = contextlib.ExitStack()
        self._most = connections_max
        self._make = make
        self._tell = tell
        self.stopping = threading.Event()
        self._numbers = itertools.count(1)
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._accept, name="penstock-server")

    @property
    def address(self) -> tuple[str, int]:
        """The address it listens at, including the port that was assigned."""
        assert self._socket is not None  # noqa: S101  within the block
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def __enter__(self) -> Self:
        try:
            family = socket.AF_INET6 if ":" in self._where[0] else socket.AF_INET
            self._socket = socket.create_server(self._where, family=family)
        except OSError as error:
            where, why = "{}:{}".format(*self._where), os.strerror(error.errno or 0)
            raise UsageError(f"cannot listen at {where}: {why}") from error
        try:
            self._most = connections_for(self._most, self._tell)
            self._socket.settimeout(TICK_S)
            self._announced.enter_context(announce(self._name, self.address))
            self._thread.start()
        except BaseException:
            self._announced.close()
            self._socket.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopping.set()
        self._announced.close()
        self._thread.join()
        with self._lock:
            there = list(self._connections.values())
        for connection in there:
            connection.thread.join()
        assert self._socket is not None  # noqa: S101  within the block
        self._socket.close()

    def _accept(self) -> None:
        assert self._socket is not None  # noqa: S101  within the block
        while not self.stopping.is_set():
            try:
                peer, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                self._tell(f"a connection could not be accepted: {error}")
                self.stopping.wait(TICK_S)
                continue
            where = f"{address[0]}:{address[1]}"
            try:
                self._take(peer, where)
            except Exception as error:  # such as failing to start a thread: other connections go on
                self._tell(f"a connection from {where} could not be accepted: {error}")
                self._refuse(peer, str(error))

    def _take(self, peer: socket.socket, where: str) -> None:
        with self._lock:
            is_full = len(self._connections) >= self._most
        if is_full:
            self._refuse(peer, f"{self._most} connections are open already")
        else:
            self._begin(self._make(peer, where))

    def _begin(self, connection: Connection) -> None:
        number = next(self._numbers)

        def forget() -> None:
            with self._lock:
                self._connections.pop(number, None)

        connection.begin(self, forget)
        with self._lock:
            self._connections[number] = connection
        try:
            connection.thread.start()
        except BaseException:
            forget()
            raise

    def _refuse(self, peer: socket.socket, why: str) -> None:
        with contextlib.suppress(OSError), peer:
            peer.settimeout(REFUSE_S)
            peer.sendall(wire.encode(effects.error(f"{PASSING}{why}").frame))
            part(peer)


class Connection:
    """One connection: a socket, and a session that decides what to do."""

    def __init__(
        self, peer: socket.socket, where: str, frame_bytes_max: int, send_timeout_s: float
    ) -> None:
        self.where = where
        self._socket = peer
        self._send_timeout_s = send_timeout_s
        self.parser = wire.Parser(frame_bytes_max)
        self.thread = threading.Thread(target=self._serve, name=f"penstock-peer-{where}")
        self._forget: Callable[[], None] = lambda: None
        self.server: Server = None  # type: ignore[assignment]  # begin comes first

    def begin(self, server: Server, forget: Callable[[], None]) -> None:
        self.server, self._forget = server, forget

    def talk(self) -> str:
        """Serve the connection until it ends; return the reason."""
        raise NotImplementedError

    def perform(self, effect: Any) -> Iterable[Any]:
        """Carry out one effect of the session, other than sending; return those that follow."""
        raise NotImplementedError

    def let_go(self, reason: str) -> None:
        """Release everything that the connection had."""
        raise NotImplementedError

    def _serve(self) -> None:
        reason = ""
        try:
            with self._socket:
                set_up(self._socket)
                self._socket.settimeout(TICK_S)
                reason = self._talk()
                part(self._socket)
        except ConnectionResetError:  # it left without reading everything, which it need not do
            reason = effects.CLOSED
        except OSError as error:
            reason = f"the connection broke: {error}"
        finally:
            try:
                self.let_go(reason)
            finally:
                self._forget()

    def _talk(self) -> str:
        """Serve the connection; any failure is reported to the peer, which may reconnect."""
        try:
            return self.talk()
        except OSError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            self.send([effects.error(f"{PASSING}{told}").frame])
            return f"internal error: {told}"

    def interrupt(self) -> None:
        """Make reading end, after the thread's current action. Safe to call from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def gather(self) -> bytes | None:
        """Wait for data and return all that has arrived; `None` if nothing came for a while."""
        try:
            data = self._socket.recv(READ_BYTES)
        except TimeoutError:
            return None
        if len(data) < READ_BYTES:
            return data
        parts, size = [data], len(data)
        self._socket.setblocking(False)  # only what has arrived already
        try:
            while data and size < GATHER_BYTES:
                data = self._socket.recv(READ_BYTES)
                parts.append(data)
                size += len(data)
        except BlockingIOError:
            pass
        finally:
            self._socket.settimeout(TICK_S)
        return b"".join(parts)

    def send(self, frames: Sequence[wire.Frame]) -> None:
        if frames:
            self._socket.settimeout(self._send_timeout_s)
            self._socket.sendall(b"".join(map(wire.encode, frames)))
            self._socket.settimeout(TICK_S)

    def carry_out(self, effects: Iterable[Any]) -> str | None:
        """Carry out effects one after the other; return why the connection ended, if it did.

        Consecutive frames are sent together.
        """
        said: list[wire.Frame] = []
        for effect in effects:
            if isinstance(effect, Send):
                said.append(effect.frame)
                continue
            self.send(said)
            said = []
            if isinstance(effect, Close):
                return effect.reason
            reason = self.carry_out(self.perform(effect))
            if reason:
                return reason
        self.send(said)
        return None


def part(peer: socket.socket) -> None:
    """Let the peer read the last frames, which closing with unread input would discard."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline and peer.recv(READ_BYTES):
            pass
