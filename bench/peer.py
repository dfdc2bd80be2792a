"""Peers: programs in virtual environments of their own, and servers from the registries."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

PEERS = Path(__file__).parent / "peers"
WORK = Path(".work") / "peers"
NATS = "github.com/nats-io/nats-server/v2@v2.12.0"


def run_job(peer: str, *arguments: str) -> float:
    """The seconds that a peer's job takes, by its own clock, starting left out."""
    python = WORK / peer / "bin" / "python"
    # Spark's workers are told where our packages are; a peer has its own.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PATHWAY_THREADS"] = "2"
    if not python.exists():
        print(f"  setting up {peer} …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(WORK / peer)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-r", str(PEERS / f"{peer}.txt")], check=True, env=environment)
    job = [str(python), str(PEERS / f"{peer}_job.py"), *arguments]
    done = subprocess.run(
        job, check=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return float(done.stdout.split()[-1])


class Nats:
    """A NATS server with JetStream on loopback, which syncs each message."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as found:
            self._port = found.getsockname()[1]

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        program = (WORK / "nats-server" / "nats-server").absolute()
        if not program.exists():
            print("  building nats-server …", file=sys.stderr, flush=True)
            environment = {**os.environ, "GOBIN": str(program.parent)}
            subprocess.run(["go", "install", NATS], check=True, env=environment)
        self._folder.mkdir()
        settings = self._folder / "nats.conf"
        settings.write_text(
            f'listen: "127.0.0.1:{self._port}"\n'
            f'jetstream {{ store_dir: "{self._folder.absolute()}", sync_interval: always }}\n'
        )
        self._process = subprocess.Popen(
            [str(program), "-c", str(settings)], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return self
            except OSError:
                time.sleep(0.05)
        self._process.kill()
        raise TimeoutError("nats-server did not start")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
