"""Programs with members of a group, killed and stopped; then the oracle over all that they said."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock import CreateStream, DeadLetter, Log, Table, declare, failpoints, read_events
from penstock.groups.group import Group
from penstock.testing.processes import wait_until
from tests.fault.test_kills import wait_until_stopped
from tests.groups.conftest import Order, on_both, send
from tests.groups.working import Seen

pytestmark = on_both("H17", "X8")

USERS = 9


class Workers:
    """Starts programs on one log, and knows everything that they said."""

    def __init__(self, log: Log, folder: Path) -> None:
        self._log = log
        self._file = folder / "said.txt"
        self._errors = folder / "errors.txt"
        self.sent: list[tuple[str, int]] = []

    def send(self, count: int) -> None:
        first = len(self.sent)
        more = [(f"u{n % USERS}", n) for n in range(first, first + count)]
        send(self._log, more)
        self.sent += more

    @contextlib.contextmanager
    def started(
        self, failpoint: str = "", rules: str = "{}", effects: bool = False
    ) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "tests.groups.working", self._log.url, str(self._file)]
        with self._errors.open("ab") as errors:
            process = subprocess.Popen(
                [*command, rules, *(["effects"] if effects else [])], stderr=errors,
                env={**os.environ, failpoints.ENVIRONMENT: failpoint},
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)

    def said(self) -> list[list[str]]:
        text = self._file.read_text() if self._file.exists() else ""
        return [line.split() for line in text.splitlines() if not line.endswith("?")]

    def count(self, word: str) -> int:
        return sum(1 for _, said, *_ in self.said() if said == word)

    def wait_for_acks(self, count: int, process: subprocess.Popen[bytes]) -> None:
        def is_there() -> bool:
            return self.count("acked") >= count or process.poll() is not None

        wait_until(is_there, 120, "acknowledgements")

    def finish(self, *, effects: bool = False) -> None:
        """Let everything be handled that is left."""
        with self.started(effects=effects) as process:
            assert process.wait(240) == 0, self._errors.read_text()[-3000:]

    def judge(self) -> None:
        """Nothing lost; nothing handed out after it was acknowledged; each key in order; counts
        never too low.
        """
        acked: set[int] = set()
        times: Counter[int] = Counter()
        latest: dict[str, int] = defaultdict(lambda: -1)
        users = {number: user for user, number in self.sent}
        for _, word, *rest in self.said():
            if word == "acked":
                assert int(rest[0]) not in acked, f"{rest[0]} was acknowledged twice"
                acked.add(int(rest[0]))
            elif word == "taken":
                number, deliveries = map(int, rest)
                assert number not in acked, f"{number} came again after it was acknowledged"
                times[number] += 1
                assert deliveries >= times[number], f"{number} was counted too low"
                assert number >= latest[users[number]], f"{number} came behind a later one"
                latest[users[number]] = number
        assert set(times) == {number for _, number in self.sent}, "some were never handed out"
        with Group(self._log, "orders", "billing", Order) as group:
            assert group.take(1.0) is None, "some are not acknowledged"

    def judge_effects(self) -> None:
        """Each message has one receipt, and its place in its user's entry."""
        found = sorted(event.data.number for event in read_events(self._log, "receipts", Order))
        assert found == [number for _, number in self.sent]
        for user in {user for user, _ in self.sent}:
            seen = Table(self._log, "seen", Seen).get(user)
            assert seen is not None
            assert seen.numbers == [number for who, number in self.sent if who == user]


@pytest.fixture
def workers(log: Log, tmp_path: Path) -> Workers:
    return Workers(log, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", ["group.save", "group.saved", "commit.progress"])
def test_killed_at_a_step(workers: Workers, step: str) -> None:
    workers.send(200)
    for at in (2, 9):
        with workers.started(f"{step}=kill@{at}") as process:
            assert process.wait(120) == -signal.SIGKILL
    workers.finish()
    workers.judge()


def kill_at_random(workers: Workers, kills: int, chance: random.Random) -> None:
    for _ in range(kills):
        workers.send(chance.randrange(50, 200))
        with workers.started() as process:
            wanted = workers.count("acked") + chance.randrange(1, 60)
            workers.wait_for_acks(wanted, process)
    workers.finish()
    workers.judge()


@pytest.mark.timeout(600)
def test_killed_at_random_moments(workers: Workers, seed: int) -> None:
    kill_at_random(workers, 4, random.Random(seed))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_many_random_moments(workers: Workers, seed: int) -> None:
    kill_at_random(workers, 60, random.Random(seed))


@pytest.mark.timeout(600)
def test_effects_happen_once(workers: Workers, log: Log, seed: int) -> None:
    """Killed at steps and at random; each message has one receipt, and its place in an entry."""
    log.apply(
        [
            CreateStream(declare("receipts", Order, key="user")),
            CreateStream(declare("seen", Seen, key="user", table=True)),
        ]
    )
    chance = random.Random(seed)
    steps = ["group.save=kill@7", "group.saved=kill@5", "commit.producer=kill@9"]
    for step in (*chance.sample(steps, 2), ""):
        workers.send(100)
        with workers.started(step, effects=True) as process:
            if step:
                assert process.wait(120) == -signal.SIGKILL
            else:
                workers.wait_for_acks(workers.count("acked") + chance.randrange(5, 50), process)
    workers.finish(effects=True)
    workers.judge()
    workers.judge_effects()


@pytest.mark.timeout(600)
def test_one_that_stood_still_has_lost_its_messages(workers: Workers) -> None:
    """Stopped past its claim, and resumed: nothing that it acknowledges counts."""
    workers.send(400)
    with workers.started("group.save=stop@9") as zombie:
        wait_until_stopped(zombie.pid)
        with workers.started() as other:
            wait_until(lambda: any(int(pid) == other.pid for pid, *_ in workers.said()), 60, "it")
            zombie.send_signal(signal.SIGCONT)
            assert zombie.wait(120) == 0
            assert other.wait(120) == 0
    said = [(word, *rest) for pid, word, *rest in workers.said() if int(pid) == zombie.pid]
    assert ("failed", "ClaimLostError") in said
    acked = Counter(rest[0] for _, word, *rest in workers.said() if word == "acked")
    assert set(acked.values()) == {1}
    assert len(acked) >= 400 - 4 * 4  # of those that it was stopped with, it may not know


@pytest.mark.timeout(600)
def test_a_message_that_kills_its_process_is_put_aside(workers: Workers, log: Log) -> None:
    """And no other with it."""
    send(log, [(f"u{n}", n) for n in range(30)])
    send(log, [("poison", -1)])
    send(log, [(f"v{n}", 100 + n) for n in range(300)])
    rules = msgspec.json.encode({"deliveries_max": 4}).decode()
    for _ in range(20):
        with workers.started(rules=rules) as process:
            if process.wait(120) == 0:
                break
    letters = [event.data for event in read_events(log, "orders_dead", DeadLetter)]
    assert [(letter.key, letter.tries) for letter in letters] == [("poison", 4)]
    acked = sorted(int(rest[0]) for _, word, *rest in workers.said() if word == "acked")
    assert len(acked) >= 300
    with Group(log, "orders", "billing", Order) as group:
        assert group.take(1.0) is None
