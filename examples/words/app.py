"""Counts words that another program sends, and passes the counts to a third one.

    penstock run examples/words/app.py
    python examples/words/redis_subscriber.py redis://localhost/0 texts    # or kafka_consumer.py
    python examples/words/redis_publisher.py redis://localhost/0 counts    # or kafka_producer.py

The app does not know which programs these are. Each of them can be stopped, killed and restarted at
any time.
"""

from __future__ import annotations

from collections.abc import Iterator

from descriptions import Count, Counts, Text, Texts

import penstock
from penstock import Entry

app = penstock.App("words")


class Word(penstock.Record):
    word: str


texts = Texts.from_arguments().in_app(app)
words = app.stream("words", Word, key="word")
counted = app.stream("counted", Count, key="word")
totals = app.table("totals", value=int, default=0)


@app.agent(texts, to=words)
def split(line: Text) -> Iterator[Word]:
    for word in line.text.lower().split():
        yield Word(word)


@app.agent(words, state=totals, to=counted)
def count(word: Word, total: Entry[int]) -> Iterator[Count]:
    total.value += 1
    yield Count(word.word, total.value)


Counts.from_arguments().in_app(app, counted)
