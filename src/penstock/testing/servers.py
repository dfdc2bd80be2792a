"""Real Redis and PostgreSQL servers on loopback, for the length of a block, as Debian installs
them."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

READY_S = 60.0
STILL_THERE = "is still in use"
INSTALL = "run `apt-get install redis-server postgresql`, or `make tools`"


class ServerError(Exception):
    """A server is not installed, or does not start."""


def free_port() -> int:
    """A loopback port that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class _LoopbackServer:
    """A process that listens on a port, and can be killed and restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _prepare(self) -> None:
        """Called once, before the first start."""

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._prepare()
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it accepts connections; raises `ServerError` with its output."""
        output = self.folder / "output.txt"
        deadline = time.monotonic() + READY_S
        while not self._comes_up(output, deadline):
            said = output.read_text(errors="replace")[-2000:]
            self.stop()
            # The remaining processes of a killed server take a moment to end.
            if STILL_THERE not in said or time.monotonic() > deadline:
                raise ServerError(f"{type(self).__name__} did not start:\n{said}")
            time.sleep(0.2)

    def _comes_up(self, output: Path, deadline: float) -> bool:
        output.write_bytes(b"")
        with output.open("ab") as out:  # remains of a killed server write to it too
            self._process = subprocess.Popen(self._command(), stdout=out, stderr=out)
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _is_ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill it with SIGKILL, without giving it a chance to clean up."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGINT)

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        self._process = None


class RedisServer(_LoopbackServer):
    """A Redis server that writes every change to disk before it answers."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> list[str]:
        program = shutil.which("redis-server")
        if program is None:
            raise ServerError(f"redis-server is not installed: {INSTALL}")
        return [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.folder),
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--save",
            "",
        ]


class PostgresServer(_LoopbackServer):
    """A PostgreSQL server with a database `postgres` that anyone on this machine may use."""

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def _prepare(self) -> None:
        # PostgreSQL refuses to run as root.
        if os.geteuid() == 0:
            found = pwd.getpwnam("postgres")
            for folder in (self.folder, *self.folder.parents):
                if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o005:
                    folder.chmod(folder.stat().st_mode | 0o055)
            (self.folder / "data").mkdir(exist_ok=True)
            os.chown(self.folder / "data", found.pw_uid, found.pw_gid)
        command = [
            *self._program("initdb"),
            "-D",
            str(self.folder / "data"),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        if done.returncode:
            raise ServerError(f"initdb failed:\n{done.stderr}")

    def _command(self) -> list[str]:
        return [
            *self._program("postgres"),
            "-D",
            str(self.folder / "data"),
            "-p",
            str(self.port),
            "-h",
            "127.0.0.1",
            "-c",
            "unix_socket_directories=",
            "-c",
            "max_connections=50",
        ]

    def _program(self, name: str) -> list[str]:
        found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
        on_path = shutil.which(name)
        if not found and on_path is None:
            raise ServerError(f"{name} is not installed: {INSTALL}")
        program = str(found[-1]) if found else str(on_path)
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        return [*as_user, program] if os.geteuid() == 0 else [program]

    def _is_ready(self) -> bool:
        ready = [*self._program("pg_isready"), "-h", "127.0.0.1", "-p", str(self.port), "-q"]
        return subprocess.run(ready, check=False, cwd="/").returncode == 0
