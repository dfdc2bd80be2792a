"""A workload in a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from penstock import failpoints
from penstock.log import open_log
from penstock.testing.faults import Fault
from penstock.testing.workload import Said, heard, judge, work

TIMEOUT_S = 120


class Runner:
    """Starts workloads on one log and remembers everything they said."""

    def __init__(self, path: Path, seed: int, url: str | None = None) -> None:
        self.path = path
        self.url = url or str(path)
        self.seed = seed
        self.lines: list[str] = []
        self._errors = path.with_suffix(".stderr")

    def start(
        self,
        commits: int = 20,
        producer: str = "even",
        failpoint: str = "",
        fault: Fault | None = None,
    ) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", "penstock.testing.workload", self.url,
            "--seed", str(self.seed), "--commits", str(commits), "--producer", producer,
        ]  # fmt: skip
        if fault is not None:
            command += ["--fault", msgspec.json.encode(fault).decode()]
        environment = {**os.environ, failpoints.ENVIRONMENT: failpoint}
        with self._errors.open("a") as errors:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )

    def finish(self, process: subprocess.Popen[str]) -> int:
        """Wait for a workload and take down what it said; returns its exit code."""
        assert process.stdout is not None
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        with process.stdout:
            self.lines += process.stdout
        code = process.wait()
        watchdog.cancel()
        if code > 0:
            sys.stdout.write(self._errors.read_text("utf-8"))
        return code

    def run(
        self,
        commits: int = 20,
        producer: str = "even",
        failpoint: str = "",
        fault: Fault | None = None,
    ) -> int:
        return self.finish(self.start(commits, producer, failpoint, fault))

    def run_here(self, commits: int, producer: str = "even") -> None:
        """Run a workload that nobody kills: in this process, which takes less time."""
        with io.StringIO() as told:
            try:
                with contextlib.redirect_stdout(told):
                    work(self.url, self.seed, commits, producer)
            finally:
                self.lines += told.getvalue().splitlines()

    def said(self) -> Said:
        return heard(self.lines)

    def judge(self) -> None:
        """Fail the test if a promise was broken."""
        with open_log(self.url, upkeep_interval_ms=0) as log:
            wrong = judge(log, self.said(), self.seed)
        assert not wrong, "\n".join(wrong)
