"""Apps and the data source on Spark, beside Spark on its own with Parquet."""

from __future__ import annotations

import datetime as dt
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

import penstock
from bench.embedded import Order, typed_rows
from bench.result import Result, in_turns, seconds
from penstock import Entry
from penstock.app.declaring.definitions import Agent
from penstock.app.declaring.plan import plan
from penstock.app.running.batches import BatchReport
from penstock.app.running.building import claim_groups
from penstock.app.running.kinds import kind_of
from penstock.app.running.positions import AppRun
from penstock.app.running.query import Query, QueryLimits
from penstock.app.running.streams import make_streams
from penstock.log.api import Log
from penstock.log.writing.compose import Composer
from penstock.spark.backend import SparkBackend
from penstock.spark.executor import SparkExecutor
from penstock.spark.session import open_session
from penstock.spark.streaming import StatefulQuery
from penstock.spark.worker import worker_log

MICRO_BATCH = 1_000_000
DATA = ["user", "item", "amount", "at"]


def session() -> SparkSession:
    settings = {
        "spark.driver.memory": "4g",
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
        "spark.sql.shuffle.partitions": "2",
    }
    return open_session("local[2]", "bench", settings)


def rows_of(count: int, keys: int) -> Iterator[pa.RecordBatch]:
    """Orders in pieces, each later than the one before; keys spread over all of them."""
    for number, at in enumerate(range(0, count, 65_536)):
        rows = min(65_536, count - at)
        batch = typed_rows(rows, seed=number % 8)
        times = pa.array(
            range(
                1_700_000_000_000_000 + at * 1000, 1_700_000_000_000_000 + (at + rows) * 1000, 1000
            ),
            pa.timestamp("us", tz="UTC"),
        )
        batch = batch.set_column(3, "at", times)
        if keys != 1000:
            names = [f"user-{(row * 7919) % keys}" for row in range(at, at + rows)]
            batch = batch.set_column(0, "user", pa.array(names))
        yield batch


class Data:
    """The same rows in a log and in Parquet, a file for each micro-batch."""

    def __init__(self, folder: Path, count: int, keys: int = 1000) -> None:
        self.count = count
        self.url = str(folder / "data.db")
        self.parquet = str(folder / "parquet")
        self.log = penstock.open(self.url, upkeep_interval_ms=0)
        spec = penstock.declare("orders", Order, key="user", time="at", partitions=2)
        self.log.apply([penstock.CreateStream(spec)])
        Path(self.parquet).mkdir()
        waiting: list[pa.RecordBatch] = []
        with penstock.Producer(self.log) as producer:
            for batch in rows_of(count, keys):
                producer.append("orders", batch)
                waiting.append(batch)
                if sum(b.num_rows for b in waiting) >= MICRO_BATCH:
                    self._write(waiting)
                    waiting = []
        if waiting:
            self._write(waiting)

    def _write(self, batches: list[pa.RecordBatch]) -> None:
        number = len(list(Path(self.parquet).iterdir()))
        table = pa.Table.from_batches(batches)
        pq.write_table(table, f"{self.parquet}/{number:04}.parquet", compression="snappy")


def source(folder: Path, quick: bool) -> list[Result]:
    """Log to Spark, and log to Spark to log."""
    spark = session()
    data = Data(folder, 500_000 if quick else 10_000_000)
    rounds = 2 if quick else 5
    reader = spark.read.format("penstock").option("log", data.url)
    ours = reader.option("columns", ",".join(DATA)).load("orders")
    whole = reader.option("columns", ",".join([*DATA, "_key", "_time", "_id", "_offset"]))
    theirs = spark.read.parquet(data.parquet)

    def noop(frame: DataFrame) -> Callable[[], float]:
        return lambda: seconds(lambda: frame.write.format("noop").mode("overwrite").save())

    for frame in (ours, theirs):
        noop(frame)()
    mine, limit = in_turns(noop(ours), noop(theirs), rounds)
    with_envelope = noop(whole.load("orders"))()
    results = [
        Result(
            what=f"log → Spark, {data.count:,} rows, no-op sink",
            measured=rate(data.count, mine),
            beside=f"{rate(data.count, limit)}: Parquet",
            ratio=limit / mine,
            at_least=0.4,
        ),
        Result(
            what="the same with key, time, id and offset",
            measured=rate(data.count, with_envelope),
            beside=f"{rate(data.count, limit)}: Parquet, data alone",
            ratio=limit / with_envelope,
        ),
    ]
    spec = penstock.declare("copies", Order, key="user", time="at", partitions=2)
    data.log.apply([penstock.CreateStream(spec)])
    url = data.url

    def encode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        log = worker_log(url, {})
        composer = Composer("bench", log.limits)
        rows = 0
        for batch in batches:
            rows += log.prepare(composer.arrow_part(log.stream("copies"), batch)).batch.num_rows
        yield pa.record_batch({"rows": pa.array([rows], pa.int64())})

    def copy() -> float:
        writer = ours.write.format("penstock").option("log", url).option("stream", "copies")
        return seconds(lambda: writer.mode("append").save())

    def nowhere() -> float:
        return seconds(lambda: ours.mapInArrow(encode, "rows long").collect())

    copy(), nowhere()
    mine, limit = in_turns(copy, nowhere, 1 if quick else 3)
    results.append(
        Result(
            what=f"log → Spark → log, {data.count:,} rows, one commit",
            measured=rate(data.count, mine),
            beside=f"{rate(data.count, limit)}: the same Arrow writer, storing nothing",
            ratio=limit / mine,
            at_least=0.8,
        )
    )
    data.log.close()
    return results


def rate(rows: int, took_s: float) -> str:
    found = rows / took_s
    return f"{found / 1e6:.2f} M rows/s" if found >= 1e6 else f"{found:,.0f} rows/s"


def steady(progress: list[Any]) -> list[float]:
    """The rates of micro-batches, those at the start of a query left out."""
    full = [p for p in progress if p.numInputRows > 0]
    return settled([p.numInputRows / p.durationMs["triggerExecution"] * 1000 for p in full])


def settled(rates: list[float]) -> list[float]:
    return rates[2:] or rates


def tables(folder: Path, quick: bool) -> list[Result]:
    """Keyed running sum and 10-second tumbling count into tables."""
    spark = session()
    data = Data(folder, 3_000_000 if quick else 10_000_000)

    window = F.window("at", "10 seconds").alias("window")
    cases = {
        "running sum per key": (sum_app, sums),
        "10-second tumbling count": (count_app, lambda frame: counts(frame, window)),
    }
    results: list[Result] = []
    for name, (make, native) in cases.items():
        mine: list[float] = []
        limit: list[float] = []
        # In turns; the first turn warms the JVM up for both.
        for turn in range(2 if quick else 3):
            ours, theirs = folder / f"ours-{len(results)}-{turn}", folder / f"{len(results)}-{turn}"
            mine_now = run_app(spark, data.log, make(), "out", ours, MICRO_BATCH)
            frame = native(followed_parquet(spark, data.parquet, "10 seconds"))
            limit_now = run_nowhere(frame, "update", theirs)
            if turn:
                mine, limit = mine + mine_now, limit + limit_now
            data.log.apply([penstock.DropStream("out")])
        found, beside = statistics.median(mine), statistics.median(limit)
        results.append(
            Result(
                what=f"{name} into a table, micro-batches of {MICRO_BATCH:,}, exactly-once",
                measured=f"{found / 1e6:.2f} M rows/s",
                beside=f"{beside / 1e6:.2f} M rows/s: Parquet, writing nowhere",
                ratio=found / beside,
                at_least=0.7,
            )
        )
    data.log.close()
    return results


def sums(orders: DataFrame) -> DataFrame:
    return orders.groupBy("user").agg(F.sum("amount").alias("total"))


def counts(orders: DataFrame, window: Column) -> DataFrame:
    return orders.groupBy("item", window).count()


def sum_app() -> penstock.App:
    app, orders = order_app()
    app.derive_table(orders, key="user", name="out")(sums)
    return app


def count_app() -> penstock.App:
    app, orders = order_app()
    window = penstock.tumbling("10 seconds")
    app.derive_table(orders, key=["item", "window"], window=window, name="out")(counts)
    return app


def order_app() -> tuple[penstock.App, penstock.AppStream[Order]]:
    app = penstock.App("bench")
    orders = app.stream(
        "orders", Order, key="user", time="at", watermark="10 seconds", partitions=2
    )
    return app, orders


def followed_parquet(spark: SparkSession, folder: str, watermark: str) -> DataFrame:
    """The files of a folder as a stream, one in each micro-batch."""
    schema = spark.read.parquet(folder).schema
    frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(folder)
    return frame.withWatermark("at", watermark)


def run_nowhere(frame: DataFrame, mode: str, checkpoint: Path) -> list[float]:
    """The rates of a query of Spark alone, written nowhere."""
    query = (
        frame.writeStream.format("noop").outputMode(mode)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    return steady(list(query.recentProgress))


def run_app(
    spark: SparkSession, log: Log, app: penstock.App, name: str, checkpoints: Path, rows: int
) -> list[float]:
    """The rates of an app's batches: one definition over all there is, from the start."""
    backend = SparkBackend(spark, checkpoints, limits=QueryLimits(batch_rows_max=rows))
    make_streams(log, plan(app))
    query = backend.frames(log, AppRun(f"bench{time.time_ns()}", "bench"), app.definitions[name])
    if isinstance(query, Query):
        query.start()
        return settled([step.rows_in / step.took_s for step in all_steps(query)])
    assert isinstance(query, StatefulQuery)
    stop = threading.Event()
    thread = threading.Thread(target=query.run, args=(stop, lambda step: None))
    thread.start()
    while not query.is_idle():
        time.sleep(0.05)
    assert query._query is not None
    progress = list(query._query.recentProgress)
    stop.set()
    thread.join()
    return steady(progress)


def agents(folder: Path, quick: bool) -> list[Result]:
    """Agents in plain Python with a table: events per second, and the cost of a batch."""
    spark = session()
    results = []
    for keys, wanted in ((1000, 100_000), (1_000_000, 60_000)):
        count = 300_000 if quick else 2_000_000
        part = folder / str(keys)
        part.mkdir()
        data = Data(part, count, keys)
        query = totals_query(spark, data.log)
        steps = all_steps(query)
        rows = sum(step.rows_in for step in steps[1:]) or steps[0].rows_in
        took = sum(step.took_s for step in steps[1:]) or steps[0].took_s
        found = rows / took
        results.append(
            Result(
                what=f"an agent with a table, {keys:,} keys",
                measured=f"{found:,.0f} events/s",
                beside=f"{wanted:,} events/s wanted",
                ratio=found / wanted,
                at_least=1.0,
            )
        )
        if keys == 1_000_000:
            results.append(small_batches(data.log, query))
        query.close()
        data.log.close()
    return results


def totals_query(spark: SparkSession, log: Log) -> Query:
    app = penstock.App("bench")
    orders = app.stream("orders", Order, key="user", time="at", partitions=2)
    totals = app.table("totals", value=float, default=0.0)

    @app.agent(orders, state=totals)
    def add_up(order: Order, total: Entry[float]) -> None:
        total.value += order.amount

    agent = app.definitions["add_up"]
    assert isinstance(agent, Agent)
    make_streams(log, plan(app))
    run = AppRun(app.name, "bench")
    claim_groups(log, run, [agent])
    executor = SparkExecutor(spark, log.url, {}, [kind_of(agent).make_work(app.name, agent)])
    query = Query(log, run, [agent], executor, limits=QueryLimits(batch_rows_max=400_000))
    query.start()
    return query


def all_steps(query: Query) -> list[BatchReport]:
    found = []
    while (step := query.step()) is not None:
        found.append(step)
    return found


def small_batches(log: Log, query: Query) -> Result:
    """A batch of 1,000 events beside one of a single event, both against a million keys."""
    now = dt.datetime.now(dt.UTC)

    def batch(rows: int, seed: int) -> float:
        with penstock.Producer(log) as producer:
            for n in range(rows):
                producer.send(
                    "orders", Order(f"user-{(seed + n * 7919) % 1_000_000}", "x", 1.0, now)
                )
        (step,) = all_steps(query)
        return step.took_s

    for n in range(5):
        batch(1, n)
    one = statistics.median(batch(1, n) for n in range(15))
    thousand = statistics.median(batch(1000, n) for n in range(15))
    return Result(
        what="a batch of 1,000 events against 1,000,000 resident keys",
        measured=f"{thousand * 1000:.0f} ms",
        beside=f"{one * 1000:.0f} ms: a batch of one event",
        ratio=thousand / one,
        at_most=2.0,
    )


def agent_latency(spark: SparkSession, log: Log, count: int) -> tuple[float, float]:
    """Milliseconds from `send` until the table shows it, one at a time: median and p95."""
    table: penstock.Table[Any] = penstock.Table(log, "totals")
    query = totals_query(spark, log)
    return query_latency(log, query, count, lambda key: table.get(key) is not None)


def query_latency(
    log: Log, query: Query, count: int, is_there: Callable[[str], bool]
) -> tuple[float, float]:
    """The same of any query that reads orders."""
    stop = threading.Event()
    thread = threading.Thread(target=query.run, args=(stop, lambda step: None))
    thread.start()
    times = []
    options = penstock.ProducerOptions(batch_delay_ms=0)
    with penstock.Producer(log, options) as producer:
        for n in range(count):
            time.sleep(0.05)
            now = dt.datetime.now(dt.UTC)
            began = time.perf_counter()
            producer.send("orders", Order(f"u{n}", "x", 1.0, now))
            while not is_there(f"u{n}"):
                time.sleep(0.001)
            times.append((time.perf_counter() - began) * 1000)
    stop.set()
    thread.join()
    query.close()
    warm = sorted(times[10:])
    return statistics.median(warm), warm[-max(1, len(warm) // 20)]


def latency(folder: Path, quick: bool) -> list[Result]:
    with penstock.open(folder / "latency.db") as log:
        median, p95 = agent_latency(session(), log, 20 if quick else 120)
    return [
        Result(
            what="event sent → table readable, through an agent, median",
            measured=f"{median:.0f} ms (p95 {p95:.0f} ms)",
            beside="300 ms wanted",
            ratio=median / 300,
            at_most=1.0,
        )
    ]


BENCHMARKS = {"source": source, "tables": tables, "agents": agents, "latency": latency}
