"""A process that writes or reads so many bytes of Arrow data, and says how much memory it took.

Prints the resident memory in MB after the first tenth, and the most there was.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import penstock
from bench.embedded import new_log, typed_rows


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def write(path: Path, size: int) -> tuple[float, float]:
    data = typed_rows()
    tenth, most = 0.0, 0.0
    count = size // data.nbytes
    with new_log(path) as log, penstock.Producer(log) as producer:
        for n in range(count):
            producer.append("orders", data)
            most = max(most, resident_mb())
            if n == count // 10:
                tenth = most
    return tenth, most


def read(path: Path, size: int) -> tuple[float, float]:
    tenth, most, done = 0.0, 0.0, 0
    with penstock.open(path) as log:
        for batch in penstock.read_batches(log, "orders"):
            done += batch.data().nbytes
            most = max(most, resident_mb())
            if done < size // 10:
                tenth = most
    return tenth, most


if __name__ == "__main__":
    mode, path, size = sys.argv[1:]
    print(*(write if mode == "write" else read)(Path(path), int(size)))
