"""The embedded log beside raw SQLite and raw pyarrow."""

from __future__ import annotations

import datetime as dt
import itertools
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import apsw
import pyarrow as pa

import penstock
from bench.result import Result, in_turns, seconds
from penstock.log.api import Commit, Log
from penstock.log.batch import decode_blob
from penstock.log.sqlite.connection import PAGE_BYTES
from penstock.log.writing.compose import Composer, EventOptions

ROWS = 65_536


class Order(penstock.Record):
    user: str
    item: str
    amount: float
    at: dt.datetime


def typed_rows(rows: int = ROWS, seed: int = 1) -> pa.RecordBatch:
    """Orders of 1,000 users for 100 items."""
    rng = random.Random(seed)
    start = 1_700_000_000_000_000
    return pa.record_batch(
        {
            "user": pa.array([f"user-{rng.randrange(1000)}" for _ in range(rows)]),
            "item": pa.array([f"item-{rng.randrange(100)}" for _ in range(rows)]),
            "amount": pa.array([round(rng.random() * 1000, 2) for _ in range(rows)]),
            "at": pa.array(range(start, start + rows * 1000, 1000), pa.timestamp("us", tz="UTC")),
        }
    )


def new_log(path: Path, upkeep: bool = True, **settings: object) -> Log:
    log = penstock.open(path, upkeep_interval_ms=2000 if upkeep else 0)
    spec = penstock.declare("orders", Order, key="user", time="at", content=None, **settings)
    log.apply([penstock.CreateStream(spec)])
    return log


def stored_blobs(path: Path) -> list[bytes]:
    connection = apsw.Connection(str(path))
    query = "SELECT data FROM blobs JOIN batches ON blob_id = id WHERE rows > 1000 ORDER BY id"
    blobs = [row[0] for row in connection.execute(query)]
    connection.close()
    return blobs


def raw_insert(path: Path, blobs: list[bytes]) -> float:
    """The limit: the same compressed blobs, one durable transaction each, into plain SQLite."""
    connection = apsw.Connection(str(path))
    for pragma in (f"page_size={PAGE_BYTES}", "journal_mode=wal", "synchronous=full"):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    connection.execute("CREATE TABLE blobs (id INTEGER PRIMARY KEY, data BLOB)")

    def insert() -> None:
        for blob in blobs:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO blobs (data) VALUES (?)", (blob,))
            connection.execute("COMMIT")

    taken = seconds(insert)
    connection.close()
    return taken


def append(folder: Path, quick: bool) -> list[Result]:
    """Durable append of typed rows, 65,536 at a time; each append is a commit of its own."""
    batches, rounds = (20, 2) if quick else (150, 5)
    data = [typed_rows(seed=n) for n in range(8)]
    numbers = itertools.count()
    results = []
    for compression in ("lz4", "zstd"):
        options = penstock.ProducerOptions(compression=compression, batch_rows_max=1)
        path = folder / f"blobs-{compression}.db"
        with new_log(path) as log, penstock.Producer(log, options) as producer:
            for batch in data:
                producer.append("orders", batch)
        blobs = list(itertools.islice(itertools.cycle(stored_blobs(path)), batches))

        def ours(options: penstock.ProducerOptions = options) -> float:
            with (
                new_log(folder / f"{next(numbers)}.db") as log,
                penstock.Producer(log, options) as producer,
            ):

                def send() -> None:
                    for batch in itertools.islice(itertools.cycle(data), batches):
                        producer.append("orders", batch)
                    producer.flush()

                return seconds(send)

        def theirs(blobs: list[bytes] = blobs) -> float:
            return raw_insert(folder / f"{next(numbers)}.db", blobs)

        mine, limit = in_turns(ours, theirs, rounds)
        rows = batches * ROWS
        results.append(
            Result(
                what=f"durable append of typed rows, {ROWS:,} per commit ({compression})",
                measured=f"{rows / mine / 1e6:.1f} M rows/s",
                beside=f"{rows / limit / 1e6:.1f} M rows/s: the same blobs, compressed before, "
                "into SQLite",
                ratio=limit / mine,
                at_least=0.7 if compression == "lz4" else None,
            )
        )
    return results


def read(folder: Path, quick: bool) -> list[Result]:
    """Reading typed rows back as Arrow."""
    batches, rounds = (20, 2) if quick else (150, 7)
    path = folder / "log.db"
    data = [typed_rows(seed=n) for n in range(8)]
    with new_log(path) as log:
        with penstock.Producer(log) as producer:
            for batch in itertools.islice(itertools.cycle(data), batches):
                producer.append("orders", batch)
        blobs = stored_blobs(path)

        def decode() -> int:
            return sum(decode_blob(blob).num_rows for blob in blobs)

        def plain() -> int:
            return sum(batch.data().num_rows for batch in penstock.read_batches(log, "orders"))

        def whole() -> int:
            return sum(batch.to_arrow().num_rows for batch in penstock.read_batches(log, "orders"))

        results = []
        for what, work, wanted in (
            ("reading the record's columns as Arrow", plain, 0.6),
            ("reading all columns, envelope included, as Arrow", whole, None),
        ):
            mine, limit = in_turns(lambda w=work: seconds(w), lambda: seconds(decode), rounds)  # type: ignore[misc]
            rows = batches * ROWS
            results.append(
                Result(
                    what=what,
                    measured=f"{rows / mine / 1e6:.1f} M rows/s",
                    beside=f"{rows / limit / 1e6:.1f} M rows/s: pyarrow on the same blobs",
                    ratio=limit / mine,
                    at_least=wanted,
                )
            )
    return results


def threads(folder: Path, quick: bool) -> list[Result]:
    """64 threads that each wait for their event, and one producer committing singly."""
    each, alone = (10, 200) if quick else (150, 3000)
    order = Order("user-1", "item-1", 1.0, dt.datetime.now(dt.UTC))
    singles, shared, commits = [], [], []
    for round_ in range(1 if quick else 3):
        with new_log(folder / f"{round_}.db") as log:
            singles.append(alone / seconds(lambda log=log: one_by_one(log, order, alone)))  # type: ignore[misc]
            with penstock.Producer(log) as producer:

                def send(producer: penstock.Producer = producer) -> None:
                    for _ in range(each):
                        producer.send("orders", order).result()

                shared.append(64 * each / seconds(lambda send=send: in_threads(send)))  # type: ignore[misc]

            def commit(log: Log = log) -> None:
                one_by_one(log, order, each)

            commits.append(64 * each / seconds(lambda commit=commit: in_threads(commit)))  # type: ignore[misc]
    single = statistics.median(singles)
    results = []
    for what, found, wanted in (
        ("64 threads sending single events through one producer", shared, 5.0),
        ("64 threads committing single events, each a producer of its own", commits, None),
    ):
        rate = statistics.median(found)
        results.append(
            Result(
                what=what,
                measured=f"{rate:,.0f} events/s",
                beside=f"{single:,.0f} events/s: one producer committing singly",
                ratio=rate / single,
                at_least=wanted,
            )
        )
    return results


def one_by_one(log: Log, order: Order, count: int) -> None:
    holder = log.hold(f"bench-{threading.get_ident()}")
    stream = log.stream("orders")
    composer = Composer("bench", log.limits)
    last = log.last_commit(holder.producer)
    first = last.sequence + 1 if last else 0
    for sequence in range(first, first + count):
        part = composer.part(stream, [composer.admit(stream, order, EventOptions())])
        log.commit(holder, sequence, Commit(parts=[part]))


def in_threads(work: Callable[[], None], count: int = 64) -> None:
    workers = [threading.Thread(target=work) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def memory(folder: Path, quick: bool) -> list[Result]:
    """Resident memory of a process that writes, and one that reads, 10 GB of Arrow data."""
    size = 10**9 if quick else 10**10
    results = []
    for mode, verb in (("write", "writing"), ("read", "reading")):
        done = subprocess.run(
            [sys.executable, "-m", "bench.memory", mode, str(folder / "big.db"), str(size)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        tenth, most = map(float, done.stdout.split())
        results.append(
            Result(
                what=f"resident memory, {verb} {size / 1e9:.0f} GB",
                measured=f"{most:.0f} MB at most",
                beside=f"{tenth:.0f} MB after the first tenth; the limit is 500 MB",
                ratio=most / 500,
                at_most=1.0,
            )
        )
    return results


def growth(folder: Path, quick: bool) -> list[Result]:
    """The cost of an append and of a read, in a small log and in one of 100 times its size."""
    base = 20 if quick else 200
    order = Order("user-1", "item-1", 1.0, dt.datetime.now(dt.UTC))
    costs: dict[str, list[float]] = {"append": [], "read": []}
    with new_log(folder / "log.db", upkeep=False) as log:
        stored = 0
        for target in (base, base * 100):
            fill(log, target - stored)
            stored = target
            log.maintain()
            costs["read"].append(median_of(21, lambda: read_spots(log, 100)) / 100)
            costs["append"].append(median_of(21, lambda: one_by_one(log, order, 100)) / 100)
    return [
        Result(
            what=f"cost of one {what}, 100 times the stored data",
            measured=f"{large * 1e6:.0f} µs",
            beside=f"{small * 1e6:.0f} µs with {base} batches stored",
            ratio=large / small,
            at_most=1.5,
        )
        for what, (small, large) in costs.items()
    ]


def fill(log: Log, batches: int) -> None:
    """Batches too large to be merged, so that their number stays."""
    data = typed_rows(5_000)
    options = penstock.ProducerOptions(batch_rows_max=1)
    with penstock.Producer(log, options) as producer:
        for _ in range(batches):
            producer.append("orders", data)


def read_spots(log: Log, count: int) -> None:
    """Single events from random places."""
    rng = random.Random(5)
    end = log.offsets("orders")[0].next
    for _ in range(count):
        start = rng.randrange(end)
        next(log.read("orders", 0, start, start + 1))


def median_of(times: int, work: Callable[[], None]) -> float:
    work()
    return statistics.median(seconds(work) for _ in range(times))


BENCHMARKS: dict[str, Callable[[Path, bool], list[Result]]] = {
    "append": append,
    "read": read,
    "threads": threads,
    "memory": memory,
    "growth": growth,
}
