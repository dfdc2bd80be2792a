"""Spark Declarative Pipelines on Penstock: a stream in, a stream out, exactly once."""

from pathlib import Path

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
# Spark's processes run in other folders, so they need an absolute path.
LOG = str(Path(str(spark.conf.get("shop.log"))).resolve())


@dp.temporary_view
def orders() -> DataFrame:
    return spark.readStream.format("penstock").option("log", LOG).load("orders")


dp.create_sink(
    "large_orders",
    "penstock",
    {"log": LOG, "stream": "large_orders", "producer": "shop.large_orders"},
)


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    return spark.readStream.table("orders").where("amount >= 100").select("user", "item", "amount")
