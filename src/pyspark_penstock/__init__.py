"""Spark finds data sources in packages named like this one: `format("penstock")` just works."""

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
