"""The streams that this app shares with other programs: what both halves agree on."""

from __future__ import annotations

import penstock
from penstock import SinkDescription, SourceDescription


class Text(penstock.Record):
    text: str


class Count(penstock.Record):
    word: str
    count: int


class Texts(SourceDescription[Text]):
    name = "texts"
    record = Text


class Counts(SinkDescription[Count]):
    name = "counts"
    record = Count
