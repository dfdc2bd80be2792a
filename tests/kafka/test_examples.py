"""The examples on Kafka: not a line of them is changed."""

from __future__ import annotations

import runpy

import pytest
from pyspark.sql import SparkSession

from tests.spark.test_examples import EXAMPLES, NAMES, promised


@pytest.mark.row("X1", engine="any")
@pytest.mark.row("F5", "F6", "F7", "F11", engine="kafka")
@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_what_it_promises(
    name: str,
    url: str,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_LOG", url)
    path = EXAMPLES / f"{name}.py"
    runpy.run_path(str(path), run_name="__main__")
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert printed == promised(path)
