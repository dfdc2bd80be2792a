"""Counts words, the hello-world of streams.

    python examples/word_count.py

Expected output:

    be 2
    is 1
    not 1
    or 1
    question 1
    that 1
    the 1
    to 3
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

import penstock
from penstock.spark import running

app = penstock.App("words")


class Line(penstock.Record):
    text: str


class Word(penstock.Record):
    word: str


lines = app.stream("lines", Line)
words = app.stream("words", Word, key="word")


@app.agent(lines, to=words)
def split(line: Line) -> Iterator[Word]:
    for word in line.text.lower().replace(",", "").split():
        yield Word(word)


@app.derive_table(words, key="word")
def counts(words: DataFrame) -> DataFrame:
    return words.groupBy("word").count()


def main() -> None:
    app.feed([Line("To be, or not to be,"), Line("that is the question to")], to=lines)
    with (
        tempfile.TemporaryDirectory() as folder,
        penstock.open(os.environ.get("PENSTOCK_LOG") or Path(folder, "words.db")) as log,
    ):
        with running(app, log, checkpoints=Path(folder, "spark")) as runner:
            runner.until_idle(120)
        for word, row in penstock.Table[Any](log, "counts").items():
            print(word.decode(), row.count)


if __name__ == "__main__":
    main()
