"""Whole queries: NEXMark beside Parquet, the sum and the count beside peers, and an idle app."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

import penstock
from bench.nexmark import QUERIES, RECORDS, WATERMARK_US, Generator, fill, nexmark_app
from bench.peer import run_job
from bench.result import Result
from bench.spark import (
    Data,
    count_app,
    followed_parquet,
    rate,
    rows_of,
    run_app,
    run_nowhere,
    session,
    sum_app,
)
from penstock.app.declaring.plan import plan
from penstock.app.running.streams import make_streams
from penstock.testing.processes import RunnerProcess


def nexmark(folder: Path, quick: bool) -> list[Result]:
    """Seven queries: events of the log into a stream, beside Parquet into nothing."""
    spark = session()
    generator = Generator(500_000 if quick else 10_000_000, 200 if quick else 10)
    watermark = f"{WATERMARK_US} microseconds"
    results = []
    with penstock.open(folder / "nexmark.db", upkeep_interval_ms=0) as log:
        for name in ("q8", "q7"):  # between them they have all streams
            make_streams(log, plan(nexmark_app(name)[0]))
        fill(log, generator, list(RECORDS))
        for name, query in QUERIES.items():
            batch_rows = 1_000_000 if query.inputs == ("bids",) else 50_000
            parquet = parquet_of(folder / f"parquet{batch_rows}", generator, batch_rows)
            mine: list[float] = []
            limit: list[float] = []
            for turn in range(2):  # the first warms up
                app, stream = nexmark_app(name)
                place = folder / f"{name}-{turn}"
                rows = batch_rows * len(query.inputs)
                mine = run_app(spark, log, app, name, place / "ours", rows)
                frames = {
                    stream: followed_parquet(spark, str(parquet / stream), watermark)
                    for stream in query.inputs
                }
                limit = run_nowhere(query.function(frames), "append", place / "theirs")
                log.apply([penstock.DropStream(stream.name)])
            found, beside = statistics.median(mine), statistics.median(limit)
            results.append(
                Result(
                    what=f"NEXMark {name}, {generator.count:,} events, into a stream, exactly-once",
                    measured=rate(1, 1 / found),
                    beside=f"{rate(1, 1 / beside)}: Parquet, writing nowhere",
                    ratio=found / beside,
                )
            )
    return results


def parquet_of(folder: Path, generator: Generator, rows: int) -> Path:
    """The events as Parquet files of so many rows: a file is a micro-batch."""
    if folder.exists():
        return folder
    for stream in RECORDS:
        (folder / stream).mkdir(parents=True)
        for number, batch in enumerate(generator.batches(stream, rows)):
            pq.write_table(pa.Table.from_batches([batch]), folder / stream / f"{number:05}.parquet")
    return folder


def peers(folder: Path, quick: bool) -> list[Result]:
    """The running sum and the tumbling count beside Bytewax and Pathway, each in its own venv."""
    spark = session()
    data = Data(folder, 3_000_000 if quick else 10_000_000)
    count = 200_000 if quick else 2_000_000
    files = write_files(folder, count)
    results = []
    for what, make in (("sum", sum_app), ("count", count_app)):
        mine: list[float] = []
        for turn in range(2):  # the first warms up
            mine = run_app(spark, data.log, make(), "out", folder / f"{what}-{turn}", 1_000_000)
            data.log.apply([penstock.DropStream("out")])
        found = statistics.median(mine)
        for peer in ("bytewax", "pathway"):
            took = run_job(peer, what, str(files[peer]), str(folder / f"{peer}-{what}"))
            title = "running sum per key" if what == "sum" else "10-second tumbling count"
            results.append(
                Result(
                    what=f"{title}, beside {peer.title()}",
                    measured=f"{rate(1, 1 / found)}: into a table, exactly-once",
                    beside=f"{rate(count, took)}: {peer.title()}, its state kept, writing nowhere",
                    ratio=found * took / count,
                    at_least=1.0,
                )
            )
    data.log.close()
    return results


def write_files(folder: Path, count: int) -> Mapping[str, Path]:
    """The rows in the format that each peer reads by itself, in four files."""
    places = {"bytewax": folder / "peer-parquet", "pathway": folder / "peer-csv"}
    for place in places.values():
        place.mkdir()
    table = pa.Table.from_batches(rows_of(count, 1000))
    for number in range(4):
        part = table.slice(count // 4 * number, count // 4)
        pq.write_table(part, places["bytewax"] / f"{number}.parquet")
        times = part.column("at").cast(pa.int64())
        part = part.set_column(part.schema.get_field_index("at"), "at", times)
        pyarrow.csv.write_csv(part, places["pathway"] / f"{number}.csv")
    return places


def idle(folder: Path, quick: bool) -> list[Result]:
    """What an app of twenty definitions costs while nothing happens."""
    app = Path(__file__).with_name("idle_app.py")
    output = folder / "idle.txt"
    with RunnerProcess(app, folder / "idle.db", output=output, quick=False) as runner:
        time.sleep(20 if quick else 60)  # until everything has started and settled
        length_s = 5 if quick else 30
        before = runner.cpu_s()
        time.sleep(length_s)
        taken = sum(after - before.get(pid, 0.0) for pid, after in runner.cpu_s().items())
        used = taken / length_s
        assert runner.is_running(), output.read_text()
    return [
        Result(
            what="20 idle definitions, 5 of them with state: share of one core",
            measured=f"{used:.1%}",
            beside="15 % wanted",
            ratio=used / 0.15,
            at_most=1.0,
        )
    ]


BENCHMARKS = {"nexmark": nexmark, "peers": peers, "idle": idle}
