"""The process that Spark forks its Python workers from, with everything they need already loaded.

Importing takes a second, forking a few milliseconds, and what is loaded before the fork is shared
by all workers. No log is opened here: a forked process must open its own.
"""

from __future__ import annotations

import pandas  # type: ignore[import-untyped]
import pyarrow.compute
import pyspark.sql.pandas.types
import pyspark.worker
from pyspark.daemon import manager

import penstock.app.running.runner
import penstock.spark.executor
import penstock.spark.frames

__all__ = ["manager", "pandas", "penstock", "pyarrow", "pyspark"]

if __name__ == "__main__":
    manager()
