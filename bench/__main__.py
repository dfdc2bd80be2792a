"""`make bench`: run every benchmark, and save the table in the docs, as JSON and as a picture.

python -m bench                 all of it
python -m bench --quick         small sizes, to see that it works; saves nothing
python -m bench append read     some of it; the others keep the figures they had
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path

import msgspec

from bench import connect, embedded, groups, kafka, spark, starting, streaming
from bench.plot import plot
from bench.result import Result, environment

BENCHMARKS = {
    **embedded.BENCHMARKS, **spark.BENCHMARKS, **streaming.BENCHMARKS, **kafka.BENCHMARKS,
    **connect.BENCHMARKS, **groups.BENCHMARKS, **starting.BENCHMARKS,
}  # fmt: skip
DOCS = Path(__file__).parents[1] / "docs"
MARKS = ("<!-- results: begin -->", "<!-- results: end -->")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench")
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes; saves nothing")
    given = parser.parse_args()
    unknown = set(given.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}")
    results: dict[str, list[Result]] = {}
    for name, benchmark in BENCHMARKS.items():
        if given.names and name not in given.names:
            continue
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            results[name] = benchmark(Path(folder), given.quick)
        if not given.quick:
            save(results)
    print(as_table([result for found in results.values() for result in found]))
    return 0


def as_table(results: list[Result]) -> str:
    lines = ["| what | measured | beside | ratio | wanted | |", "|---|---|---|---|---|---|"]
    for r in results:
        verdict = "" if r.wanted is None else "ok" if r.good else "**missed**"
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        lines.append(
            f"| {r.what} | {r.measured} | {r.beside} | {ratio} | {r.wanted_text} | {verdict} |"
        )
    return "\n".join(lines)


class Saved(msgspec.Struct):
    """What `docs/benchmarks.json` holds: the latest figures of each benchmark."""

    environment: str
    results: dict[str, list[Result]]


def save(results: dict[str, list[Result]]) -> None:
    about = environment()
    file = DOCS / "benchmarks.json"
    before = msgspec.json.decode(file.read_bytes(), type=Saved).results if file.exists() else {}
    merged = {name: {**before, **results}[name] for name in BENCHMARKS if name in before | results}
    text = msgspec.json.format(msgspec.json.encode(Saved(about, merged)), indent=1)
    file.write_bytes(text + b"\n")
    every = [result for found in merged.values() for result in found]
    (DOCS / "benchmarks.svg").write_text(plot(every), "utf-8")
    table = as_table(every)
    page = DOCS / "benchmarks.md"
    start, rest = page.read_text("utf-8").split(MARKS[0])
    end = rest.split(MARKS[1])[1]
    body = f"{MARKS[0]}\n{table}\n\nOn {platform.machine()}, {about}.\n{MARKS[1]}"
    page.write_text(start + body + end, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
