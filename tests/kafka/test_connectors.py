"""Connectors with a log on Kafka: sources, sinks and the outbox, under the same kills."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from penstock import CreateStream, Log, declare
from penstock import open as open_log
from penstock.app.declaring.plan import plan
from penstock.app.running.streams import make_streams
from penstock.connect.hosts.sink_host import SinkHost
from penstock.connect.sinks.file import FileSink
from tests.connect.hosting import SinkProcess
from tests.connect.pushing import app
from tests.connect.test_outbox import Payment, kill_the_relay
from tests.connect.test_push import kill_the_driver, wake_a_zombie
from tests.connect.test_sinks import lines
from tests.connect.test_sources import feed_under_kills
from tests.spark.test_pushing import numbers_of, write


@pytest.fixture
def log(url: str) -> Iterator[Log]:
    with open_log(url) as opened:
        yield opened


@pytest.mark.row("W5", engine="any")
def test_a_listener_and_what_feeds_it_are_killed(log: Log, chance: random.Random) -> None:
    log.apply([CreateStream(declare("raw", content="bytes", partitions=3))])
    feed_under_kills(log, 100_000, chance)


@pytest.mark.row("W14", engine="any")
@pytest.mark.parametrize("step", ["push.voted", "push.decided", "push.told"])
def test_what_feeds_a_sink_is_killed(
    log: Log, sink: SinkProcess, tmp_path: Path, step: str
) -> None:
    make_streams(log, plan(app).only(["numbers_sink"]))
    kill_the_driver(tmp_path, log, sink, f"{step}=kill@2")


@pytest.mark.row("W14", engine="any")
def test_a_zombie_is_fenced(log: Log, sink: SinkProcess, tmp_path: Path) -> None:
    make_streams(log, plan(app).only(["numbers_sink"]))
    wake_a_zombie(tmp_path, log, sink)


@pytest.mark.row("H15", engine="kafka")
@pytest.mark.parametrize("step", ["outbox.read", "outbox.published", "outbox.deleted"])
def test_the_relay_is_killed(log: Log, tmp_path: Path, step: str) -> None:
    log.apply([CreateStream(declare("payments", Payment, ids="producer"))])
    kill_the_relay(f"sqlite:///{tmp_path / 'shop.db'}", log, step)


@pytest.mark.row("W14", engine="any")
def test_frames_into_a_sink(spark: SparkSession, log: Log, tmp_path: Path) -> None:
    folder = tmp_path / "sink"
    with SinkHost(lambda worker: FileSink(folder, worker), folder) as host:
        write(numbers_of(spark, 100).repartition(4), log, host, workers=2)
        write(numbers_of(spark, 10), log, host, workers=2)
    shares = [[msgspec.json.decode(x)["n"] for x in lines(folder, f"numbers-{n}")] for n in (0, 1)]
    assert all(shares)
    assert Counter(shares[0] + shares[1]) == Counter(range(100)) + Counter(range(10))
