"""A program that reads a sink and writes down what it read, until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.connect.clients.reader import SinkClient


def main(folder: Path, name: str) -> None:
    with SinkClient[bytes](f"auto:{name}", folder) as sink, (folder / "read.txt").open("a") as out:
        for message in sink:
            assert sink.last is not None
            out.write(f"{sink.last.id} {message.decode()}\n")
            out.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
