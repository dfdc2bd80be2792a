"""Kills at random moments, several processes on one log, zombies, and kills during recovery."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import zlib

import pytest

from penstock import failpoints
from penstock.errors import LogBusyError
from penstock.log import open_log
from penstock.log.api import Commit, CommitOptions
from penstock.log.declaring.objects import GrowStream
from penstock.log.reading.read import read_events
from penstock.log.writing.transaction import Transaction
from penstock.testing.faults import Fault
from penstock.testing.workload import WorkItem, create_streams
from tests.fault.runner import Runner


def kill_after_words(process: subprocess.Popen[str], runner: Runner, words: int) -> None:
    """SIGKILL once the workload has said so many lines."""
    assert process.stdout is not None
    for _ in range(words):
        line = process.stdout.readline()
        if not line:
            break
        runner.lines.append(line)
    process.kill()
    runner.finish(process)


@pytest.mark.row("H19", engine="embedded")
def test_killed_at_random_moments(runner: Runner) -> None:
    rng = random.Random(runner.seed)
    for _ in range(5):
        kill_after_words(runner.start(commits=200), runner, rng.randrange(1, 40))
        if runner.said().tried:
            runner.judge()
    runner.run_here(200)
    runner.judge()


def test_two_processes_on_one_log(runner: Runner) -> None:
    both = [runner.start(commits=60, producer=name) for name in ("even", "odd")]
    assert [runner.finish(process) for process in both] == [0, 0]
    runner.judge()
    assert len(runner.said().acked) == 120


def test_many_processes_make_the_log_at_once(runner: Runner) -> None:
    names = [f"p{n}" for n in range(6)]
    processes = [runner.start(commits=2, producer=name) for name in names]
    assert [runner.finish(process) for process in processes] == [0] * len(names)
    runner.judge()
    assert len(runner.said().acked) == 2 * len(names)


def test_one_of_two_processes_is_killed(runner: Runner) -> None:
    other = runner.start(commits=80, producer="odd")
    kill_after_words(runner.start(commits=200), runner, 31)
    assert runner.finish(other) == 0
    runner.judge()
    runner.run_here(60)
    runner.judge()


def fence_a_zombie(runner: Runner, failpoint: str) -> None:
    """A producer is stopped in the middle of a commit, replaced, and resumed."""
    zombie = runner.start(commits=30, failpoint=failpoint)
    wait_until_stopped(zombie.pid)
    with open_log(runner.url, upkeep_interval_ms=0) as log:
        holder = log.hold("even")
        last = log.last_commit("even")
        assert last is not None
        progress: dict[str, bytes | None] = {"work/even": str(last.sequence + 1).encode()}
        log.commit(holder, last.sequence + 1, Commit(progress=progress))
        os.kill(zombie.pid, signal.SIGCONT)
        assert runner.finish(zombie) == 1
        assert any("FencedError" in told for told in runner.said().raised)
        now = log.last_commit("even")
        assert now is not None
        assert now.sequence == last.sequence + 1
    runner.judge()


@pytest.mark.row("H1", engine="embedded")
def test_a_zombie_is_fenced(runner: Runner) -> None:
    fence_a_zombie(runner, "commit.prepared=stop@9")


SLOW_COMMIT = """
import sys, penstock
from penstock.testing.workload import WorkItem
with penstock.open(sys.argv[1], upkeep_interval_ms=0) as log:
    with penstock.Transaction(log, "slow") as tx:
        for n in range(50):
            tx.send("plain", WorkItem("slow", 0, n, f"key-{n}"))
"""


def test_a_stream_may_grow_between_preparing_and_committing(runner: Runner) -> None:
    """What was split for the older number of partitions is split anew."""
    with open_log(runner.path, upkeep_interval_ms=0) as log:
        create_streams(log)
        slow = subprocess.Popen(
            [sys.executable, "-c", SLOW_COMMIT, str(runner.path)],
            env={**os.environ, failpoints.ENVIRONMENT: "commit.prepared=stop"},
        )
        wait_until_stopped(slow.pid)
        log.apply([GrowStream("plain", 11)])
        os.kill(slow.pid, signal.SIGCONT)
        assert slow.wait(60) == 0
        events = list(read_events(log, "plain", WorkItem))
        assert len(events) == 50
        for event in events:
            assert event.partition == zlib.crc32(event.data.key.encode()) % 11


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            if file.read().rpartition(")")[2].split()[0] == "T":
                return
        os.sched_yield()
    raise AssertionError("the workload was never stopped")


@pytest.mark.parametrize("at", [1, 2, 5, 20])
def test_killed_during_recovery(runner: Runner, at: int) -> None:
    """The WAL of a killed process is read by the next one, which is killed while it reads."""
    assert runner.run(failpoint="commit.committed=kill@30") == -signal.SIGKILL
    code = runner.run(fault=Fault("read", "kill", suffix="-wal", at=at))
    assert code == -signal.SIGKILL
    runner.run_here(20)
    runner.judge()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_random_kills(runner: Runner) -> None:
    rng = random.Random(runner.seed)
    rounds = int(os.environ.get("PENSTOCK_SOAK_ROUNDS", "40"))
    for round_ in range(rounds):
        commits = (round_ + 1) * 40
        processes = [
            runner.start(commits=commits, producer=name, fault=_random_fault(rng))
            for name in ("even", "odd")
        ]
        for process in processes:
            kill_after_words(process, runner, rng.randrange(1, 100))
        if runner.said().tried:
            runner.judge()
    for name in ("even", "odd"):
        assert runner.run(commits=rounds * 40, producer=name) == 0
    runner.judge()


def _random_fault(rng: random.Random) -> Fault | None:
    if rng.random() < 0.5:
        return None
    return Fault(
        rng.choice(["write", "sync"]),
        rng.choice(["full", "io", "kill"]),
        suffix=rng.choice(["-wal", ".db"]),
        at=rng.randrange(1, 400),
        late=rng.random() < 0.5,
    )


def test_a_writer_that_stands_still_in_its_transaction(runner: Runner) -> None:
    """Others are told who it is, and what they have is not lost: they try again, and go on."""
    with open_log(runner.path, upkeep_interval_ms=0) as log:
        holder, pin = log.hold("mine"), log.pin()
        frozen = runner.start(commits=30, failpoint="commit.begun=stop@20")
        try:
            wait_until_stopped(frozen.pid)
            said = f"process {frozen.pid}, which is stopped"
            tx = Transaction(log, holder, options=CommitOptions(timeout_ms=1_000))
            with pytest.raises(LogBusyError, match=said), tx:
                tx.save("mine", b"1")
                tx.commit()
            with pytest.raises(LogBusyError, match=said):
                tx.commit()
            log.unpin(pin)
            frozen.send_signal(signal.SIGCONT)
            assert runner.finish(frozen) == 0
            tx.commit()
        finally:
            frozen.kill()
            frozen.wait()
        assert log.progress("mine") == b"1"
    runner.judge()
