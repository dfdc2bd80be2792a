"""Page views: visitors of each page per hour, counted by an agent; views per user, by Spark.

    python examples/page_views.py

Expected output:

    home   09:00  2 visitors
    home   10:00  1 visitors
    prices 09:00  1 visitors
    ada looked at 3 pages
    bob looked at 2 pages
"""

from __future__ import annotations

import datetime as dt
import os
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

import penstock
from penstock import WindowedEntry
from penstock.spark import running

app = penstock.App("site")


class View(penstock.Record):
    page: str
    user: str
    at: dt.datetime


views = app.stream("views", View, key="page", time="at", partitions=2)
visitors = app.table("visitors", value=set[str], window=penstock.tumbling("1 hour"))


@app.agent(views, state=visitors)
def visit(view: View, visitors: WindowedEntry[set[str]]) -> None:
    visitors.current().value.add(view.user)


@app.derive_table(views, key="user")
def activity(views: DataFrame) -> DataFrame:
    return views.groupBy("user").count()


def view(page: str, user: str, hour: int, minute: int) -> View:
    return View(page, user, dt.datetime(2026, 1, 1, hour, minute, tzinfo=dt.UTC))


def main() -> None:
    app.feed(
        [
            view("home", "ada", 9, 5),
            view("home", "bob", 9, 10),
            view("home", "ada", 9, 15),
            view("prices", "bob", 9, 20),
            view("home", "ada", 10, 0),
        ],
        to=views,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        penstock.open(os.environ.get("PENSTOCK_LOG") or Path(folder, "site.db")) as log,
    ):
        with running(app, log, checkpoints=Path(folder, "spark")) as runner:
            runner.until_idle(120)
        for key, users in penstock.Table[Any](log, "visitors").items():
            page, start_ms = key.decode().split("@")
            hour = dt.datetime.fromtimestamp(int(start_ms) / 1000, dt.UTC)
            print(f"{page:6} {hour:%H:%M}  {len(users)} visitors")
        for user, row in penstock.Table[Any](log, "activity").items():
            print(f"{user.decode()} looked at {row.count} pages")


if __name__ == "__main__":
    main()
