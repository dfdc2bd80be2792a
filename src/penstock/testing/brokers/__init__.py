"""Real Apache Kafka brokers on loopback, for tests and for development.

    with Brokers(3, folder) as brokers:
        penstock.open(brokers.url)
        brokers.kill(0)

Maven downloads the jars once; they are kept in the user's cache folder.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from penstock.errors import PenstockError

POM = Path(__file__).with_name("pom.xml")
START_S_MAX = 60.0
STOP_S_MAX = 20.0
JARS_S_MAX = 600.0
LOG_LINES = 15


class BrokersError(PenstockError):
    """A broker could not be started."""

    code = "brokers"


def jars() -> Path:
    """The folder with the jars of a broker; Maven downloads them the first time.

    Raises `BrokersError` if they cannot be downloaded.
    """
    return fetch(POM, "brokers")


def fetch(pom: Path, name: str) -> Path:
    """The folder with the jars that a `pom.xml` names, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    folder = cache / f"{name}-{xxhash.xxh3_64_hexdigest(pom.read_bytes())}"
    if folder.is_dir():
        return folder
    if shutil.which("mvn") is None:
        raise BrokersError("Kafka's jars cannot be downloaded: install Maven (mvn)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        shutil.copy(pom, work)
        command = ["mvn", "-B", "-q", "dependency:copy-dependencies", "-DoutputDirectory=libs"]
        try:
            done = subprocess.run(
                command, cwd=work, capture_output=True, text=True, timeout=JARS_S_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            raise BrokersError(
                f"Maven did not download Kafka's jars within {JARS_S_MAX:.0f} s: check that its "
                "repository is reachable"
            ) from None
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise BrokersError(
                "Maven could not download Kafka's jars:\n" + "\n".join(lines[:LOG_LINES])
            )
        if not folder.is_dir():
            (Path(work) / "libs").rename(folder)
    return folder


class Brokers:
    """One broker, or several that form a cluster, each with a folder of its own.

    `protocol` is the protocol of clients (PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL); `settings`
    are Kafka's broker properties and override ours.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        *,
        protocol: str = "PLAINTEXT",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.count = count
        self.folder = folder
        self._protocol = protocol
        self._settings = dict(settings or {})
        self._ports = free_ports(2 * count)
        # Its first bits are zero, since an id must not begin with a dash.
        number = (secrets.randbits(127)).to_bytes(16, "big")
        self._cluster = base64.urlsafe_b64encode(number).decode().rstrip("=")
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self._paused: set[int] = set()

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._ports[: self.count]]

    @property
    def url(self) -> str:
        return f"kafka://{','.join(self.addresses)}"

    def __enter__(self) -> Self:
        try:
            for number in range(self.count):
                self._format(number)
            for number in range(self.count):
                self._launch(number)
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop all brokers: ask them to end, then kill those that have not."""
        for number in list(self._paused):
            self.resume(number)
        running = [process for process in self._processes if process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + STOP_S_MAX
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = [None] * self.count

    def kill(self, number: int) -> None:
        """Kill one broker with SIGKILL."""
        process = self._running(number)
        process.kill()
        process.wait()
        self._processes[number] = None

    def restart(self, number: int) -> None:
        """Restart a broker that was killed; `wait_ready` waits for it."""
        self._launch(number)

    def pause(self, number: int) -> None:
        """Suspend a broker with SIGSTOP: it keeps its connections but does not answer."""
        self._running(number).send_signal(signal.SIGSTOP)
        self._paused.add(number)

    def resume(self, number: int) -> None:
        self._running(number).send_signal(signal.SIGCONT)
        self._paused.discard(number)

    def wait_ready(self) -> None:
        """Wait until every started broker answers; raises `BrokersError` if one does not."""
        deadline = time.monotonic() + START_S_MAX
        for number, process in enumerate(self._processes):
            while process is not None and not self._answers(number):
                if process.poll() is not None:
                    raise BrokersError(
                        f"Kafka broker {number} exited with code {process.returncode}:\n"
                        f"{self._last_lines(number)}"
                    )
                if time.monotonic() > deadline:
                    raise BrokersError(
                        f"Kafka broker {number} did not start within {START_S_MAX:.0f} s:\n"
                        f"{self._last_lines(number)}"
                    )
                time.sleep(0.05)

    def _running(self, number: int) -> subprocess.Popen[bytes]:
        process = self._processes[number]
        assert process is not None, f"broker {number} is not running"
        return process

    def _home(self, number: int) -> Path:
        return self.folder / f"broker-{number}"

    def _log(self, number: int) -> Path:
        return self._home(number) / "broker.log"

    def _last_lines(self, number: int) -> str:
        lines = self._log(number).read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:]) or "(no output)"

    def _answers(self, number: int) -> bool:
        """Whether it has joined the cluster; its port opens only then."""
        try:
            with socket.create_connection(("127.0.0.1", self._ports[number]), 1.0):
                return "Kafka Server started" in self._log(number).read_text(errors="replace")
        except OSError:
            return False

    def _format(self, number: int) -> None:
        home = self._home(number)
        home.mkdir(parents=True)
        properties = self._properties(number)
        (home / "server.properties").write_text(
            "".join(f"{name}={value}\n" for name, value in properties.items())
        )
        tool = ("kafka.tools.StorageTool", "format", "-t", self._cluster, "-c")
        done = subprocess.run(
            [*self._java(), *tool, str(home / "server.properties")],
            capture_output=True,
            text=True,
            timeout=START_S_MAX,
            check=False,
        )
        if done.returncode:
            raise BrokersError(f"cannot format Kafka's storage:\n{done.stdout}{done.stderr}")

    def _launch(self, number: int) -> None:
        with self._log(number).open("wb") as out:
            self._processes[number] = subprocess.Popen(
                [*self._java(), "kafka.Kafka", str(self._home(number) / "server.properties")],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @staticmethod
    def _java() -> Sequence[str]:
        return (
            "java",
            "-Xmx512m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Xshare:auto",
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-cp",
            f"{jars()}/*",
        )

    def _properties(self, number: int) -> dict[str, str]:
        replicas = str(min(3, self.count))
        controllers = self._ports[self.count :]
        voters = ",".join(f"{n}@127.0.0.1:{port}" for n, port in enumerate(controllers))
        ours = {
            "process.roles": "broker,controller",
            "node.id": str(number),
            "broker.rack": f"rack-{number}",
            "controller.quorum.voters": voters,
            "listeners": (
                f"CLIENTS://127.0.0.1:{self._ports[number]},"
                f"CONTROLLER://127.0.0.1:{controllers[number]}"
            ),
            "advertised.listeners": f"CLIENTS://127.0.0.1:{self._ports[number]}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "CLIENTS",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,CLIENTS:{self._protocol}",
            "log.dirs": str(self._home(number) / "data"),
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": replicas,
            "offsets.topic.num.partitions": "3",
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": str(min(2, self.count)),
            "transaction.state.log.num.partitions": "8",
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "broker.session.timeout.ms": "6000",
            "log.initial.task.delay.ms": "500",
            "log.retention.check.interval.ms": "2000",
            "log.cleaner.backoff.ms": "2000",
        }
        return {**ours, **self._settings}


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free at the moment."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
