"""The sum and the count on Pathway: two threads, with its persistence. Run in its own venv.

python pathway_job.py sum|count FOLDER_OF_CSV STATE_FOLDER → seconds
"""

from __future__ import annotations

import sys
import time

import pathway as pw


class Orders(pw.Schema):
    user: str
    item: str
    amount: float
    at: int


def build(what: str, folder: str) -> None:
    orders = pw.io.csv.read(folder, schema=Orders, mode="static")
    if what == "sum":
        made = orders.groupby(pw.this.user).reduce(
            pw.this.user, total=pw.reducers.sum(pw.this.amount)
        )
    else:
        windows = pw.temporal.tumbling(duration=10_000_000)
        made = orders.windowby(orders.at, window=windows, instance=orders.item).reduce(
            item=pw.this._pw_instance, start=pw.this._pw_window_start, count=pw.reducers.count()
        )
    pw.io.null.write(made)


if __name__ == "__main__":
    build(sys.argv[1], sys.argv[2])
    backend = pw.persistence.Backend.filesystem(sys.argv[3])
    began = time.perf_counter()
    pw.run(
        monitoring_level=pw.MonitoringLevel.NONE,
        persistence_config=pw.persistence.Config(backend),
    )
    print(time.perf_counter() - began)
