"""Spark Declarative Pipelines, run by Spark's own command, with streams as source and sink."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import CreateStream, Producer, Record, declare
from penstock.log.reading.read import read_events

EXAMPLE = Path(__file__).parents[2] / "examples" / "declarative"


class Order(Record):
    user: str
    item: str
    amount: int


def run_pipeline(folder: Path) -> None:
    """`spark-pipelines run`, as a user types it."""
    bin_ = Path(sys.executable).parent
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [str(bin_ / "spark-pipelines"), "run"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.row("X2", engine="embedded")
def test_a_declarative_pipeline_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(EXAMPLE, folder)
    spec = folder / "spark-pipeline.yml"
    text = spec.read_text().replace("file:///var/lib/shop", (tmp_path / "storage").as_uri())
    spec.write_text(text)
    with penstock.open(folder / "penstock.db") as log:
        log.apply(
            [CreateStream(declare(name, Order, key="user")) for name in ("orders", "large_orders")]
        )
        for round_ in range(2):
            with Producer(log) as producer:
                for n in (99, 100, 101):
                    producer.send("orders", Order("ada", f"tea {round_}", n))
            run_pipeline(folder)
        found = [event.data for event in read_events(log, "large_orders", Order)]
    assert found == [
        Order("ada", f"tea {round_}", amount) for round_ in range(2) for amount in (100, 101)
    ]
