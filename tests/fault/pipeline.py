"""The app that is killed: every kind of definition in a row, with uuids and clocks in it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock import App, Entry, Record

app = App("pipeline")


class Payment(Record):
    number: int
    user: str
    amount: int


class Checked(Record):
    number: int
    user: str
    amount: int
    mark: str


class Receipt(Record):
    number: int
    user: str
    total: int
    mark: str
    at: float


payments = app.stream("payments", Payment, key="user", partitions=3)
receipts = app.stream("receipts", Receipt, key="user", partitions=2)
totals = app.table("totals", value=int, default=0)
numbers = app.table("numbers", value=set[int])


@app.derive(payments, key="user", record=Checked)
def checked(payments: DataFrame) -> DataFrame:
    return payments.where("amount % 10 != 0").withColumn("mark", F.expr("uuid()"))


@app.agent(checked, state=totals, to=receipts)
def receive(payment: Checked, total: Entry[int]) -> Iterator[Receipt]:
    total.value += payment.amount
    mark = str(uuid.uuid4())
    yield Receipt(payment.number, payment.user, total.value, mark, time.time())


@app.agent(checked, state=numbers)
def collect(payment: Checked, numbers: Entry[set[int]]) -> None:
    numbers.value.add(payment.number)


@app.derive_table(receipts, key="user")
def counted(receipts: DataFrame) -> DataFrame:
    return receipts.groupBy("user").agg(
        F.count("*").alias("receipts"), F.max("total").alias("total")
    )


@app.derive(counted.changes, key="user")
def last(changes: DataFrame) -> DataFrame:
    return changes.select("user", "receipts", "total", F.expr("uuid()").alias("mark"))
