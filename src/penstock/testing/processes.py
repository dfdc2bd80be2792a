"""A running app as processes that can be killed: the runner, Spark's JVM, or a worker."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

Victim = Literal["runner", "jvm", "worker"]
VICTIMS: tuple[Victim, ...] = ("runner", "jvm", "worker")


class SparkProcess:
    """A program that uses Spark, in a process of its own, with all processes that it starts."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> None:
        self._command = list(command)
        self._environment = {"PYTHONFAULTHANDLER": "1", **os.environ, **(environment or {})}
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        out = (self._output or Path(os.devnull)).open("ab")
        with out:
            self._process = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=out,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill_all()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "enter the block first"
        return self._process

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or `None` if it is still running after the timeout."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self, victim: Victim, chance: random.Random) -> bool:
        """Kill one process of that kind with SIGKILL; false if there is none at the moment."""
        found = [self.process.pid] if victim == "runner" else self._members(victim)
        if not found:
            return False
        os.kill(chance.choice(found), signal.SIGKILL)
        return True

    def _members(self, victim: Victim) -> list[int]:
        found = []
        for pid, command in processes_of(self.process.pid):
            is_java = "org.apache.spark.deploy.SparkSubmit" in command
            is_worker = "penstock.spark.daemon" in command or "pyspark" in command
            if (is_java and victim == "jvm") or (is_worker and not is_java and victim == "worker"):
                found.append(pid)
        return found

    def explain(self) -> str:
        """Its stacks, if it is still running, and the end of its output. Ends the process."""
        if self.is_running():
            self.process.send_signal(signal.SIGABRT)  # Python prints its stacks
            self.wait(10)
        return "" if self._output is None else self._output.read_text("utf-8")[-8000:]

    def cpu_s(self) -> dict[int, float]:
        """The processor time in seconds of it and of each process that it started."""
        taken = {}
        for pid in (self.process.pid, *(pid for pid, _ in processes_of(self.process.pid))):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                taken[pid] = cpu_s(pid)
        return taken

    def kill_all(self) -> None:
        """Kill all of its processes."""
        for pid, _ in processes_of(self.process.pid):
            _try_kill(pid)
        _try_kill(self.process.pid)
        self.process.wait(30)


class RunnerProcess(SparkProcess):
    """`penstock run`. With `quick`, Java compiles less: it starts faster, and is soon killed
    anyway.
    """

    def __init__(
        self,
        app: Path,
        log: Path | str,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
        quick: bool = True,
    ) -> None:
        less = ("--setting", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1")
        command = [
            sys.executable,
            "-m",
            "penstock.cli",
            "run",
            str(app),
            "--log",
            str(log),
            *(less if quick else ()),
            *arguments,
        ]
        super().__init__(command, environment=environment, output=output)


def cpu_s(pid: int) -> float:
    """The processor time in seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _try_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def processes_of(session: int) -> list[tuple[int, str]]:
    """The processes of a session with their command lines, without its leader."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == session:
            continue
        try:
            if os.getsid(int(folder.name)) == session:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((int(folder.name), command))
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
    return found


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {timeout_s} s")
        time.sleep(0.02)
