"""Spark finds data sources in packages named like this one: `format("penstock.sink")`."""

from penstock.spark.pushing import SinkSource as DefaultSource

__all__ = ["DefaultSource"]
