"""`format("penstock.sink")`: DataFrames of any PySpark program into a sink, each row once."""

from __future__ import annotations

import datetime as dt
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock import CreateStream, DropStream, Log, Producer, Record, declare
from penstock import open as open_log
from penstock.connect.hosts.sink_host import SinkHost
from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.protocol.marks import Mark
from penstock.connect.sinks.file import FileSink
from penstock.failpoints import ENVIRONMENT, REACHED
from penstock.spark.connector_sink import parse
from penstock.testing.processes import VICTIMS, SparkProcess, wait_until
from tests.connect.hosting import SinkProcess
from tests.connect.test_sinks import address_of, committed_lines

PROGRAM = [sys.executable, "-m", "tests.connect.pushing_frames"]


class Number(Record):
    key: str
    n: int


class Found(Number):
    id: str


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("numbers", Number, key="key", partitions=3))])
        yield opened


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SinkHost]:
    folder = tmp_path / "sink"
    with SinkHost(lambda worker: FileSink(folder, worker), folder, tell=print) as made:
        yield made


def send(log: Log, numbers: range) -> None:
    with Producer(log) as producer:
        for n in numbers:
            producer.send("numbers", Number(f"k{n % 7}", n))


def numbers_of(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).selectExpr("concat('k', id % 7) AS key", "id AS n")


def write(frame: DataFrame, log: Log, host: SinkHost, **options: object) -> None:
    writer = frame.write.format("penstock.sink").mode("append").option("log", log.url)
    given = {"producer": "numbers", "key": "key", "timeout": "5 seconds", **options}
    for name, value in given.items():
        writer = writer.option(name, str(value))
    writer.save(address_of(host))


def received(folder: Path, producer: str, workers: int) -> list[list[Found]]:
    decoder = msgspec.json.Decoder(Found)
    return [
        [decoder.decode(line) for line in committed_lines(folder, f"{producer}-{n}")]
        for n in range(workers)
    ]


def check(folder: Path, count: int) -> None:
    """Every row once, those of a key with one worker; no id twice."""
    shares = received(folder, "frames", 2)
    rows = [row for share in shares for row in share]
    assert Counter(row.n for row in rows) == Counter(range(count))
    assert len({row.id for row in rows}) == count
    homes = [{row.key for row in share} for share in shares]
    assert not homes[0] & homes[1], "a key has one worker"
    assert all(homes), "both workers have some"


@pytest.mark.row("W14", engine="any")
def test_a_batch_goes_to_its_workers(
    spark: SparkSession, log: Log, host: SinkHost, tmp_path: Path
) -> None:
    write(numbers_of(spark, 100).repartition(4), log, host, workers=3)
    write(numbers_of(spark, 10), log, host, workers=3)
    folder = tmp_path / "sink"
    shares = [
        [msgspec.json.decode(x) for x in committed_lines(folder, f"numbers-{n}")] for n in range(3)
    ]
    found = Counter(row["n"] for share in shares for row in share)
    assert found == Counter(range(100)) + Counter(range(10))
    homes = [{row["key"] for row in share} for share in shares]
    assert sum(map(len, homes)) == 7


def test_columns_become_documents(spark: SparkSession, log: Log, tmp_path: Path) -> None:
    """Key and time travel beside the document; a column `data` alone is the document."""
    seen: list[SinkMessage] = []

    class Keeping(FileSink):
        def apply(self, messages: Iterable[SinkMessage], after: Mark, mark: Mark) -> None:
            kept = list(messages)
            seen.extend(kept)
            super().apply(kept, after, mark)

    time = dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC)
    frame = spark.createDataFrame(
        [('é"', 1.5, time, None)], "a string, b double, at timestamp, x int"
    )
    with SinkHost(lambda worker: Keeping(tmp_path, worker), tmp_path) as host:
        write(frame.withColumn("_time", frame["at"]), log, host, key="a")
        raw = spark.createDataFrame([(b"k", b"\x00raw")], "_key binary, data binary")
        write(raw, log, host, producer="raw", key="_key")
    first, second = seen
    assert msgspec.json.decode(first.data) == {
        "a": 'é"', "b": 1.5, "at": "2026-05-01T12:00:00.000000Z", "x": None
    }  # fmt: skip
    assert (first.key, first.time_ns) == ('é"'.encode(), int(time.timestamp() * 1e9))
    assert (second.key, second.data) == (b"k", b"\x00raw")


def test_a_batch_that_is_voted_against_never_comes(
    spark: SparkSession, log: Log, tmp_path: Path
) -> None:
    class Full(FileSink):
        is_full = True

        def check(self, messages: Sequence[SinkMessage]) -> None:
            if Full.is_full:
                raise OSError("no space left")

    with SinkHost(lambda worker: Full(tmp_path, worker), tmp_path) as host:
        with pytest.raises(Exception, match="votes against batch"):
            write(numbers_of(spark, 10), log, host)
        Full.is_full = False
        write(numbers_of(spark, 3), log, host)
    assert len(committed_lines(tmp_path, "numbers-0")) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"producer": ""}, "needs the option producer"),
        ({"workers": 0}, "workers is 0; it must be between 1 and 256"),
        ({"adress": "x"}, "has no option 'adress'"),
        ({"key": "user"}, "the key column 'user' does not exist; the columns are key, n"),
        ({"producer": "a b"}, "'a b_sink'"),
        ({"timeout": "soon"}, "'soon' is not a duration"),
    ],
)
def test_mistakes_are_told(
    spark: SparkSession, log: Log, host: SinkHost, options: dict[str, object], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        write(numbers_of(spark, 1), log, host, **options)
    assert [str(s.name) for s in log.streams() if s.name.namespace == "default"] == ["numbers"]


def test_the_number_of_workers_is_fixed(spark: SparkSession, log: Log, host: SinkHost) -> None:
    write(numbers_of(spark, 1), log, host, workers=2)
    with pytest.raises(Exception, match="the number of workers cannot change"):
        write(numbers_of(spark, 1), log, host, workers=3)


def test_a_stream_that_was_made_anew_is_noticed(
    spark: SparkSession, log: Log, host: SinkHost
) -> None:
    write(numbers_of(spark, 5), log, host)
    log.apply([DropStream("numbers_sink")])
    with pytest.raises(Exception, match="has been recreated since producer"):
        write(numbers_of(spark, 5), log, host)


def test_rows_that_were_decided_are_not_to_be_written_again(
    spark: SparkSession, log: Log, tmp_path: Path
) -> None:
    class Stuck(FileSink):
        is_stuck = True

        def apply(self, messages: Iterable[SinkMessage], after: Mark, mark: Mark) -> None:
            if Stuck.is_stuck:
                raise OSError("away")
            super().apply(messages, after, mark)

    with SinkHost(lambda worker: Stuck(tmp_path, worker), tmp_path) as host:
        with pytest.raises(Exception, match="do not write them again"):
            write(numbers_of(spark, 3), log, host, timeout="1 second")
        Stuck.is_stuck = False
        write(numbers_of(spark, 0), log, host)
    assert len(committed_lines(tmp_path, "numbers-0")) == 3


def test_options_have_defaults() -> None:
    made = parse({"path": "127.0.0.1:1", "producer": "p", "log.event_bytes_max": "5"})
    assert (made.address, made.stream, made.workers) == ("127.0.0.1:1", "p_sink", 1)
    assert made.log_options == (("event_bytes_max", "5"),)


class Program:
    """The program, again and again, each time with another number of tasks."""

    def __init__(self, log: Log, sink: SinkProcess, folder: Path) -> None:
        self._given = [log.url, sink.address, str(folder / "checkpoint")]
        self.output = folder / "output.txt"
        self.reached = folder / "reached"

    def started(self, tasks: int, failpoint: str = "") -> SparkProcess:
        self.reached.unlink(missing_ok=True)
        environment = {"PYSPARK_PYTHON": sys.executable}
        if failpoint:
            environment |= {ENVIRONMENT: failpoint, REACHED: str(self.reached)}
        command = [*PROGRAM, *self._given, str(tasks)]
        return SparkProcess(command, environment=environment, output=self.output)

    def told(self) -> str:
        return self.output.read_text()[-3000:]


def test_a_sink_that_is_away_is_waited_for(
    spark: SparkSession, log: Log, sink: SinkProcess
) -> None:
    sink.start()
    sink.stop()
    back = threading.Timer(2.0, sink.start)
    back.start()
    try:
        rows = numbers_of(spark, 30).write.format("penstock.sink").mode("append")
        given = {"log": log.url, "producer": "late", "key": "key", "timeout": "60 seconds"}
        rows.options(**given).save(sink.address)
    finally:
        back.join(60)
    assert len(committed_lines(sink.folder, "late-0")) == 30


STEPS = ((3, "push.voted"), (1, "push.decided"), (2, "push.told"))


@pytest.mark.row("W14", engine="any")
@pytest.mark.timeout(900)
def test_killed(log: Log, sink: SinkProcess, tmp_path: Path, chance: random.Random) -> None:
    """At a step of the decision or at a random moment, another each time; `make soak` has all."""
    step = chance.choice([None, *STEPS])
    if step is None:
        push_under_kills(log, sink, tmp_path, 1, chance)
    else:
        kill_at(log, sink, tmp_path, [step])


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_killed_at_every_step_of_the_decision(log: Log, sink: SinkProcess, tmp_path: Path) -> None:
    kill_at(log, sink, tmp_path, STEPS)


def kill_at(log: Log, sink: SinkProcess, folder: Path, steps: Sequence[tuple[int, str]]) -> None:
    send(log, range(1500))
    sink.start()
    program = Program(log, sink, folder)
    for tasks, step in steps:
        with program.started(tasks, f"{step}=kill") as run:
            assert run.wait(240) not in (0, None), program.told()
            assert program.reached.exists(), program.told()
    with program.started(1) as run:
        assert run.wait(240) == 0, program.told()
    check(sink.folder, 1500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_kills(
    log: Log, sink: SinkProcess, tmp_path: Path, chance: random.Random
) -> None:
    push_under_kills(log, sink, tmp_path, 25, chance)


def push_under_kills(
    log: Log, sink: SinkProcess, folder: Path, kills: int, chance: random.Random
) -> None:
    """The program, its JVM, one of its workers, or the sink."""
    sink.start()
    program = Program(log, sink, folder)
    sent, done = 0, 0

    def count() -> int:
        return sum(map(len, (committed_lines(sink.folder, f"frames-{n}") for n in range(2))))

    while done < kills:
        more = chance.randrange(2000, 4000)
        send(log, range(sent, sent + more))
        sent += more
        with program.started(chance.choice([1, 2, 3])) as run:
            while done < kills and run.is_running():
                before = count()
                wait_until(lambda: count() > before or not run.is_running(), 240, "rows")  # noqa: B023
                run.wait(chance.random())
                victim = chance.choice([*VICTIMS, "sink"])
                if victim == "sink":
                    sink.stop()
                    sink.start()
                elif not run.is_running() or not run.kill(victim, chance):  # type: ignore[arg-type]
                    continue
                done += 1
                print(f"kill {done}: {victim}, {count()} of {sent} rows there")
                run.wait(10)
    with program.started(2) as run:
        assert run.wait(240) == 0, program.told()
    check(sink.folder, sent)
