"""Twenty definitions that have nothing to do: agents, derived streams, and five that keep state."""

from __future__ import annotations

from pyspark.sql import DataFrame

from penstock import App, Entry, Record

app = App("idle")


class Reading(Record):
    sensor: str
    value: int


def add_up(reading: Reading, total: Entry[int]) -> None:
    total.value += reading.value


def large(readings: DataFrame) -> DataFrame:
    return readings.where("value > 100")


def counts(readings: DataFrame) -> DataFrame:
    return readings.groupBy("sensor").count()


for number in range(20):
    readings = app.stream(f"readings{number}", Reading, key="sensor")
    match number % 4:
        case 0:
            app.derive_table(readings, key="sensor", name=f"counts{number}")(counts)
        case 1:
            app.derive(readings, key="sensor", name=f"large{number}")(large)
        case _:
            totals = app.table(f"totals{number}", value=int, default=0)
            app.agent(readings, state=totals, name=f"add_up{number}")(add_up)
