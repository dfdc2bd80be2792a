"""Creating the archive of classes that makes Spark start faster; see `penstock.spark.java`.

A small app runs in a process of its own, so that the classes that apps need are loaded; Java writes
the archive when it exits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  the usual name

import penstock
from penstock.errors import LogError
from penstock.spark import java
from penstock.spark.running import running
from penstock.spark.session import JAVA_OPTIONS

PREPARE_S_MAX = 600.0


def prepare() -> Path:
    """Create the archive, replacing an existing one, and return its path."""
    target = java.archive()
    target.parent.mkdir(parents=True, exist_ok=True)
    java.sweep()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder, "spark.jsa")
        # Without an existing archive: Java does not add to one.
        environment = {**os.environ, "PENSTOCK_JAVA_CACHE": folder}
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(draft)],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=PREPARE_S_MAX,
        )
        if done.returncode or not draft.exists():
            said = (done.stderr or done.stdout).strip().splitlines()
            why = said[-1] if said else "Java wrote no archive"
            raise LogError(f"Spark could not be prepared: {why}")
        draft.replace(target)
    return target


class SampleItem(penstock.Record):
    name: str
    count: int


def sample() -> penstock.App:
    """An app with an agent, a derived stream and a derived table."""
    app = penstock.App("prepare")
    items = app.stream("items", SampleItem, key="name", partitions=2)
    seen = app.table("seen", value=int, default=0)

    @app.agent(items, state=seen)
    def add(item: SampleItem, seen: penstock.Entry[int]) -> None:
        seen.value += item.count

    @app.derive(items, key="name")
    def large(items: DataFrame) -> DataFrame:
        return items.where("count > 1")

    @app.derive_table(items, key="name")
    def total(items: DataFrame) -> DataFrame:
        return items.groupBy("name").agg(F.sum("count").alias("total"))

    return app


def main(target: Path) -> None:
    log = target.with_name("prepare.db")
    settings = {JAVA_OPTIONS: f"-XX:ArchiveClassesAtExit={target}"}
    with penstock.open(log) as opened:
        with running(sample(), opened, master="local[2]", settings=settings) as runner:
            with penstock.Producer(opened) as producer:
                for n in range(10):
                    producer.send("items", SampleItem(f"n{n}", n))
            runner.until_idle(PREPARE_S_MAX / 2)
            failure = runner.failure()
            if failure is not None:
                raise failure


if __name__ == "__main__":
    main(Path(sys.argv[1]))
