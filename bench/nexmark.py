"""NEXMark: people, auctions and bids from a seeded generator, and seven of its queries.

Each query is a function of DataFrames, so that the same one runs as an app of Penstock and on
Parquet. `expected` works the answers out again in plain Python.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

import penstock
from penstock import App, AppStream, Record
from penstock.records.event import from_microseconds, microseconds

Numbers = npt.NDArray[np.uint64]
Frames = Mapping[str, DataFrame]
Row = tuple[object, ...]

GROUP = 50  # of so many events one is a person, three are auctions, the others bids
AUCTIONS = 3
START_US = microseconds(dt.datetime(2026, 1, 1, tzinfo=dt.UTC))
SECOND_US = 1_000_000
WATERMARK_US = 2 * SECOND_US
FIRST = ("Ada", "Barbara", "Edsger", "Grace", "John", "Leslie", "Niklaus", "Tony")
LAST = ("Hill", "Lake", "Meadow", "Pond", "River", "Stone", "Wood")
PLACES = (
    ("Phoenix", "AZ"), ("Los Angeles", "CA"), ("San Francisco", "CA"), ("Boise", "ID"),
    ("Portland", "OR"), ("Bend", "OR"), ("Seattle", "WA"), ("Cheyenne", "WY"),
)  # fmt: skip
CHANNELS = ("apple", "baidu", "facebook", "google")


class Person(Record):
    id: int
    name: str
    city: str
    state: str
    at: dt.datetime


class Auction(Record):
    id: int
    seller: int
    category: int
    item: str
    initial_bid: int
    reserve: int
    at: dt.datetime


class Bid(Record):
    auction: int
    bidder: int
    price: int
    channel: str
    at: dt.datetime


RECORDS: dict[str, type[Record]] = {"people": Person, "auctions": Auction, "bids": Bid}
KEYS = {"people": "id", "auctions": "id", "bids": "auction"}


def dice(numbers: Numbers, salt: int) -> Numbers:
    """A number for each number that looks random and is the same everywhere, for good."""
    with np.errstate(over="ignore"):
        mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
            salt * 0xD1B54A32D192ED03 % 2**64
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Generator(msgspec.Struct, frozen=True):
    """The first `count` events, one every `step_us` microseconds."""

    count: int
    step_us: int
    seed: int = 1

    @property
    def end_us(self) -> int:
        return START_US + (self.count - 1) * self.step_us

    def batches(self, stream: str, rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        """The events of one stream, in order, as columns."""
        make = {"people": self._people, "auctions": self._auctions, "bids": self._bids}[stream]
        share = {"people": 1, "auctions": AUCTIONS, "bids": GROUP - 1 - AUCTIONS}[stream]
        groups = max(1, rows // share)
        whole = -(-self.count // GROUP)
        for first in range(0, whole, groups):
            made = make(np.arange(first, min(first + groups, whole), dtype=np.uint64))
            if made.num_rows:
                yield made

    def _numbers(self, groups: Numbers, start: int, end: int) -> Numbers:
        """Which events of each group belong to a stream: those from `start` to before `end`."""
        inside = np.arange(start, end, dtype=np.uint64)
        found = (groups[:, None] * np.uint64(GROUP) + inside[None, :]).ravel()
        return found[found < np.uint64(self.count)]

    def _times(self, numbers: Numbers) -> pa.Array:
        made = START_US + numbers.astype(np.int64) * self.step_us
        return pa.array(made).cast(pa.timestamp("us", tz="UTC"))

    def _people(self, groups: Numbers) -> pa.RecordBatch:
        numbers = self._numbers(groups, 0, 1)
        names = [f"{first} {last}" for first in FIRST for last in LAST]
        home = dice(numbers, self.seed + 1) % np.uint64(len(PLACES))
        return pa.record_batch(
            {
                "id": _ints(numbers // np.uint64(GROUP)),
                "name": _chosen(names, dice(numbers, self.seed)),
                "city": _chosen([city for city, _ in PLACES], home),
                "state": _chosen([state for _, state in PLACES], home),
                "at": self._times(numbers),
            }
        )

    def _auctions(self, groups: Numbers) -> pa.RecordBatch:
        numbers = self._numbers(groups, 1, 1 + AUCTIONS)
        group, inside = numbers // np.uint64(GROUP), numbers % np.uint64(GROUP)
        first_bid = np.uint64(1) + dice(numbers, self.seed + 4) % np.uint64(1000)
        return pa.record_batch(
            {
                "id": _ints(group * np.uint64(AUCTIONS) + inside - np.uint64(1)),
                "seller": _ints(self._recent(numbers, group, 4, 100, 2)),
                "category": _ints(np.uint64(10) + dice(numbers, self.seed + 3) % np.uint64(5)),
                "item": _chosen([f"item {n}" for n in range(500)], dice(numbers, self.seed + 5)),
                "initial_bid": _ints(first_bid),
                "reserve": _ints(first_bid * np.uint64(2)),
                "at": self._times(numbers),
            }
        )

    def _bids(self, groups: Numbers) -> pa.RecordBatch:
        numbers = self._numbers(groups, 1 + AUCTIONS, GROUP)
        group = numbers // np.uint64(GROUP)
        latest = group * np.uint64(AUCTIONS) + np.uint64(AUCTIONS - 1)
        digits = np.power(np.uint64(10), dice(numbers, self.seed + 8) % np.uint64(6))
        price = (np.uint64(1) + dice(numbers, self.seed + 9) % np.uint64(99)) * digits
        return pa.record_batch(
            {
                "auction": _ints(self._recent(numbers, latest, 2, 100, 6)),
                "bidder": _ints(self._recent(numbers, group, 4, 100, 7)),
                "price": _ints(price),
                "channel": _chosen(CHANNELS, dice(numbers, self.seed + 10)),
                "at": self._times(numbers),
            }
        )

    def _recent(
        self, numbers: Numbers, latest: Numbers, hot: int, among: int, salt: int
    ) -> Numbers:
        """An id of late: all but one in `hot` times the same one for a while, else any recent."""
        chance = dice(numbers, self.seed + salt)
        popular = latest // np.uint64(among) * np.uint64(among)
        back = np.minimum(latest, chance // np.uint64(hot) % np.uint64(among))
        return np.where(chance % np.uint64(hot) > 0, popular, latest - back)


def _ints(numbers: Numbers) -> pa.Array:
    return pa.array(numbers.astype(np.int64))


def _chosen(pool: Sequence[str], numbers: Numbers) -> pa.Array:
    return pa.array(pool).take(pa.array((numbers % np.uint64(len(pool))).astype(np.int64)))


# The queries


def q0(frames: Frames) -> DataFrame:
    """Every bid as it is."""
    return frames["bids"].select("auction", "bidder", "price", "channel", "at")


def q1(frames: Frames) -> DataFrame:
    """Prices in another currency."""
    price = F.expr("price * 908 div 1000").alias("price")
    return frames["bids"].select("auction", "bidder", price, "channel", "at")


def q2(frames: Frames) -> DataFrame:
    """Bids for some auctions."""
    return frames["bids"].where("auction % 123 = 0").select("auction", "price")


def q3(frames: Frames) -> DataFrame:
    """Who sells in certain states and a certain category."""
    people = frames["people"].where(F.col("state").isin("OR", "ID", "CA")).alias("p")
    auctions = frames["auctions"].where("category = 10").alias("a")
    return auctions.join(people, F.expr("a.seller = p.id")).select(
        F.col("a.id").alias("auction"), "p.name", "p.city", "p.state"
    )


def q5(frames: Frames) -> DataFrame:
    """The auction with the most bids in each 10 seconds, every 2; of equals the first."""
    counts = (
        frames["bids"]
        .groupBy(F.window("at", "10 seconds", "2 seconds").alias("window"), "auction")
        .agg(F.count("*").alias("bids"))
    )
    best = F.max(F.struct(F.col("bids"), (-F.col("auction")).alias("rank"))).alias("best")
    return (
        counts.groupBy(F.window(F.window_time("window"), "2 seconds").alias("last"))
        .agg(best)
        .select(
            F.col("last.end").alias("at"),
            (-F.col("best.rank")).alias("auction"),
            F.col("best.bids").alias("bids"),
        )
    )


def q7(frames: Frames) -> DataFrame:
    """The highest bid of each 10 seconds; of equals that of the highest auction and bidder."""
    best = F.max(F.struct("price", "auction", "bidder")).alias("best")
    return (
        frames["bids"]
        .groupBy(F.window("at", "10 seconds").alias("window"))
        .agg(best)
        .select(F.col("window.end").alias("at"), "best.price", "best.auction", "best.bidder")
    )


def q8(frames: Frames) -> DataFrame:
    """Who came and opened an auction within the same 10 seconds."""
    people = frames["people"].select("id", "name", F.window("at", "10 seconds").alias("came"))
    opened = F.window("at", "10 seconds").alias("opened")
    sellers = frames["auctions"].groupBy("seller", opened).agg(F.count("*").alias("auctions"))
    return sellers.join(people, F.expr("seller = id AND opened = came")).select(
        "id", "name", F.col("came.end").alias("at"), "auctions"
    )


class NexmarkQuery(msgspec.Struct, frozen=True):
    inputs: tuple[str, ...]
    function: Callable[[Frames], DataFrame]


QUERIES = {
    "q0": NexmarkQuery(("bids",), q0),
    "q1": NexmarkQuery(("bids",), q1),
    "q2": NexmarkQuery(("bids",), q2),
    "q3": NexmarkQuery(("auctions", "people"), q3),
    "q5": NexmarkQuery(("bids",), q5),
    "q7": NexmarkQuery(("bids",), q7),
    "q8": NexmarkQuery(("auctions", "people"), q8),
}


def nexmark_app(name: str) -> tuple[App, AppStream[object]]:
    """One of the queries as an app, and the stream it makes."""
    query = QUERIES[name]
    app = App("nexmark")
    inputs = [
        app.stream(
            stream, RECORDS[stream], key=KEYS[stream], time="at", partitions=2,
            watermark=dt.timedelta(microseconds=WATERMARK_US),
        )
        for stream in query.inputs
    ]  # fmt: skip

    def run(*frames: DataFrame) -> DataFrame:
        return query.function(dict(zip(query.inputs, frames, strict=True)))

    return app, app.derive(*inputs, name=name)(run)


def fill(log: penstock.Log, generator: Generator, streams: Sequence[str]) -> None:
    with penstock.Producer(log) as producer:
        for stream in streams:
            for batch in generator.batches(stream):
                producer.append(stream, batch)


# The answers, worked out without Spark


def expected(generator: Generator) -> dict[str, list[Row]]:
    """What each query gives, once every window has closed that the watermark closes."""
    tables = {
        stream: pa.Table.from_batches(generator.batches(stream)).to_pylist() for stream in RECORDS
    }
    bids, auctions = tables["bids"], tables["auctions"]
    people = {person["id"]: person for person in tables["people"]}
    whole = [(b["auction"], b["bidder"], b["price"], b["channel"], b["at"]) for b in bids]
    closed = generator.end_us - WATERMARK_US
    sellers = [(a, people[a["seller"]]) for a in auctions if a["seller"] in people]
    return {
        "q0": sorted(whole),
        "q1": sorted((a, b, price * 908 // 1000, c, at) for a, b, price, c, at in whole),
        "q2": sorted((b["auction"], b["price"]) for b in bids if b["auction"] % 123 == 0),
        "q3": sorted(
            (a["id"], p["name"], p["city"], p["state"])
            for a, p in sellers
            if a["category"] == 10 and p["state"] in ("OR", "ID", "CA")
        ),
        "q5": _hot_items(bids, closed),
        "q7": _highest_bids(bids, closed),
        "q8": _new_sellers(sellers, closed),
    }


def _ends(at: dt.datetime, size_s: int, step_s: int) -> Iterator[int]:
    """The ends of the windows that hold a moment."""
    step = step_s * SECOND_US
    first = microseconds(at) // step * step
    for start in range(first - size_s * SECOND_US + step, first + step, step):
        yield start + size_s * SECOND_US


def _hot_items(bids: Sequence[Mapping[str, object]], closed: int) -> list[Row]:
    counts: Counter[tuple[int, int]] = Counter()
    for bid in bids:
        for end in _ends(bid["at"], 10, 2):  # type: ignore[arg-type]
            counts[end, bid["auction"]] += 1  # type: ignore[index]
    best: dict[int, tuple[int, int]] = {}
    for (end, auction), count in counts.items():
        best[end] = max(best.get(end, (0, 0)), (count, -auction))
    return sorted(
        (from_microseconds(end), -rank, count)
        for end, (count, rank) in best.items()
        if end <= closed
    )


def _highest_bids(bids: Sequence[Mapping[str, object]], closed: int) -> list[Row]:
    best: dict[int, Row] = {}
    for bid in bids:
        (end,) = _ends(bid["at"], 10, 10)  # type: ignore[arg-type]
        found = (bid["price"], bid["auction"], bid["bidder"])
        best[end] = max(best.get(end, (-1, 0, 0)), found)
    return sorted((from_microseconds(end), *found) for end, found in best.items() if end <= closed)


def _new_sellers(
    sellers: Sequence[tuple[Mapping[str, object], Mapping[str, object]]], closed: int
) -> list[Row]:
    counts: Counter[tuple[object, ...]] = Counter()
    for auction, person in sellers:
        (end,) = _ends(auction["at"], 10, 10)  # type: ignore[arg-type]
        if (end,) == tuple(_ends(person["at"], 10, 10)) and end <= closed:  # type: ignore[arg-type]
            counts[person["id"], person["name"], from_microseconds(end)] += 1
    return sorted((*who, count) for who, count in counts.items())
