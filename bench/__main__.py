"""`make bench`: run every benchmark, print the table, and save it as JSON and in the docs.

python -m bench                 all of it
python -m bench --quick         small sizes, to see that it works; saves nothing
python -m bench append read     some of it; saves nothing
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path

import msgspec

from bench import embedded, spark
from bench.result import Result, environment

BENCHMARKS = {**embedded.BENCHMARKS, **spark.BENCHMARKS}
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
    results: list[Result] = []
    for name, benchmark in BENCHMARKS.items():
        if given.names and name not in given.names:
            continue
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            results += benchmark(Path(folder), given.quick)
    table = as_table(results)
    print(table)
    if not given.quick and not given.names:
        save(results, table)
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


def save(results: list[Result], table: str) -> None:
    about = environment()
    data = {"environment": about, "results": results}
    text = msgspec.json.format(msgspec.json.encode(data), indent=1)
    (DOCS / "benchmarks.json").write_bytes(text + b"\n")
    page = DOCS / "benchmarks.md"
    before, rest = page.read_text("utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    body = f"{MARKS[0]}\n{table}\n\nOn {platform.machine()}, {about}.\n{MARKS[1]}"
    page.write_text(before + body + after, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
