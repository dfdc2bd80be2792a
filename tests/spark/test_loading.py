"""App modules that use Spark while they are imported, as PySpark's users write them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from penstock.app.running.loading import load_app
from penstock.errors import AppError

MODULE = """
import penstock
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

app = penstock.App("shop")

class Order(penstock.Record):
    user: str
    amount: int

orders = app.stream("orders", Order, key="user")

{line}

@app.derive(orders, key="user")
def doubled(orders: DataFrame) -> DataFrame:
    return orders.select("user", {use}.alias("amount"))
"""
LINES = {
    "udf": ('@F.udf("long")\ndef double(x):\n    return 2 * x', 'double("amount")'),
    "expr": ('double = F.expr("amount * 2")', "double"),
    "col": ('double = F.col("amount") * 2', "double"),
}


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As if Spark had not been started yet, and what starts it."""
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
    yield monkeypatch
    sys.modules.pop("module_with_spark", None)


@pytest.mark.parametrize("kind", LINES)
def test_a_module_that_needs_spark_is_imported_once_it_is_there(
    spark: SparkSession, no_session: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    line, use = LINES[kind]
    path = tmp_path / "module_with_spark.py"
    path.write_text(MODULE.format(line=line, use=use))
    with pytest.raises(AppError, match="needs Spark while it is imported") as told:
        load_app(str(path))
    assert line.splitlines()[0] in str(told.value), "the line of the user's that did it"
    app = load_app(str(path), start_spark=no_session.undo)
    assert list(app.definitions) == ["doubled"]


def test_other_errors_are_the_module_s_own(
    spark: SparkSession, no_session: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "module_with_spark.py"
    path.write_text(MODULE.format(line="assert 1 == 2", use="F.lit(1)"))
    with pytest.raises(AppError, match="cannot be imported: AssertionError"):
        load_app(str(path), start_spark=no_session.undo)
