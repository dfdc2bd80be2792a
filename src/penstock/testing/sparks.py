"""A standalone Spark cluster on loopback: a master and workers, from the installed pyspark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

from penstock.errors import PenstockError
from penstock.testing.brokers import free_ports

START_S_MAX = 60.0


class SparkClusterError(PenstockError):
    """A Spark cluster could not be started."""

    code = "spark_cluster"


class SparkCluster:
    """A master and some workers, each with one core and its own process.

    with SparkCluster(2, folder) as cluster:
        running(app, log, master=cluster.url)
        cluster.kill_worker(0)
    """

    def __init__(
        self, workers: int, folder: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.count = workers
        self.folder = folder
        self._port, self._web = free_ports(2)
        self._environment = dict(environment or {})
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._master = self._launch(
                "master",
                "org.apache.spark.deploy.master.Master",
                "--host",
                "127.0.0.1",
                "--port",
                str(self._port),
                "--webui-port",
                str(self._web),
            )
            for number in range(self.count):
                self.start_worker(number)
            self._wait_ready()
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

    def start_worker(self, number: int) -> None:
        self._workers[number] = self._launch(
            f"worker-{number}",
            "org.apache.spark.deploy.worker.Worker",
            "--cores",
            "1",
            "--memory",
            "1g",
            "--host",
            "127.0.0.1",
            "--webui-port",
            "0",
            "--work-dir",
            str(self.folder / f"work-{number}"),
            self.url,
        )

    def kill_worker(self, number: int) -> None:
        """Kill a worker and the executors that it started with SIGKILL."""
        worker = self._workers.pop(number)
        for pid in _children(worker.pid):
            _kill(pid)
        worker.kill()
        worker.wait()

    def stop(self) -> None:
        for number in list(self._workers):
            self.kill_worker(number)
        if self._master is not None:
            self._master.kill()
            self._master.wait()
            self._master = None

    def _launch(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        home = str(Path(pyspark.__file__).parent)
        environment = {
            **os.environ,
            "SPARK_HOME": home,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_NO_DAEMONIZE": "1",
            "PYSPARK_PYTHON": sys.executable,
            **self._environment,
        }
        with (self.folder / f"{name}.log").open("wb") as out:
            return subprocess.Popen(
                [f"{home}/bin/spark-class", *command], stdout=out, stderr=out, env=environment
            )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S_MAX
        while self._alive() < self.count:
            if time.monotonic() > deadline:
                logs = (path.read_text()[-1500:] for path in self.folder.glob("*.log"))
                raise SparkClusterError("the Spark cluster did not start:\n" + "\n".join(logs))
            time.sleep(0.1)

    def _alive(self) -> int:
        """The number of workers that the master reports as alive."""
        try:
            address = f"http://127.0.0.1:{self._web}/json/"
            with urllib.request.urlopen(address, timeout=5) as answer:
                return str(answer.read()).count('"ALIVE"') - 1  # the master counts itself
        except OSError:
            return -1


def _children(pid: int) -> list[int]:
    """All processes that a process started, directly or indirectly."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return
