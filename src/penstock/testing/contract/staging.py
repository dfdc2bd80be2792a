"""Stage, freeze and publish: the first frozen attempt wins."""

from __future__ import annotations

import msgspec
import pytest

from penstock.errors import (
    FencedError,
    PieceError,
    SequenceError,
)
from penstock.log.api import Commit, Log
from penstock.testing.contract.setting import (
    OnEngine,
    create,
    make_part,
    orders,
)


class StagingContract(OnEngine):
    # Stage, freeze and publish

    def test_a_commit_shows_exactly_the_pieces_it_names(self, log: Log) -> None:
        create(log, "a", partitions=2)
        create(log, "b")
        holder = log.hold("query")
        keep = [
            log.stage(holder, 7, make_part(log, "a", [1, 2])),
            log.stage(holder, 7, make_part(log, "b", [3])),
        ]
        log.stage(holder, 7, make_part(log, "a", [100]))  # an attempt that failed
        assert list(orders(log, "a")) == []
        done = log.commit(holder, 7, Commit(pieces=keep, progress={"q": b"7"}))
        assert [placement.stream for placement in done.placements] == ["a", "b"]
        assert sorted(e.data.amount for e in orders(log, "a")) == [1, 2]
        assert [e.data.amount for e in orders(log, "b")] == [3]
        assert log.maintain().pieces_swept == 1

    def test_the_first_frozen_attempt_wins(self, log: Log) -> None:
        create(log, "a")
        holder = log.hold("query")
        piece = log.stage(holder, 7, make_part(log, "a", [1]))
        first = log.commit(holder, 7, Commit(pieces=[piece], progress={"q": b"1"}))
        assert log.commit(holder, 7, Commit(pieces=[piece])).repeated
        with pytest.raises(SequenceError):
            log.stage(holder, 7, make_part(log, "a", [2]))
        replay = log.hold("query")
        with pytest.raises(SequenceError):
            log.stage(replay, 7, make_part(log, "a", [2, 3]))
        again = log.commit(replay, 7, Commit(parts=[make_part(log, "a", [2, 3])]))
        assert again == msgspec.structs.replace(first, repeated=True)
        with pytest.raises(FencedError):
            log.commit(holder, 7, Commit(pieces=[piece]))
        assert [e.data.amount for e in orders(log, "a")] == [1]

    def test_a_piece_belongs_to_its_commit(self, log: Log) -> None:
        create(log, "a")
        holder, other = log.hold("one"), log.hold("two")
        piece = log.stage(holder, 1, make_part(log, "a", [1]))
        for who, sequence, pieces in (
            (other, 1, [piece]),
            (holder, 2, [piece]),
            (holder, 1, [piece, piece]),
        ):
            with pytest.raises(PieceError):
                log.commit(who, sequence, Commit(pieces=pieces))
        log.commit(holder, 1, Commit(pieces=[piece]))
        assert [e.data.amount for e in orders(log, "a")] == [1]

    def test_orphaned_pieces_are_swept_and_live_ones_kept(self, log: Log) -> None:
        create(log, "a")
        old = log.hold("q")
        log.stage(old, 0, make_part(log, "a", [1]))
        live = log.hold("q")
        piece = log.stage(live, 0, make_part(log, "a", [2]))
        assert log.maintain().pieces_swept == 1
        log.commit(live, 0, Commit(pieces=[piece]))
        assert [e.data.amount for e in orders(log, "a")] == [2]
