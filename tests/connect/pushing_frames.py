"""A PySpark program that writes a stream into a sink, to be killed."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import java
from penstock.spark.home import at_home


def main(log: str, address: str, checkpoint: str, tasks: int) -> None:
    """Everything that is there, in batches of 200; other uuids each time a batch is run."""
    with at_home():
        spark = (
            SparkSession.builder.master(f"local[{tasks}]")
            .config("spark.driver.extraJavaOptions", " ".join(java.options()))
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .getOrCreate()
        )
    query = (
        spark.readStream.format("penstock")
        .option("log", log)
        .option("batch_rows", "200")
        .option("split_rows", str(200 // tasks))
        .load("numbers")
        .select("key", "n", F.expr("uuid()").alias("id"))
        .writeStream.format("penstock.sink")
        .option("log", log)
        .option("address", address)
        .option("producer", "frames")
        .option("workers", "2")
        .option("key", "key")
        .option("timeout", "10 seconds")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
