"""A workload in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from penstock import failpoints
from penstock.log import open_log
from penstock.testing.faults import Fault
from penstock.testing.workload import Said, heard, judge

TIMEOUT_S = 120


class Runner:
    """Starts workloads on one log and remembers everything they said."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.seed = seed
        self.lines: list[str] = []

    def start(
        self,
        commits: int = 20,
        producer: str = "even",
        failpoint: str = "",
        fault: Fault | None = None,
    ) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", "penstock.testing.workload", str(self.path),
            "--seed", str(self.seed), "--commits", str(commits), "--producer", producer,
        ]  # fmt: skip
        if fault is not None:
            command += ["--fault", msgspec.json.encode(fault).decode()]
        environment = {**os.environ, failpoints.ENVIRONMENT: failpoint}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def finish(self, process: subprocess.Popen[str]) -> int:
        """Wait for a workload and take down what it said; returns its exit code."""
        output, errors = process.communicate(timeout=TIMEOUT_S)
        self.lines += output.splitlines()
        if process.returncode > 0:
            sys.stdout.write(errors)
        return process.returncode

    def run(
        self,
        commits: int = 20,
        producer: str = "even",
        failpoint: str = "",
        fault: Fault | None = None,
    ) -> int:
        return self.finish(self.start(commits, producer, failpoint, fault))

    def said(self) -> Said:
        return heard(self.lines)

    def judge(self) -> None:
        """Fail the test if a promise was broken."""
        with open_log(self.path, upkeep_interval_ms=0) as log:
            assert judge(log, self.said(), self.seed) == []
