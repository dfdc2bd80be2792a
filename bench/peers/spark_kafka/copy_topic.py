"""Copies a topic with Spark's own Kafka source and sink, tuned, at-least-once; prints the rates.

python copy_topic.py JARS SERVERS FROM TO CHECKPOINT BATCH_ROWS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

SCHEMA = "user string, item string, amount double, at timestamp"


def main() -> None:
    jars, servers, source, target, checkpoint, rows = sys.argv[1:]
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", ",".join(str(path) for path in Path(jars).glob("*.jar")))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.streaming.numRecentProgressUpdates", "1000")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    read = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", rows)
        .option("kafka.isolation.level", "read_committed")
        .option("kafka.max.poll.records", "100000")
        .option("kafka.max.partition.fetch.bytes", str(8 << 20))
        .option("kafka.fetch.max.bytes", str(64 << 20))
        .load()
    )
    data = read.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("d")).select("d.*")
    out = data.where("amount >= 0").select(
        F.col("user").alias("key"),
        F.to_json(F.struct("user", "item", "amount", "at")).alias("value"),
    )
    query = (
        out.writeStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", target)
        .option("kafka.compression.type", "lz4")
        .option("kafka.batch.size", str(1 << 20))
        .option("kafka.linger.ms", "5")
        .option("kafka.buffer.memory", str(128 << 20))
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = [
        [p.numInputRows, p.durationMs["triggerExecution"] / 1000]
        for p in query.recentProgress
        if p.numInputRows
    ]
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
