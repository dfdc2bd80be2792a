"""What Penstock remembers of a sink: what it lets go, what it sends again, what it refuses."""

from __future__ import annotations

import msgspec
import pytest

from penstock.app.running.positions import SinkPosition, pack_position, unpack_position
from penstock.connect.protocol.marks import Mark
from penstock.connect.push.books import (
    Decision,
    Share,
    SinkBooks,
    SinkPlace,
    SinkProgress,
    SinkVote,
    WorkerBook,
    accept,
    find_missing,
)
from penstock.connect.push.delivery import Delivered
from penstock.errors import ConnectorError, SinkGoneError

WHERE = SinkPlace("h:1", "begin anew")
SHARE = Share((("s", 0, 0, 9),))


def decision(name: str, start: int, end: int, messages: int) -> Decision:
    return Decision(name, start, end, messages, "d", SHARE)


BOOK = WorkerBook(
    end=30, messages=106, transactions=4, last="t4", counted=6,
    open=(decision("t2", 10, 20, 2), decision("t3", 20, 20, 1), decision("t4", 20, 30, 2)),
)  # fmt: skip
"""Three open decisions, the second without bytes: marks 10.1, 20.3, 20.4 and 30.6."""


def at(applied: Mark, staged: Mark | None = None) -> SinkProgress:
    return SinkProgress(applied, staged or applied)


@pytest.mark.row("X10", engine="any")
@pytest.mark.parametrize(
    ("applied", "left"),
    [
        (Mark(10, 1), ["t2", "t3", "t4"]), (Mark(15, 2), ["t2", "t3", "t4"]),
        (Mark(20, 3), ["t3", "t4"]), (Mark(20, 4), ["t4"]), (Mark(30, 6), []),
    ],
)  # fmt: skip
def test_what_the_target_has_is_let_go(applied: Mark, left: list[str]) -> None:
    found = BOOK.without_applied(at(applied, Mark(30, 6)))
    assert [one.transaction for one in found.open] == left
    assert found.has_decided("t4")
    assert BOOK.without_applied(None).open == (), "one that does not count has everything"


@pytest.mark.row("X10", engine="any")
@pytest.mark.parametrize(
    ("staged", "missing"),
    [
        (Mark(30, 6), []), (Mark(20, 4), [("t4", 0)]), (Mark(25, 5), [("t4", 1)]),
        (Mark(20, 3), [("t3", 0), ("t4", 0)]),
        (Mark(12, 2), [("t2", 1), ("t3", 0), ("t4", 0)]),
        (Mark(10, 1), [("t2", 0), ("t3", 0), ("t4", 0)]),
    ],
)  # fmt: skip
def test_what_a_sink_lacks_is_sent_again(staged: Mark, missing: list[tuple[str, int]]) -> None:
    found = find_missing(BOOK, "w", at(Mark(10, 1), staged), WHERE)
    assert [(one.decision.transaction, one.skip) for one in found] == missing


@pytest.mark.row("X10", engine="any")
@pytest.mark.parametrize("staged", [Mark(9, 0), Mark(), Mark(30, 7), Mark(31, 6)])
def test_a_sink_that_is_another_one_is_refused(staged: Mark) -> None:
    with pytest.raises(ConnectorError, match="a different sink, or has lost data; begin anew"):
        find_missing(BOOK, "w", at(staged), WHERE)
    with pytest.raises(ConnectorError, match="a different sink"):
        find_missing(msgspec.structs.replace(BOOK, open=()), "w", at(Mark(20, 4)), WHERE)


def test_a_sink_that_begins_or_stops_to_count_is_believed_where_it_has_everything() -> None:
    silent = accept(BOOK, "w", 30, None, WHERE)
    assert (silent.counted, silent.open) == (None, ())
    with pytest.raises(ConnectorError, match="has 20 bytes of worker w, but 30 bytes were"):
        accept(BOOK, "w", 20, None, WHERE)
    counting = accept(silent, "w", 30, at(Mark(30, 0)), WHERE)
    assert counting.counted == 0
    with pytest.raises(ConnectorError):
        accept(silent, "w", 29, at(Mark(29, 0)), WHERE)
    fresh = accept(WorkerBook(), "w", 12, at(Mark(12, 3)), WHERE)
    assert (fresh.end, fresh.counted) == (12, 3), "a new query, on a sink that has some"


def test_a_decision_follows_the_one_before() -> None:
    books = SinkBooks(1, {"w": BOOK})
    vote = SinkVote("w", "t5", 30, 37, 3, "e", at(Mark(20, 4), Mark(30, 6)))
    book = books.decide([vote], {"w": SHARE}, WHERE).book("w")
    assert [one.transaction for one in book.open] == ["t4", "t5"]
    assert (book.end, book.counted, book.messages, book.transactions) == (37, 9, 109, 5)
    with pytest.raises(SinkGoneError, match="sending them again"):
        lacking = vote._replace(start=20, progress=at(Mark(20, 4)))
        books.decide([lacking], {"w": SHARE}, WHERE)
    saved = msgspec.json.decode(msgspec.json.encode(books), type=SinkBooks)
    assert saved == books


def test_what_earlier_versions_saved_is_read() -> None:
    text = (
        b'{"producer":"p","sequence":3,"next":{"s":{"0":5}},"sink_workers":2,'
        b'"transactions":{"w":["t9",40,7,3]}}'
    )
    position = unpack_position(text)
    expected = WorkerBook(end=40, messages=7, transactions=3, last="t9")
    assert isinstance(position, SinkPosition)
    assert position.books == SinkBooks(2, {"w": expected})
    assert unpack_position(pack_position(position)) == position
    delivered = msgspec.json.decode(
        b'{"kind":"stream","stream":"s","stream_id":1,"next":{"0":5},"transactions":{"w":["t9",40]}}',
        type=Delivered,
    )
    assert delivered.sink == SinkBooks(1, {"w": WorkerBook(end=40, last="t9")})
