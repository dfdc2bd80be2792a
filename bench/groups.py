"""Groups: ten members, order by key, every message acknowledged singly and durably."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

import penstock
from bench.peer import Nats, run_job
from bench.result import Result
from penstock import Log
from penstock.testing.brokers import Brokers
from penstock.testing.servers import PostgresServer

MEMBERS = 10
KEYS = 10_000
TAKEN = 64
OPEN_MAX = 512
"""How many acknowledgements of a member may be under way."""
WANTED = {"embedded": 30_000, "kafka": 10_000}


class Job(penstock.Record):
    """A message."""

    user: str
    amount: float


class Member(threading.Thread):
    """Takes messages and acknowledges each one, until there are no more."""

    def __init__(self, group: penstock.Group[Job]) -> None:
        super().__init__()
        self._group = group

    def run(self) -> None:
        waiting: deque[Future[None]] = deque()
        while True:
            messages = self._group.take_many(TAKEN, 1.0)
            for message in messages:
                waiting.append(message.ack())
            while len(waiting) > OPEN_MAX:
                waiting.popleft().result()
            if not messages and self._group.lag().events == 0:
                break
        for done in waiting:
            done.result()


class Rates(NamedTuple):
    """Messages acknowledged per second: of all, and of the first and the second half."""

    whole: float
    first: float
    second: float


def measure(log: Log, count: int) -> Rates:
    log.apply([penstock.CreateStream(penstock.declare("jobs", Job, key="user", partitions=4))])
    with penstock.Producer(log) as producer:
        for first in range(0, count, 50_000):
            rows = range(first, min(first + 50_000, count))
            users = pa.array([f"u{n % KEYS}" for n in rows])
            amounts = pa.array([float(n) for n in rows])
            producer.append("jobs", pa.record_batch({"user": users, "amount": amounts}))
    with penstock.Group(log, "jobs", "bench", Job) as group:
        while not group.is_coordinating:
            time.sleep(0.01)
        began = time.monotonic()
        members = [Member(group) for _ in range(MEMBERS)]
        for member in members:
            member.start()
        while group.lag().events > count / 2:
            time.sleep(0.02)
        half = count - group.lag().events
        half_s = time.monotonic() - began
        while group.lag().events:
            time.sleep(0.02)
        took_s = time.monotonic() - began
        for member in members:
            member.join()
    return Rates(count / took_s, half / half_s, (count - half) / (took_s - half_s))


def acknowledge(log: Log, engine: str, count: int) -> list[Result]:
    rates = measure(log, count)
    return [
        Result(
            what=f"{engine}: {count:,} messages acknowledged singly, 10 members, order by key",
            measured=f"{rates.whole:,.0f} messages/s",
            beside=f"{WANTED[engine]:,} messages/s wanted",
            ratio=rates.whole / WANTED[engine],
            at_least=1.0,
        ),
        Result(
            what=f"{engine}: the second half of them beside the first",
            measured=f"{rates.second:,.0f} messages/s",
            beside=f"{rates.first:,.0f} messages/s",
            ratio=rates.second / rates.first,
            at_least=0.8,
        ),
    ]


def embedded(folder: Path, quick: bool) -> list[Result]:
    with penstock.open(str(folder / "log.db"), upkeep_interval_ms=0) as log:
        return acknowledge(log, "embedded", 20_000 if quick else 500_000)


def on_kafka(folder: Path, quick: bool) -> list[Result]:
    with Brokers(1, folder / "kafka") as brokers:
        with penstock.open(brokers.url, cache=str(folder / "cache")) as log:
            return acknowledge(log, "kafka", 5_000 if quick else 200_000)


def beside_peers(folder: Path, quick: bool) -> list[Result]:
    """Single acknowledgements beside those of a job queue and of a message broker."""
    count = 2_000 if quick else 20_000
    with penstock.open(str(folder / "log.db"), upkeep_interval_ms=0) as log:
        mine = measure(log, count * 5).whole
    results = []
    with PostgresServer(folder / "postgres") as server:
        took_s = run_job("procrastinate", server.url, str(count), str(KEYS))
        what = "procrastinate on PostgreSQL, one of a lock at a time"
        results.append(compare(mine, count / took_s, what))
    with Nats(folder / "nats") as nats:
        took_s = run_job("nats", nats.url, str(count))
        what = "NATS JetStream, sync_interval: always, without order by key"
        results.append(compare(mine, count / took_s, what))
    return results


def compare(mine: float, theirs: float, what: str) -> Result:
    return Result(
        what=f"embedded: single acknowledgements, 10 members, beside {what.split(maxsplit=1)[0]}",
        measured=f"{mine:,.0f} messages/s",
        beside=f"{theirs:,.0f} messages/s: {what}",
        ratio=mine / theirs,
        at_least=1.0,
    )


def many_groups(folder: Path, quick: bool) -> list[Result]:
    """How many groups one process coordinates on one broker."""
    count = 10 if quick else 200
    with Brokers(1, folder / "kafka") as brokers:
        with penstock.open(brokers.url, cache=str(folder / "cache")) as log:
            log.apply([penstock.CreateStream(penstock.declare("jobs", Job, key="user"))])
            began = time.monotonic()
            with contextlib.ExitStack() as stack:
                groups = [penstock.Group(log, "jobs", f"g{n}", Job) for n in range(count)]
                for group in groups:
                    stack.enter_context(group)
                while not all(group.is_coordinating for group in groups):
                    time.sleep(0.05)
                opened_s = time.monotonic() - began
                with penstock.Producer(log) as producer:
                    producer.send("jobs", Job("u", 1.0)).result()
                began = time.monotonic()
                for group in groups:
                    message = group.take(60)
                    assert message is not None
                    message.ack().result()
                took_s = time.monotonic() - began
                threads, used_s = threading.active_count(), time.process_time()
                time.sleep(10)
                idle = (time.process_time() - used_s) / 10
    return [
        Result(
            what=f"kafka: {count} groups in one process, idle: share of one core",
            measured=f"{idle:.1%}, {threads} threads; open in {opened_s:.0f} s, and each "
            f"delivered a message in {took_s:.1f} s",
            beside="",
        )
    ]


BENCHMARKS: dict[str, Callable[[Path, bool], list[Result]]] = {
    "groups": embedded,
    "groups-kafka": on_kafka,
    "groups-peers": beside_peers,
    "groups-many": many_groups,
}
