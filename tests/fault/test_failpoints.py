"""Every failpoint of the commit path × {raise, SIGKILL}: recover, then ask the oracle."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import penstock
from penstock import failpoints
from tests.fault.runner import Runner

COMMITS = 30


def _at(name: str) -> int:
    """Which time to fail: past the creation of the log, where everything is still empty."""
    return 20 if name.startswith(("commit.", "stage.", "publish.")) and name != "commit.ids" else 1


@pytest.mark.row("H19", engine="embedded")
@pytest.mark.parametrize("name", failpoints.NAMES)
def test_killed_at(name: str, runner: Runner) -> None:
    code = runner.run(commits=COMMITS, failpoint=f"{name}=kill@{_at(name)}")
    assert code == -signal.SIGKILL, "the failpoint was not reached"
    if runner.path.exists() and runner.said().tried:
        runner.judge()
    runner.run_here(COMMITS)
    runner.judge()
    said = runner.said()
    assert said.tried == {("even", n) for n in range(COMMITS)}
    assert len(said.acked) >= COMMITS - 1  # the kill may have cut one acknowledgement off


@pytest.mark.parametrize("name", failpoints.NAMES)
def test_raised_at(name: str, runner: Runner) -> None:
    failpoints.arm(name, "raise", _at(name))
    try:
        if name.startswith("open."):
            with pytest.raises(failpoints.FailpointError):
                runner.run_here(COMMITS)
        else:
            runner.run_here(COMMITS)
            assert f"failpoint {name}" in " ".join(runner.said().raised)
    finally:
        failpoints.disarm()
    if name.startswith("open."):
        runner.run_here(COMMITS)
    runner.judge()
    assert runner.said().acked == {("even", n) for n in range(COMMITS)}


def test_the_list_of_failpoints_is_what_the_code_has() -> None:
    folder = Path(penstock.__file__).parent
    used = {
        name
        for path in folder.rglob("*.py")
        for name in re.findall(r'\bfailpoint\("([a-z.]+)"\)', path.read_text("utf-8"))
    }
    assert used == {*failpoints.NAMES, *failpoints.CONNECTOR_NAMES}


def test_an_unknown_failpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="no failpoint"):
        failpoints.arm("commit.nowhere", "raise")
