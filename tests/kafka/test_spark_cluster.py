"""A Spark cluster with Kafka as the log: the same app file, shipped to workers that get killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Log
from penstock.app.declaring.plan import plan
from penstock.app.running.streams import make_streams
from penstock.testing.processes import RunnerProcess, wait_until
from penstock.testing.sparks import SparkCluster
from tests.fault.payments import APP, Load, common, finish, judge, moved
from tests.fault.pipeline import app


@pytest.fixture
def spark_cluster(tmp_path: Path) -> Iterator[SparkCluster]:
    with SparkCluster(2, tmp_path / "cluster") as cluster:
        yield cluster


@pytest.mark.row("X1", engine="any")
@pytest.mark.timeout(600)
def test_a_worker_is_killed_under_load(
    kafka: Log, spark_cluster: SparkCluster, tmp_path: Path
) -> None:
    """The app's module is not installed anywhere: workers have it only from the runner."""
    make_streams(kafka, plan(app))
    options = [f"cache={tmp_path / 'tables'}"]
    where = ["--master", spark_cluster.url, "--setting", "spark.driver.host=127.0.0.1"]
    output = tmp_path / "output.txt"
    given = [*where, *common(tmp_path, options)]
    with (
        Load(kafka, 1) as load,
        RunnerProcess(APP, kafka.url, arguments=given, output=output, quick=False) as runner,
    ):
        wait_until(moved(kafka, runner), 180, "a batch")
        assert runner.is_running(), output.read_text()[-3000:]
        spark_cluster.kill_worker(0)
        wait_until(moved(kafka, runner), 180, "a batch without the worker")
        spark_cluster.start_worker(0)
        wait_until(moved(kafka, runner), 180, "a batch with another worker")
        assert runner.is_running(), output.read_text()[-3000:]
    finish(kafka, tmp_path, options, where)
    judge(kafka, load.sent)
