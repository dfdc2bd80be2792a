"""The Spark session that apps run in: quiet, and local by default."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from py4j.java_gateway import JavaGateway
from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from penstock.errors import LogError
from penstock.spark import java
from penstock.spark.failures import reason
from penstock.spark.home import at_home
from penstock.spark.source import PenstockSource

STANDALONE = "spark://"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
MASTER_S_MAX = 10.0
T = TypeVar("T")
_LOG4J = Path(__file__).with_name("log4j2.properties")
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.mode": "FAIR",
    "spark.speculation": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # A Unix domain socket has no delayed acknowledgements: 40 ms less for each task.
    "spark.python.unix.domain.socket.enabled": "true",
    # Workers with this setting are forked from another process, which takes a second to start;
    # Penstock itself chooses what is shown of a traceback.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
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
    # On a cluster, Penstock may be available only once a task begins.
    "spark.python.daemon.module": "penstock.spark.daemon",
}


def open_session(
    master: str = "local[*]",
    name: str = "penstock",
    settings: Mapping[str, str] | None = None,
    noise: Path | None = None,
) -> SparkSession:
    """A session with the settings Penstock needs; `settings` are Spark's and override ours.

    The output of Spark and its workers goes to the file `noise`, or is discarded. If the process
    already has a session, that one is returned.
    """
    context = SparkContext._active_spark_context
    return SparkSession(context) if context else _start(master, name, settings or {}, noise)


def is_local(master: str) -> bool:
    """Whether Spark runs in a single process on this machine."""
    return master.startswith("local")


def has_session() -> bool:
    """Whether Spark is already running for this process."""
    return SparkContext._active_spark_context is not None


def close_session(spark: SparkSession) -> None:
    """Stop a session and its Spark process. Does nothing if that has already died."""
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
    """Raise `LogError` if no master answers: Spark would wait a minute, and not say why."""
    found = [part.rpartition(":") for part in master.removeprefix(STANDALONE).split(",")]
    for host, _, port in found:
        with contextlib.suppress(OSError, ValueError, OverflowError):
            socket.create_connection((host, int(port)), MASTER_S_MAX).close()
            return
    raise LogError(
        f"no Spark master answers at {master}: check that it is running and reachable from here"
    )


def _start(master: str, name: str, settings: Mapping[str, str], noise: Path | None) -> SparkSession:
    if master.startswith(STANDALONE):
        _check_answers(master)
    if is_local(master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Workers must be able to import what the driver can: the user's modules.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    java_options = [
        f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}",
        *java.options(),
        settings.get(JAVA_OPTIONS, ""),
    ]
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
        # Errors reach the user once, as an error of Penstock.
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    target = noise or Path(os.devnull)
    with target.open("ab") as out:
        before = out.tell()
        try:
            with at_home() if is_local(master) else contextlib.nullcontext():
                gateway = launch_gateway(conf, {"stdout": out, "stderr": out})
        except PySparkRuntimeError as error:
            raise LogError(_why_not(noise, before)) from error
    try:
        context = SparkContext(conf=conf, gateway=gateway)
        _quieten(context)
        _beside(_start_workers, context)
        return SparkSession(context)
    except Py4JJavaError as error:
        why = reason(error)  # asks Java, so it must come before closing
        _close_gateway(gateway)
        raise LogError(f"Spark cannot start with master {master}: {why}") from None


def _quieten(context: SparkContext) -> None:
    """Print nothing if Spark ends before the threads that read from it."""
    server = context._accumulatorServer
    tell = server.handle_error

    def handle_error(request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], EOFError | OSError):
            tell(request, client_address)

    server.handle_error = handle_error  # type: ignore[method-assign]


def _why_not(noise: Path | None, before: int) -> str:
    """Why the Spark process ended at once, from its output."""
    if noise is None:
        return "Spark cannot start: run `penstock doctor` to see what is missing"
    with contextlib.suppress(OSError), noise.open("rb") as said:
        said.seek(before)
        lines = [line.strip() for line in said.read(100_000).decode(errors="replace").splitlines()]
        errors = [line for line in lines if "rror" in line or "xception" in line]
        if words := (errors or [line for line in lines if line])[:1]:
            return f"Spark cannot start: {words[0]} (for details, see {noise})"
    return f"Spark cannot start: see {noise}, or run `penstock doctor` to see what is missing"


def look_up_source(spark: SparkSession) -> None:
    """Make Spark look for its data sources now, in the background, in a process of its own."""
    _beside(spark.dataSource.register, PenstockSource)


def _beside(act: Callable[[T], object], given: T) -> None:
    """Do in the background what will be needed soon.

    Errors are ignored here: they occur again, and are reported, when the result is needed.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            act(given)

    threading.Thread(target=run, name="penstock-warm", daemon=True).start()


def _start_workers(context: SparkContext) -> None:
    tasks = context.defaultParallelism
    context.parallelize(range(tasks), tasks).mapPartitions(_nothing).collect()


def _nothing(numbers: Iterable[int]) -> Iterable[int]:
    del numbers
    return ()
