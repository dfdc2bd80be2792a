"""Sources on a listener, and sinks on a host, for tests of real systems."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock import Log, read_events
from penstock.connect.clients.source import ConnectorOptions, Source, SourceConnector
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.registry import records
from penstock.connect.hosts.sink_host import SinkHost
from penstock.connect.hosts.targets import TargetMaker
from penstock.connect.push.worker import DialOptions, SinkWorker
from penstock.errors import ConnectorError, SinkGoneError
from penstock.failpoints import ENVIRONMENT
from penstock.testing.processes import wait_until
from penstock.testing.servers import RedisServer

RAW = ListenerOptions(routes=[("*", "raw")])
QUICK = ConnectorOptions(backoff_s=0.05, backoff_s_max=0.2)
Make = TargetMaker


@contextmanager
def running(log: Log, *sources: Source) -> Iterator[SourceConnector]:
    with Listener(log, RAW) as listener:
        address = "{}:{}".format(*listener.address)
        with SourceConnector(address, sources, QUICK) as connector:
            yield connector
            connector.check()


def stored(log: Log) -> int:
    return sum(record.messages for record in records(log))


def texts(log: Log) -> list[str]:
    events: list[Any] = list(read_events(log, "raw"))
    return [event.data.decode() for event in events]


@contextmanager
def hosted(make: Make, folder: Path, told: list[str] | None = None) -> Iterator[str]:
    tell = print if told is None else told.append
    with SinkHost(make, folder, tell=tell) as host:
        yield "{}:{}".format(*host.address)


@contextmanager
def refused(told: list[str], why: str) -> Iterator[None]:
    """The host ends the connection and tells why."""
    with pytest.raises(ConnectorError):
        yield
    wait_until(lambda: any(why in line for line in told), 30, why)


class SinkProcess:
    """A sink in a process of its own, killed and started again at one port.

    It is one of `penstock connect`, by default that of files.
    """

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder = folder
        self._command = command or ("file-sink", str(folder))
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, failpoint: str = "") -> None:
        program = [sys.executable, "-m", "penstock.cli", "connect", *self._command]
        self._process = subprocess.Popen(
            [*program, "--at", self.address], stdout=subprocess.PIPE, text=True,
            env={**os.environ, ENVIRONMENT: failpoint},
        )  # fmt: skip
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().rpartition(":")[2])

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ensure(self) -> None:
        if not self.is_running():
            self.stop()
            self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process.wait(30)
            self._process = None


class Pusher:
    """Pushes batches as an app does, and tries again until each is through."""

    def __init__(self, address: str, worker: str = "w") -> None:
        self._address = address
        self._worker = worker
        self._attempt = 0
        self.decided = ""

    def push(self, *texts: str, commit: bool = True) -> None:
        self._attempt += 1
        with self._dialled() as worker:
            worker.send([(b"k", 7, text.encode()) for text in texts])
            name = f"t{self._attempt}"
            if not worker.vote(name, worker.committed):
                raise SinkGoneError("it votes against")
            self.decided = name if commit else ""
            worker.resolve(name, commit)
            wait_applied(worker)

    def push_surely(self, *texts: str, ensure: Callable[[], None] = lambda: None) -> None:
        """As often as it takes; what was decided is told, and not sent again.

        `ensure` is called before each try.
        """
        self.decided = ""

        def is_through() -> bool:
            ensure()
            try:
                if self.resolve():
                    return True
                self.push(*texts)
            except SinkGoneError:
                return False
            return True

        wait_until(is_through, 60, "a batch")

    def resolve(self) -> bool:
        """Tell the worker what it has not heard; whether that was the batch that is pushed now."""
        self._attempt += 1
        with self._dialled() as worker:
            for name in worker.uncommitted:
                worker.resolve(name, name == self.decided)
            wait_applied(worker)
        return bool(self.decided)

    def _dialled(self) -> SinkWorker:
        return SinkWorker(
            self._address, self._worker, (self._attempt,), DialOptions(timeout_s=10.0)
        )


def wait_applied(worker: SinkWorker) -> None:
    """Until the target has everything that was decided."""

    def is_applied() -> bool:
        progress = worker.ask()
        return progress is not None and progress.applied == progress.staged

    wait_until(is_applied, 60, "the target having it")


def start_redis(server: RedisServer, client: redis.Redis) -> None:
    """Until it has loaded what it had."""
    server.start()

    def is_up() -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    wait_until(is_up, 30, "Redis")
