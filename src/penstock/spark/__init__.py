"""Penstock on Apache Spark: a data source for any program, and what apps run on."""

from penstock.spark.running import running
from penstock.spark.session import open_session
from penstock.spark.source import PenstockSource

__all__ = ["PenstockSource", "open_session", "running"]
