"""What goes to the workers of a cluster."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from penstock.app.running.loading import load_app
from penstock.spark.options import BATCH_ROWS, BATCH_ROWS_ON_KAFKA, parse
from penstock.spark.shipping import bundle

MAIN = """
import penstock
from market.records import Order

app = penstock.App("market")
orders = app.stream("orders", Order)

@app.agent(orders)
def look(order: Order) -> None: ...
"""


def test_an_app_in_a_package_brings_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("market", "market/apps"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    record = "import penstock\n\nclass Order(penstock.Record):\n    user: str\n"
    (tmp_path / "market/records.py").write_text(record)
    (tmp_path / "market/apps/main.py").write_text(MAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        packed = bundle(load_app("market.apps.main:app"), tmp_path / "app.zip")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "market"]:
            del sys.modules[name]
    names = [name for name in zipfile.ZipFile(packed).namelist() if name.startswith("market")]
    assert sorted(names) == [
        "market/__init__.py", "market/apps/__init__.py", "market/apps/main.py", "market/records.py",
    ]  # fmt: skip


def test_a_batch_on_kafka_is_smaller() -> None:
    embedded, kafka = (parse({"log": log, "stream": "s"}) for log in ("a.db", "kafka://a:1"))
    assert embedded.default_batch_rows == BATCH_ROWS
    assert kafka.default_batch_rows == BATCH_ROWS_ON_KAFKA
