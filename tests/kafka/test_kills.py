"""Processes killed, stopped and replaced in the middle of commits to Kafka; then the oracle."""

from __future__ import annotations

import random
import signal

import pytest

from tests.fault.runner import Runner
from tests.fault.test_kills import fence_a_zombie, kill_after_words

COMMITS = 16
#: where a commit, a staging or a change of objects can be cut off on Kafka, and at which of them
STEPS = {
    "objects.changed": 3, "hold.epoch": 1, "stage.begun": 9, "stage.blobs": 9,
    "stage.committed": 9, "objects.event": 3, "publish.pieces": 4, "commit.prepared": 7,
    "commit.begun": 7, "commit.blobs": 7, "commit.index": 7, "commit.ids": 5,
    "commit.progress": 7, "commit.producer": 7, "commit.committed": 7,
}  # fmt: skip
IN_TURN = [list(STEPS)[n : n + 5] for n in range(0, len(STEPS), 5)]


@pytest.mark.row("H19", engine="kafka")
@pytest.mark.parametrize("names", IN_TURN)
def test_killed_at(names: list[str], runner: Runner) -> None:
    """On one log in turn: each goes on with what the one before it has left."""
    for n, name in enumerate(names):
        code = runner.run(commits=(n + 1) * COMMITS, failpoint=f"{name}=kill@{STEPS[name]}")
        assert code == -signal.SIGKILL, f"{name} was not reached"
    commits = (len(names) + 1) * COMMITS
    runner.run_here(commits)
    runner.judge()
    said = runner.said()
    assert said.tried == {("even", n) for n in range(commits)}
    assert len(said.acked) >= commits - len(names)  # a kill may cut an acknowledgement off


def test_raised_at_every_step(runner: Runner) -> None:
    """In one run, at commits of their own: a program gives up where too much fails at once."""
    commits = [name for name in STEPS if name.startswith("commit.")]
    at = {**STEPS, **{name: 5 + 3 * n for n, name in enumerate(commits)}}
    armed = ";".join(f"{name}=raise@{at[name]}" for name in STEPS)
    assert runner.run(commits=3 * COMMITS, failpoint=armed) == 0
    raised = " ".join(runner.said().raised)
    assert [name for name in STEPS if f"failpoint {name}" not in raised] == []
    runner.judge()
    assert runner.said().acked == {("even", n) for n in range(3 * COMMITS)}


@pytest.mark.row("H19", engine="kafka")
def test_killed_at_random_moments(runner: Runner) -> None:
    rng = random.Random(runner.seed)
    for _ in range(3):
        kill_after_words(runner.start(commits=60), runner, rng.randrange(1, 25))
    runner.run_here(60)
    runner.judge()


@pytest.mark.row("H15", engine="kafka")
def test_two_processes_write_to_streams_that_compare_ids(runner: Runner) -> None:
    """They take the stream's own session from each other all the time."""
    both = [runner.start(commits=12, producer=name) for name in ("even", "odd")]
    assert [runner.finish(process) for process in both] == [0, 0]
    runner.judge()
    assert len(runner.said().acked) == 24


@pytest.mark.row("H1", engine="kafka")
@pytest.mark.parametrize("step", ["commit.prepared", "commit.blobs", "commit.producer"])
def test_a_zombie_is_fenced(runner: Runner, step: str) -> None:
    fence_a_zombie(runner, f"{step}=stop@6")
