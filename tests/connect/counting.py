"""A source program to be killed: two streams of numbers, each from where the log has it."""

from __future__ import annotations

import sys

from penstock.connect.clients.source import SourceConnector
from tests.connect.test_sources import Numbers


def main(address: str, until: int) -> None:
    sources = [Numbers("a", until), Numbers("b", until)]
    with SourceConnector(address, sources) as connector:
        connector.finish(120)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
