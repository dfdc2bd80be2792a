"""Listeners and sinks where the machine has no more threads, or files, to give."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.sink_host import SinkHost
from penstock.connect.protocol import wire
from penstock.connect.push.worker import SinkWorker
from penstock.connect.sinks.file import FileSink
from penstock.errors import SinkGoneError
from penstock.testing.processes import wait_until
from tests.connect.peer import Peer, message
from tests.connect.test_sinks import address_of


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """No machine has room for such a stack, so no thread can be started meanwhile."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("raw", content="bytes"))])
        yield opened


def test_a_listener_that_cannot_start_a_thread_says_so_and_goes_on(log: Log) -> None:
    told: list[str] = []
    options = ListenerOptions(routes=[("*", "raw")])
    with Listener(log, options, told.append) as listener, Peer(listener.address) as there:
        there.hello()
        for name in ("a", "b", "c"):
            there.notify(name)
        with no_more_threads():
            with Peer(listener.address) as peer:
                found = peer.hello()
                assert isinstance(found, wire.Error)
                assert "try again later: can't start new thread" in found.message
                assert peer.next() is None
            there.send(*(message(name, 1) for name in ("a", "b", "c")))
            assert isinstance(there.next(), wire.Ack), "those who are there are served"
        with Peer(listener.address) as peer:
            assert isinstance(peer.hello(), wire.Ok)
    assert any("can't start new thread" in line for line in told)
    assert len(list(read_events(log, "raw"))) == 3


def test_a_sink_that_cannot_start_a_thread_says_so_and_goes_on(tmp_path: Path) -> None:
    with SinkHost(lambda worker: FileSink(tmp_path, worker), tmp_path) as host:
        with no_more_threads(), pytest.raises(SinkGoneError, match="can't start new thread"):
            SinkWorker(address_of(host), "w", (1,)).__enter__()
        with SinkWorker(address_of(host), "w", (2,)) as worker:
            assert worker.committed == 0


def test_a_listener_that_cannot_begin_leaves_no_port_open(log: Log) -> None:
    before = set(threading.enumerate())
    with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        Listener(log, ListenerOptions(routes=[("*", "raw")])).__enter__()
    wait_until(lambda: set(threading.enumerate()) <= before, 10, "its threads having ended")


class Limited:
    """`penstock listen` or a sink, with so many files to open at most."""

    def __init__(self, folder: Path, limits: str, *command: str) -> None:
        self._said = folder / "said.txt"
        program = f"ulimit {limits}; exec {sys.executable} -m penstock.cli " + " ".join(command)
        shell = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        with self._said.open("wb") as out:
            self._process = subprocess.Popen(
                ["sh", "-c", program], stdout=subprocess.PIPE, stderr=out, text=True, cwd=folder,
                env={**shell, "PENSTOCK_LOG": str(folder / "log.db")},
            )  # fmt: skip

    def __enter__(self) -> tuple[str, int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening at "):
            self._process.kill()
            self.__exit__()
        return "127.0.0.1", int(line.rpartition(":")[2])

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert self._process.wait(60) == 0, self.said()

    def said(self) -> str:
        return self._said.read_text()


@pytest.mark.parametrize("command", ["listen raw", "connect file-sink out"])
def test_connections_are_no_more_than_there_are_files_for(
    tmp_path: Path, log: Log, command: str
) -> None:
    """Too few files and no more to be had: those who can be served are, and others come later."""
    program = Limited(tmp_path, "-n 140", *command.split(), "--at", "127.0.0.1:0")
    with program as address, contextlib.ExitStack() as peers:
        for n in range(1000):
            peer = peers.enter_context(Peer(address))
            answer = peer.hello(instance=f"w{n}")
            if not isinstance(answer, wire.Ok):
                break
        assert isinstance(answer, wire.Error)
        assert f"try again later: {n} connections are open already" in answer.message
        assert 5 <= n <= 20
        assert f"at most {n} connections, not 1,000: " in program.said()
        assert "Too many open files" not in program.said()


def test_more_files_are_asked_for_where_they_can_be_had(tmp_path: Path, log: Log) -> None:
    program = Limited(tmp_path, "-S -n 140", "listen", "raw", "--at", "127.0.0.1:0")
    with program as address, contextlib.ExitStack() as peers:
        for n in range(150):
            peer = peers.enter_context(Peer(address))
            assert isinstance(peer.hello(instance=f"w{n}"), wire.Ok)
        assert "raised the limit on open files from 140 to 4,100" in program.said()
