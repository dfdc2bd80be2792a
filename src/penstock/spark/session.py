"""The Spark session that apps run in: quiet, local unless told otherwise."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from py4j.java_gateway import JavaGateway
from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from penstock.errors import LogError
from penstock.spark.failures import reason
from penstock.spark.source import PenstockSource

STANDALONE = "spark://"
MASTER_S_MAX = 10.0
_LOG4J = Path(__file__).with_name("log4j2.properties")
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.mode": "FAIR",
    "spark.speculation": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # A socket of the file system has no delayed acknowledgements: 40 ms less for each task.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.pollingDelay": "20ms",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.numRecentProgressUpdates": "5",
    "spark.sql.streaming.stopTimeout": "20s",
}

_LOCAL_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Elsewhere, Penstock may be there only once a task begins.
    "spark.python.daemon.module": "penstock.spark.daemon",
}


def open_session(
    master: str = "local[*]",
    name: str = "penstock",
    settings: Mapping[str, str] | None = None,
    noise: Path | None = None,
) -> SparkSession:
    """A session with what Penstock needs; `settings` are Spark's own and go before ours.

    What Spark and its workers print goes to the file `noise`, or nowhere. Where the process
    has a session already, that one is given.
    """
    context = SparkContext._active_spark_context
    running = SparkSession(context) if context else _start(master, name, settings or {}, noise)
    running.dataSource.register(PenstockSource)
    return running


def is_local(master: str) -> bool:
    """Whether Spark runs in one process of this machine."""
    return master.startswith("local")


def has_session() -> bool:
    """Whether this process has Spark running already."""
    return SparkContext._active_spark_context is not None


def close_session(spark: SparkSession) -> None:
    """Stop a session, and Spark's process with it. If that has died, there is nothing to stop."""
    gateway = SparkContext._gateway
    with contextlib.suppress(Exception):
        spark.stop()
    if gateway is not None:
        _close_gateway(gateway)


def _close_gateway(gateway: JavaGateway) -> None:
    with contextlib.suppress(Exception):
        gateway.shutdown()
    with contextlib.suppress(Exception):
        gateway.proc.stdin.close()
        gateway.proc.wait(20)
    SparkContext._gateway = None
    SparkContext._jvm = None


def _check_answers(master: str) -> None:
    """Spark itself would wait for a minute, and then not say why."""
    found = [part.rpartition(":") for part in master.removeprefix(STANDALONE).split(",")]
    for host, _, port in found:
        with contextlib.suppress(OSError, ValueError, OverflowError):
            socket.create_connection((host, int(port)), MASTER_S_MAX).close()
            return
    raise LogError(f"no Spark master answers at {master}: is it running, and reachable from here?")


def _start(master: str, name: str, settings: Mapping[str, str], noise: Path | None) -> SparkSession:
    if master.startswith(STANDALONE):
        _check_answers(master)
    if is_local(master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Workers must find what the driver can import: the user's modules.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    conf = SparkConf()
    chosen = {
        **_SETTINGS,
        "spark.master": master,
        "spark.app.name": name,
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}",
        **(_LOCAL_SETTINGS if is_local(master) else {}),
        **settings,
    }
    for key, value in chosen.items():
        conf.set(key, value)
    for noisy in ("py4j", "SQLQueryContextLogger", "pyspark"):
        # What goes wrong reaches the user as an error of ours, once.
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    target = noise or Path(os.devnull)
    with target.open("ab") as out:
        try:
            gateway = launch_gateway(conf, {"stdout": out, "stderr": out})
        except PySparkRuntimeError as error:
            raise LogError(_why_not(noise)) from error
    try:
        return SparkSession(SparkContext(conf=conf, gateway=gateway))
    except Py4JJavaError as error:
        why = reason(error)  # asked of Java, so before it is gone
        _close_gateway(gateway)
        raise LogError(f"Spark does not start with master {master}: {why}") from None


def _why_not(noise: Path | None) -> str:
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        return "Spark does not start: there is no Java; install Java 17 and try again"
    said = "" if noise is None else f": see {noise}"
    return f"Spark does not start{said}; `penstock doctor` says what is missing"
