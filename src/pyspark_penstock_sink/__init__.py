"""Spark finds data sources in packages named like this one: `format("penstock.sink")`."""

from penstock.spark.connector_sink import SinkSource as DefaultSource

__all__ = ["DefaultSource"]
