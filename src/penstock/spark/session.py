"""The Spark session that apps run in: quiet, local unless told otherwise."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from py4j.java_gateway import JavaGateway
from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from penstock.errors import LogError
from penstock.spark import java
from penstock.spark.failures import reason
from penstock.spark.source import PenstockSource

STANDALONE = "spark://"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
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
    java_options = [
        f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}", *java.options(),
        settings.get(JAVA_OPTIONS, ""),
    ]  # fmt: skip
    conf = SparkConf()
    chosen = {
        **_SETTINGS,
        "spark.master": master,
        "spark.app.name": name,
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        **(_LOCAL_SETTINGS if is_local(master) else {}),
        **settings,
        JAVA_OPTIONS: " ".join(java_options).strip(),
    }
    for key, value in chosen.items():
        conf.set(key, value)
    for noisy in ("py4j", "SQLQueryContextLogger", "pyspark"):
        # What goes wrong reaches the user as an error of ours, once.
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    target = noise or Path(os.devnull)
    with target.open("ab") as out:
        before = out.tell()
        try:
            gateway = launch_gateway(conf, {"stdout": out, "stderr": out})
        except PySparkRuntimeError as error:
            raise LogError(_why_not(noise, before)) from error
    try:
        context = SparkContext(conf=conf, gateway=gateway)
        _quieten(context)
        return SparkSession(context)
    except Py4JJavaError as error:
        why = reason(error)  # asked of Java, so before it is gone
        _close_gateway(gateway)
        raise LogError(f"Spark does not start with master {master}: {why}") from None


def _quieten(context: SparkContext) -> None:
    """Have nothing printed when Spark ends before those who read from it."""
    server = context._accumulatorServer
    tell = server.handle_error

    def handle_error(request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], EOFError | OSError):
            tell(request, client_address)

    server.handle_error = handle_error  # type: ignore[method-assign]


def _why_not(noise: Path | None, before: int) -> str:
    """Why Spark's process ended at once, in its own last words."""
    if noise is None:
        return "Spark does not start; `penstock doctor` says what is missing"
    with contextlib.suppress(OSError), noise.open("rb") as said:
        said.seek(before)
        lines = [line.strip() for line in said.read(100_000).decode(errors="replace").splitlines()]
        errors = [line for line in lines if "rror" in line or "xception" in line]
        if words := (errors or [line for line in lines if line])[:1]:
            return f"Spark does not start: {words[0]} (more in {noise})"
    return f"Spark does not start: see {noise}; `penstock doctor` says what is missing"


def warm(spark: SparkSession, tasks: int) -> None:
    """Have Spark start its Python workers now, in the background: they are needed soon.

    Whatever goes wrong here goes wrong again, and is told of, when they are needed.
    """

    def start() -> None:
        with contextlib.suppress(Exception):
            spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(_nothing).collect()

    threading.Thread(target=start, name="penstock-warm", daemon=True).start()


def _nothing(numbers: Iterable[int]) -> Iterable[int]:
    del numbers
    return ()
