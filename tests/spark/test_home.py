"""Where Spark is started from: everything of PySpark but the archive of its Python files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from penstock.spark import home

INSTALLED = Path(str(pyspark.__file__)).parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("PENSTOCK_SPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def where_pyspark_is(numbers: Iterable[int]) -> Iterable[str]:
    yield from (str(pyspark.__file__) for _ in numbers)


def test_workers_load_the_installed_files(spark: SparkSession) -> None:
    found = spark.sparkContext.parallelize([1], 1).mapPartitions(where_pyspark_is).collect()
    assert found == [str(INSTALLED / "__init__.py")]


def test_it_has_everything_but_the_archives() -> None:
    names = {path.name for path in home.find_home().iterdir()}
    assert names == {path.name for path in INSTALLED.iterdir()} - {"python"}
    assert all((home.find_home() / name).exists() for name in names)


def test_it_is_said_only_while_spark_starts() -> None:
    with home.at_home():
        assert os.environ["SPARK_HOME"] == str(home.find_home())
    assert "SPARK_HOME" not in os.environ


def test_a_home_that_is_given_is_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with home.at_home():
        assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert not cache.exists()


def test_without_a_cache_the_installed_one_is_used(cache: Path) -> None:
    cache.write_text("not a folder")
    assert home.find_home() == INSTALLED


def test_those_that_nobody_uses_are_removed(cache: Path) -> None:
    old, young = cache / "spark-1.0-0", cache / "draft-1"
    for path in (old, young):
        path.mkdir(parents=True)
    long_ago = time.time() - home.KEPT_S - 60
    os.utime(old, (long_ago, long_ago))
    made = home.find_home()
    assert {path.name for path in cache.iterdir()} == {made.name, young.name}
