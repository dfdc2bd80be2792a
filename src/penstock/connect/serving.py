"""A port that is listened at, and a thread for each connection: what listener and sinks share.

A connection that errs ends alone; leaving the server's block lets each finish what it is doing.
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

from penstock.connect import effects, wire
from penstock.connect.addresses import announced, listening_at
from penstock.connect.effects import PASSING, Close, Send
from penstock.connect.sockets import connections_for, set_up
from penstock.errors import UsageError

TICK_S = 0.5
"""How often a thread that waits looks whether it is to stop."""
LINGER_S = 1.0
"""How long a peer that was told something may take to hang up."""
REFUSE_S = 0.1
"""The same for one that is not taken: others wait behind it."""
READ_BYTES = 1 << 18
GATHER_BYTES = 1 << 22


class Server:
    """Listens while its block lasts. `make` gives the connection for a socket."""

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
        """Where it listens, the port it was given included."""
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
            self._announced.enter_context(announced(self._name, self.address))
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
                self._tell(f"a connection could not be taken: {error}")
                self.stopping.wait(TICK_S)
                continue
            where = f"{address[0]}:{address[1]}"
            try:
                self._take(peer, where)
            except Exception as error:  # such as that no thread can be started: others live on
                self._tell(f"a connection from {where} could not be taken: {error}")
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
    """One connection: its socket, around a session that says what is to be done."""

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
        """Go on until the connection is over; why it is."""
        raise NotImplementedError

    def done(self, effect: Any) -> Iterable[Any]:
        """Do one thing that the session asks for, other than sending; what follows from it."""
        raise NotImplementedError

    def gone(self, reason: str) -> None:
        """Let go of what the connection had."""
        raise NotImplementedError

    def _serve(self) -> None:
        reason = ""
        try:
            with self._socket:
                set_up(self._socket)
                self._socket.settimeout(TICK_S)
                reason = self._talk()
                part(self._socket)
        except OSError as error:
            reason = f"the connection broke: {error}"
        finally:
            try:
                self.gone(reason)
            finally:
                self._forget()

    def _talk(self) -> str:
        """Whatever fails here, the peer hears of it and may come again."""
        try:
            return self.talk()
        except OSError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            self.send([effects.error(f"{PASSING}{told}").frame])
            return f"it failed here: {told}"

    def interrupt(self) -> None:
        """Have reading end; what the thread is doing is done first. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def gathered(self) -> bytes | None:
        """What is there to read, once there is something; `None` if nothing came for a while."""
        try:
            data = self._socket.recv(READ_BYTES)
        except TimeoutError:
            return None
        if len(data) < READ_BYTES:
            return data
        parts, size = [data], len(data)
        self._socket.setblocking(False)  # only what is there already
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

    def carry_out(self, effects: Iterable[Any]) -> str:
        """Do what the session asks for, one after the other; why it is over, if it is.

        What it says in a row is sent at once.
        """
        said: list[wire.Frame] = []
        reason = ""
        for effect in effects:
            if isinstance(effect, Send):
                said.append(effect.frame)
                continue
            self.send(said)
            said = []
            if isinstance(effect, Close):
                return effect.reason
            reason = self.carry_out(self.done(effect))
            if reason:
                return reason
        self.send(said)
        return ""


def part(peer: socket.socket) -> None:
    """Have the peer hear the last words: closed with something unread, they would be lost."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline and peer.recv(READ_BYTES):
            pass
