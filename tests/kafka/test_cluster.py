"""Three brokers, replication 3: killed, stopped and frozen under load. The same oracle."""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.cli.main import main
from penstock.errors import (
    CommitOutcomeUnknownError,
    LogUnreachableError,
    PenstockError,
)
from penstock.log.api import Commit, CommitOptions, Holder
from penstock.log.kafka.log import KafkaLog
from penstock.testing.brokers import Brokers
from penstock.testing.contract import Order, make_part, orders
from penstock.testing.processes import wait_until
from tests.fault.runner import Runner
from tests.fault.test_kills import wait_until_stopped
from tests.groups.conftest import Order as GroupOrder
from tests.groups.test_kills import Workers
from tests.groups.working import Seen

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with Brokers(3, tmp_path_factory.mktemp("cluster")) as brokers:
        yield brokers


@pytest.fixture
def url(cluster: Brokers) -> str:
    return f"{cluster.url}/t{secrets.token_hex(4)}"


@pytest.fixture
def log(cluster: Brokers, url: str, tmp_path: Path) -> Iterator[KafkaLog]:
    cluster.wait_ready()
    with open_log(url, cache=str(tmp_path / "cache"), upkeep_interval_ms=0) as opened:
        assert isinstance(opened, KafkaLog)
        wait_until(lambda: len(opened.health().brokers) == 3, 60, "three brokers")
        yield opened


class Load(threading.Thread):
    """Commits numbered events, again and again under the same name until it is told the outcome."""

    def __init__(self, log: Log) -> None:
        super().__init__(daemon=True)
        self._log = log
        self._stop_asked = threading.Event()
        self.acked: list[int] = []
        self.errors: list[PenstockError] = []

    def run(self) -> None:
        holder = self._log.hold("load")
        number = 0
        while not self._stop_asked.is_set():
            self._commit(holder, number)
            self.acked.append(number)
            number += 1

    def _commit(self, holder: Holder, number: int) -> None:
        part = make_part(self._log, "orders", [number])
        for _ in range(20):
            try:
                self._log.commit(holder, number, Commit(parts=[part]))
                return
            except PenstockError as error:
                self.errors.append(error)
                if not error.retriable:
                    raise
        raise AssertionError("the cluster never came back")

    def reaches(self, count: int) -> None:
        wait_until(lambda: len(self.acked) >= count or not self.is_alive(), 120, f"{count} commits")
        assert self.is_alive(), self.errors

    def stop(self) -> None:
        self._stop_asked.set()
        self.join(120)
        assert not self.is_alive()


def leader(log: KafkaLog, stream: str = "orders") -> int:
    """Who leads the stream's first partition, when somebody does."""
    found: list[int] = []

    def known() -> bool:
        told = [p.leader for p in log.health().partitions if p.stream == stream]
        found[:] = [n for n in told[:1] if n is not None]
        return bool(found)

    wait_until(known, 60, "a leader")
    return found[0]


def in_sync(log: KafkaLog) -> bool:
    return not any(p.is_behind or p.leader is None for p in log.health().partitions)


def judge(log: Log, load: Load) -> None:
    """Everything acknowledged is there, in order, and nothing twice."""
    amounts = [event.data.amount for event in orders(log, "orders")]
    assert amounts == sorted(amounts)
    assert max(Counter(amounts).values()) == 1
    assert set(load.acked) <= set(amounts)
    assert amounts == list(range(len(amounts)))


def under_load(log: KafkaLog, harm: Callable[[], None]) -> Load:
    log.apply([CreateStream(declare("orders", Order, key="user"))])
    load = Load(log)
    load.start()
    load.reaches(5)
    harm()
    load.reaches(len(load.acked) + 10)
    load.stop()
    return load


@pytest.mark.row("H1", engine="kafka")
def test_the_leader_is_killed_and_another_takes_over(
    log: KafkaLog, cluster: Brokers, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []

    def harm() -> None:
        killed.append(leader(log))
        cluster.kill(killed[0])

    load = under_load(log, harm)
    assert leader(log) != killed[0]
    judge(log, load)
    assert main(["--log", log.url, "cluster", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert len(told["brokers"]) == 2
    assert all(killed[0] not in part["in_sync"] for part in told["partitions"])
    cluster.restart(killed[0])
    cluster.wait_ready()
    wait_until(lambda: in_sync(log), 60, "catching up")
    assert main(["--log", log.url, "cluster"]) == 0
    assert f"rack-{killed[0]}" in capsys.readouterr().out
    judge(log, load)


def test_a_broker_is_frozen_past_its_session_and_thaws(log: KafkaLog, cluster: Brokers) -> None:
    frozen: list[int] = []

    def harm() -> None:
        frozen.append(leader(log))
        cluster.pause(frozen[0])

    try:
        load = under_load(log, harm)
    finally:
        cluster.resume(frozen[0])
    wait_until(lambda: in_sync(log), 60, "catching up")
    judge(log, load)


@pytest.mark.row("H10", engine="kafka")
def test_two_of_three_are_down(log: KafkaLog, cluster: Brokers) -> None:
    """Nothing is acknowledged without a majority; the same commit goes on when it is back."""
    log.apply([CreateStream(declare("orders", Order, key="user"))])
    holder = log.hold("p")
    log.commit(holder, 0, Commit(parts=[make_part(log, "orders", [0])]))
    part = make_part(log, "orders", [1])
    hasty = CommitOptions(timeout_ms=3000)
    for number in (0, 1):
        cluster.kill(number)
    try:
        with pytest.raises((LogUnreachableError, CommitOutcomeUnknownError)):
            log.commit(holder, 1, Commit(parts=[part]), hasty)
    finally:
        for number in (0, 1):
            cluster.restart(number)
        cluster.wait_ready()
    patient = CommitOptions(timeout_ms=90_000)
    assert log.commit(holder, 1, Commit(parts=[part]), patient).sequence == 1
    assert [event.data.amount for event in orders(log, "orders")] == [0, 1]
    wait_until(lambda: in_sync(log), 60, "catching up")


@pytest.mark.row("H10", engine="kafka")
def test_one_replica_down_blocks_acks_all(log: KafkaLog, cluster: Brokers) -> None:
    log.apply([
        CreateStream(declare("most", Order, key="user")),
        CreateStream(declare("every", Order, key="user", acks="all")),
    ])  # fmt: skip
    most, every = log.hold("most"), log.hold("every")
    parts = {name: make_part(log, name, [1]) for name in ("most", "every")}
    cluster.kill(0)
    try:
        wait_until(lambda: not in_sync(log), 60, "the broker being missed")
        patient = CommitOptions(timeout_ms=60_000)
        log.commit(most, 0, Commit(parts=[parts["most"]]), patient)
        with pytest.raises((LogUnreachableError, CommitOutcomeUnknownError)):
            log.commit(every, 0, Commit(parts=[parts["every"]]), CommitOptions(timeout_ms=4000))
    finally:
        cluster.restart(0)
        cluster.wait_ready()
    wait_until(lambda: in_sync(log), 60, "catching up")
    log.commit(every, 0, Commit(parts=[parts["every"]]), CommitOptions(timeout_ms=60_000))
    for name in ("most", "every"):
        assert [event.data.amount for event in orders(log, name)] == [1]


@pytest.mark.parametrize("step", ["commit.blobs", "commit.producer"])
def test_the_leader_is_killed_during_a_commit(
    runner: Runner, log: KafkaLog, cluster: Brokers, step: str
) -> None:
    """The writer is stopped in the middle of its transaction while the leader dies."""
    writer = runner.start(commits=10, failpoint=f"{step}=stop@4")
    wait_until_stopped(writer.pid)
    victim = leader(log, "plain")
    cluster.kill(victim)
    os.kill(writer.pid, signal.SIGCONT)
    assert runner.finish(writer) == 0
    cluster.restart(victim)
    cluster.wait_ready()
    wait_until(lambda: in_sync(log), 60, "catching up")
    runner.judge()
    assert runner.said().acked == {("even", n) for n in range(10)}


@pytest.mark.row("H5", engine="kafka")
def test_replication_and_acks_reach_the_topics(log: KafkaLog) -> None:
    log.apply([
        CreateStream(declare("three", Order)),
        CreateStream(declare("one", Order, replication=1)),
    ])  # fmt: skip
    held = {p.stream: p for p in log.health().partitions}
    assert len(held["three"].replicas) == 3
    assert len(set(held["three"].racks)) == 3
    assert len(held["one"].replicas) == 1
    with pytest.raises(PenstockError, match="eplication"):
        log.apply([CreateStream(declare("nine", Order, replication=9))])
    assert "nine" not in [str(stream.name) for stream in log.streams()]
    assert list(read_events(log, "three")) == []


@pytest.mark.row("H17", "X8", engine="kafka")
def test_a_group_outlives_a_broker_and_its_coordinator(
    log: KafkaLog, cluster: Brokers, tmp_path: Path
) -> None:
    """The leader is killed while members work, and then whoever coordinates them."""
    log.apply(
        [
            CreateStream(declare("orders", GroupOrder, key="user", partitions=2)),
            CreateStream(declare("receipts", GroupOrder, key="user")),
            CreateStream(declare("seen", Seen, key="user", table=True)),
        ]
    )
    workers = Workers(log, tmp_path)
    workers.send(80)
    with workers.started(effects=True) as process:
        workers.wait_for_acks(workers.count("acked") + 15, process)
        killed = leader(log)
        cluster.kill(killed)
        workers.wait_for_acks(workers.count("acked") + 15, process)
    cluster.restart(killed)
    cluster.wait_ready()
    wait_until(lambda: in_sync(log), 60, "catching up")
    workers.finish(effects=True)
    workers.judge()
    workers.judge_effects()
