"""The proof of exactly-once: an app under load, killed again and again, and an oracle."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Log, Producer, ReadOptions, Table, read_batches
from penstock import open as open_log
from penstock.app.plan import plan
from penstock.app.runner import make_streams
from penstock.failpoints import NAMES
from penstock.log.collections import Action, replay
from penstock.testing.processes import VICTIMS, RunnerProcess, wait_until
from tests.fault.pipeline import Payment, app

APP = Path(__file__).with_name("pipeline.py")
USERS = 12
#: every step from staging in a task to the commit that makes a batch visible
STEPS = [
    n for n in NAMES if n.split(".")[0] in ("stage", "commit", "publish") and n != "commit.ids"
]


class Load(threading.Thread):
    """Sends numbered payments until it is stopped; knows what it sent."""

    def __init__(self, log: Log, seed: int) -> None:
        super().__init__(daemon=True)
        self._log = log
        self._chance = random.Random(seed)
        self.sent: list[Payment] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        with Producer(self._log) as producer:
            while not self.stopped.wait(0.05):
                for _ in range(self._chance.randrange(1, 40)):
                    user = f"u{self._chance.randrange(USERS)}"
                    payment = Payment(len(self.sent), user, self._chance.randrange(1, 1000))
                    producer.send("payments", payment)
                    self.sent.append(payment)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        make_streams(opened, plan(app))
        yield opened


def seed_of(request: pytest.FixtureRequest) -> int:
    seed = int(os.environ.get("PENSTOCK_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"{request.node.name}: PENSTOCK_SEED={seed}")
    return seed


def all_data(log: Log, stream: str) -> list[Any]:
    return [e.data for batch in read_batches(log, stream, ReadOptions()) for e in batch.events()]


def position(log: Log) -> bytes:
    """Changes whenever some query has committed a batch."""
    return b"".join(log.progress_items("app/").values())


def entries(log: Log, table: str) -> dict[str, Any]:
    held: Table[Any] = Table(log, table)
    return {key.decode(): value for key, value in held.items()}


def judge(log: Log, sent: list[Payment]) -> None:
    """Each input counted once everywhere; tables equal to a recomputation from the streams."""
    wanted = {p.number: p for p in sent if p.amount % 10 != 0}
    assert sorted(p.number for p in all_data(log, "payments")) == [p.number for p in sent]

    checked = all_data(log, "checked")
    assert Counter(c.number for c in checked) == Counter(wanted.keys())
    assert len({c.mark for c in checked}) == len(checked)

    receipts = all_data(log, "receipts")
    assert Counter(r.number for r in receipts) == Counter(wanted.keys())
    running: Counter[str] = Counter()
    by_user: dict[str, list[Any]] = {}
    for receipt in receipts:
        by_user.setdefault(receipt.user, []).append(receipt)
    for user, mine in by_user.items():
        for receipt in mine:
            running[user] += wanted[receipt.number].amount
            assert receipt.total == running[user], "a total that its receipts do not give"

    totals = {user: value.value for user, value in entries(log, "totals").items()}
    assert totals == dict(running)
    numbers = entries(log, "numbers")
    expected: dict[str, set[int]] = {}
    for payment in wanted.values():
        expected.setdefault(payment.user, set()).add(payment.number)
    assert numbers == expected

    counted = {user: (v.receipts, v.total) for user, v in entries(log, "counted").items()}
    assert counted == {user: (len(mine), running[user]) for user, mine in by_user.items()}

    replayed: dict[str, Any] = {}
    for batch in read_batches(log, "numbers", ReadOptions()):
        for event in batch.events():
            change: Any = event.data
            key = (event.key or b"").decode()
            action = Action(change.action, change.value, change.values)
            replayed[key] = replay("set", replayed.get(key), action)
    assert replayed == numbers, "the changelog does not replay to the table"

    changes = all_data(log, "counted")
    assert {c.user: (c.receipts, c.total) for c in changes} == counted
    last = all_data(log, "last")
    assert [(c.user, c.receipts, c.total) for c in changes] == [
        (c.user, c.receipts, c.total) for c in last
    ]


def arguments(chance: random.Random) -> list[str]:
    """Another number of tasks, and of events in a batch, each time."""
    tasks, rows = chance.choice([1, 2, 3]), chance.choice([50, 500, 100_000])
    return ["--master", f"local[{tasks}]", "--batch-rows", str(rows)]


def finish(log: Log, path: Path, output: Path) -> None:
    with RunnerProcess(APP, path, arguments=["--until-idle"], output=output) as last:
        assert last.wait(300) == 0, output.read_text()[-3000:]


def _moved(log: Log, runner: RunnerProcess) -> Callable[[], bool]:
    """Whether a batch was committed since now, or the runner is gone."""
    before = position(log)
    return lambda: position(log) != before or not runner.is_running()


def random_kills(log: Log, folder: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    load = Load(log, seed)
    load.start()
    path, output = folder / "log.db", folder / "output.txt"
    kills = 0
    while kills < rounds:
        with RunnerProcess(APP, path, arguments=arguments(chance), output=output) as runner:
            wait_until(_moved(log, runner), 180, "a batch")
            while kills < rounds and runner.is_running():
                runner.wait(chance.random() * 2)
                victim = chance.choice(VICTIMS)
                if runner.kill(victim, chance):
                    kills += 1
                    print(f"kill {kills}: {victim}")
                if victim != "worker":
                    assert runner.wait(60) is not None, "it must not outlive Spark"
                    break
    load.stopped.set()
    load.join(60)
    finish(log, path, output)
    judge(log, load.sent)


@pytest.mark.row("F1", engine="embedded")
@pytest.mark.row("F12", engine="embedded")
@pytest.mark.timeout(900)
def test_random_kills(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    random_kills(log, tmp_path, 5, seed_of(request))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_kills(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rounds = int(os.environ.get("PENSTOCK_SOAK_ROUNDS") or 25)
    random_kills(log, tmp_path, max(25, rounds), seed_of(request))


@pytest.mark.row("F1", engine="embedded")
@pytest.mark.timeout(1200)
def test_a_kill_at_every_step(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A process dies at each failpoint in turn, in a task or in the runner."""
    chance = random.Random(seed_of(request))
    load = Load(log, 1)
    load.start()
    path, output = tmp_path / "log.db", tmp_path / "output.txt"
    died = 0
    for step in STEPS:
        # A runner commits a good deal before its first batch; most kills must hit a batch.
        at = chance.randrange(15, 50) if step.startswith("commit.") else chance.randrange(1, 6)
        with RunnerProcess(
            APP, path, arguments=arguments(chance), output=output,
            environment={"PENSTOCK_FAILPOINTS": f"{step}=kill@{at}"},
        ) as runner:  # fmt: skip
            # Workers die and are replaced until the query is given up; the runner dies at once.
            died += runner.wait(20) is not None
        print(f"{step} at {at}: {died} runners have died")
    assert died >= len(STEPS) // 3, "the kills do not hit the runner's commits"
    load.stopped.set()
    load.join(60)
    finish(log, path, output)
    judge(log, load.sent)
