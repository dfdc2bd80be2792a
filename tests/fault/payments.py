"""The proof of exactly-once: an app under load that is killed again and again, and an oracle.

The same on every engine; a log is named by its URL, and `nuisance` kills what is the engine's.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from penstock import Log, Producer, ReadOptions, Table, read_batches
from penstock.failpoints import ENVIRONMENT, NAMES, REACHED
from penstock.log.reading.collections import Action, replay
from penstock.testing.processes import VICTIMS, RunnerProcess, wait_until
from tests.fault.pipeline import Payment

APP = Path(__file__).with_name("pipeline.py")
USERS = 12
#: every step from staging in a task to the commit that makes a batch visible
ALL_STEPS = [
    n for n in NAMES if n.split(".")[0] in ("stage", "commit", "publish") and n != "commit.ids"
]


class Load(threading.Thread):
    """Sends numbered payments until it is stopped; knows what it sent."""

    def __init__(self, log: Log, seed: int) -> None:
        super().__init__(daemon=True)
        self._log = log
        self._chance = random.Random(seed)
        self.sent: list[Payment] = []
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Send no more; everything sent has arrived then."""
        self._stopped.set()
        self.join(120)
        assert not self.is_alive()

    def run(self) -> None:
        with Producer(self._log) as producer:
            while not self._stopped.wait(0.05):
                for _ in range(self._chance.randrange(1, 40)):
                    user = f"u{self._chance.randrange(USERS)}"
                    payment = Payment(len(self.sent), user, self._chance.randrange(1, 1000))
                    producer.send("payments", payment)
                    self.sent.append(payment)


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


def finish(log: Log, folder: Path, options: Sequence[str], more: Sequence[str] = ()) -> None:
    """Let the app handle all that is left."""
    output = folder / "output.txt"
    given = ["--until-idle", *common(folder, options), *more]
    with RunnerProcess(APP, log.url, arguments=given, output=output) as last:
        assert last.wait(900) == 0, last.explain()  # on a busy machine there is much left


def common(folder: Path, options: Sequence[str]) -> list[str]:
    """What every run of the app is told: where Spark's state is, and options of the log."""
    found = ["--checkpoints", str(folder / "spark")]
    for option in options:
        found += ["--setting", option]
    return found


def moved(log: Log, runner: RunnerProcess) -> Callable[[], bool]:
    """Whether a batch was committed since now, or the runner is gone."""
    before = position(log)
    return lambda: position(log) != before or not runner.is_running()


class Kills:
    """An app under load that is killed in several ways, one after the other, on one log.

    Leaving the block lets it finish, and judges all of its output.
    """

    def __init__(self, log: Log, folder: Path, seed: int, options: Sequence[str] = ()) -> None:
        self._log = log
        self._folder = folder
        self._options = options
        self._chance = random.Random(seed)
        self._load = Load(log, seed)

    def __enter__(self) -> Self:
        self._load.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._load.__exit__()
        if kind is None:
            finish(self._log, self._folder, self._options)
            judge(self._log, self._load.sent)

    def _runner(self, **environment: str) -> RunnerProcess:
        given = [*arguments(self._chance), *common(self._folder, self._options)]
        output = self._folder / "output.txt"
        return RunnerProcess(
            APP, self._log.url, arguments=given, output=output, environment=environment
        )

    def at_random(self, rounds: int, nuisance: Callable[[], None] | None = None) -> None:
        """Kill the runner, Spark's JVM, or a worker; or have a nuisance, where there is one."""
        chance, kills = self._chance, 0
        while kills < rounds:
            with self._runner() as runner:
                wait_until(moved(self._log, runner), 180, "a batch")
                while kills < rounds and runner.is_running():
                    runner.wait(chance.random() * 2)
                    if nuisance is not None and chance.random() < 0.5:
                        nuisance()
                        kills += 1
                        print(f"kill {kills}: a nuisance")
                        continue
                    victim = chance.choice(VICTIMS)
                    if runner.kill(victim, chance):
                        kills += 1
                        print(f"kill {kills}: {victim}")
                    if victim != "worker":
                        assert runner.wait(60) is not None, f"outlives Spark: {runner.explain()}"
                        break

    def at_steps(self, steps: Sequence[str], commits: range) -> None:
        """A process dies at each failpoint in turn, in a task or in the runner.

        At which of its commits is drawn from `commits`: a runner makes some before its first
        batch, and most kills must hit a batch.
        """
        chance = self._chance
        for step in steps:
            at = chance.choice(commits) if step.startswith("commit.") else chance.randrange(1, 6)
            print(f"{step} at {at}")
            reached = self._folder / step
            failing = {ENVIRONMENT: f"{step}=kill@{at}", REACHED: str(reached)}
            with self._runner(**failing) as runner:
                wait_until(reached.exists, 120, step)
                # A runner is dead now; a worker is replaced, and does its work again.
                runner.wait(chance.random() * 3)
