"""A shop: what a whole app looks like.

    penstock run examples/shop.py

Orders come in. Large ones are selected, the spending of every user is added up, and a user who buys
an item for the first time is greeted.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  the usual name

import penstock
from penstock import Entry

app = penstock.App("shop")

Money = Annotated[Decimal, penstock.Digits(18, 2)]


class Order(penstock.Record):
    id: int
    user: str
    item: str
    amount: Money
    at: dt.datetime


class Greeting(penstock.Record):
    user: str
    item: str
    text: str


orders = app.stream("orders", Order, key="user", time="at", watermark="1 minute", partitions=2)
greetings = app.stream("greetings", Greeting, key="user")
bought = app.table("bought", value=set[str])
totals = app.table("totals", value=Money, default=Decimal(0))


@app.derive(orders, key="user")
def big_orders(orders: DataFrame) -> DataFrame:
    return orders.where("amount >= 80")


@app.derive_table(orders, key="item")
def sales(orders: DataFrame) -> DataFrame:
    return orders.groupBy("item").agg(F.count("*").alias("sold"), F.sum("amount").alias("value"))


@app.agent(orders, state=bought, to=greetings)
def greet(order: Order, bought: Entry[set[str]]) -> Iterator[Greeting]:
    if order.item not in bought.value:
        bought.value.add(order.item)
        yield Greeting(order.user, order.item, f"your first {order.item}, {order.user}!")


@app.agent(orders, state=totals)
def add_up(order: Order, total: Entry[Money]) -> None:
    total.value += order.amount
