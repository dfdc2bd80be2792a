"""What a source connection may say, and what is made of it: the listener's side, with sockets
where something is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.connect.hosts.intake import to_parts
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.registry import Registry, SourceRecord, StreamClaim, records
from penstock.connect.protocol import wire
from penstock.connect.protocol.effects import Close, Send
from penstock.connect.protocol.source_session import Ask, SourceEffect, SourceSession, Terms
from penstock.errors import LogError
from penstock.log.api import Part
from penstock.log.writing.compose import Composer
from penstock.testing.processes import wait_until
from tests.connect.peer import Peer, message

RAW = ListenerOptions(routes=[("*", "raw")], metrics_interval_ms=0)
NUMBER = wire.stream_id("s")
HELLO = wire.Hello(wire.SOURCE_VERSION, "", "p", "i")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as opened:
        opened.apply([CreateStream(declare("raw", content="bytes"))])
        yield opened


@pytest.fixture
def peer(log: Log) -> Iterator[Peer]:
    """A connector that has the stream `s`."""
    with Listener(log, RAW, print) as listener, Peer(listener.address) as found:
        found.hello()
        assert found.notify("s") == wire.NotifyAck(True, NUMBER, wire.NEVER)
        yield found


def data_of(log: Log) -> list[Any]:
    return [event.data for event in read_events(log, "raw")]


def is_safe(log: Log, number: int) -> bool:
    return [record.point_of_ref for record in records(log)] == [number]


def failure(effects: Iterable[SourceEffect]) -> str:
    """Why a session ends the connection, which it tells too; nothing is asked for before that."""
    before: list[wire.Frame] = []
    for effect in effects:
        match effect:
            case Send(frame=frame):
                before.append(frame)
            case Close(reason=reason):
                assert before[-1] == wire.Error(reason)
                return reason
            case Ask():
                break
    raise AssertionError("it goes on")


@pytest.mark.row("W2", engine="any")
def test_a_number_that_comes_twice_before_it_is_stored_is_stored_once(log: Log, peer: Peer) -> None:
    """Both are in one read: that the first is not safe yet is no reason to take the second."""
    peer.send(message("s", 1, b"a"), message("s", 1, b"again"))
    assert peer.next() == wire.Ack(3, ((NUMBER, 1),))
    assert peer.next() == wire.Error("message 1 of stream s was sent after message 1")
    assert peer.next() is None
    assert data_of(log) == [b"a"]


@pytest.mark.row("W2", engine="any")
def test_what_was_stored_on_this_connection_may_come_again_on_it(log: Log, peer: Peer) -> None:
    peer.send(message("s", 1, b"a"))
    assert peer.next() == wire.Ack(2, ((NUMBER, 1),))
    peer.send(message("s", 1, b"again"), message("s", 2, b"b"))
    found = peer.next()
    assert isinstance(found, wire.Ack)
    assert found.points == ((NUMBER, 2),)
    assert data_of(log) == [b"a", b"b"]
    assert [record.dropped for record in records(log)] == [1]


@pytest.mark.row("W2", engine="any")
def test_the_number_that_means_never_is_none_of_a_message(log: Log, peer: Peer) -> None:
    """As a point of reference it would let the stream begin anew, and everything come twice."""
    peer.send(message("s", 1, b"a"), message("s", wire.NEVER, b"b"))
    assert peer.next() == wire.Ack(3, ((NUMBER, 1),))
    assert peer.next() == wire.Error(f"{wire.NEVER} is not a valid message number")
    assert data_of(log) == [b"a"]
    assert is_safe(log, 1)


@pytest.mark.row("W2", engine="any")
def test_the_end_of_a_stream_comes_after_its_messages(log: Log, peer: Peer) -> None:
    """All in one read: they are stored and acknowledged, and then it is free."""
    peer.send(message("s", 1, b"a"), wire.Eos(NUMBER))
    assert peer.next() == wire.Ack(3, ((NUMBER, 1),))
    wait_until(lambda: not any(r.is_owned() for r in records(log)), 30, "the stream being free")
    assert data_of(log) == [b"a"]
    assert peer.notify("s") == wire.NotifyAck(True, NUMBER, 1)


def test_what_came_before_a_connectors_error_is_stored(log: Log, peer: Peer) -> None:
    peer.send(message("s", 1, b"a"), wire.Error("I give up"))
    assert peer.next() == wire.Ack(2, ((NUMBER, 1),))
    assert peer.next() is None
    assert data_of(log) == [b"a"]


def test_a_connector_that_comes_again_waits_for_its_old_connection_to_be_gone(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not told at once that another one has its stream."""
    monkeypatch.setattr("penstock.connect.hosts.listener.GRACE_S", 20.0)
    take, found = Registry.take, list[object]()

    def noted(registry: Registry, *asked: Any) -> StreamClaim | SourceRecord:
        found.append(claim := take(registry, *asked))
        return claim

    monkeypatch.setattr(Registry, "take", noted)
    with Listener(log, RAW) as listener, Peer(listener.address) as again:
        with Peer(listener.address) as before:
            for one in (before, again):
                one.hello()
            before.notify("s")
            again.send(wire.Notify(NUMBER, "s", 0))
            wait_until(lambda: isinstance(found[-1], SourceRecord), 30, "its being refused once")
        assert again.next() == wire.NotifyAck(True, NUMBER, wire.NEVER)


def test_a_log_that_fails_is_no_fault_of_the_connector(
    log: Log, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent away, and comes again; an error would be told to whoever looks after it."""

    def save(claim: StreamClaim, record: SourceRecord, parts: list[Part]) -> None:
        raise LogError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(StreamClaim, "save", save)
        peer.send(message("s", 1, b"a"))
        assert peer.next() == wire.Restart("")
        assert peer.next() is None
    assert data_of(log) == []


def test_what_could_not_be_stored_is_not_acknowledged(log: Log) -> None:
    """Of a stream of which nothing is safe, the answer would say that all of it is."""

    def decode(data: bytes) -> object:
        raise ValueError("no")

    options = ListenerOptions(routes=RAW.routes, decoder=decode)
    with Listener(log, options) as listener, Peer(listener.address) as peer:
        peer.hello()
        peer.notify("s")
        peer.send(message("s", 1, b"a"))
        found = list(iter(peer.next, None))
    assert isinstance(found[-1], wire.Error)
    assert not any(frame.points for frame in found if isinstance(frame, wire.Ack))
    assert is_safe(log, wire.NEVER)


def test_what_is_decoded_keeps_its_order_too(log: Log) -> None:
    """A message without a key has its stream's name for one, so that all are in one partition."""
    options = ListenerOptions(routes=RAW.routes, decoder=bytes.upper)
    with Listener(log, options) as listener, Peer(listener.address) as peer:
        peer.hello()
        peer.notify("s")
        peer.send(message("s", 1, b"a"), message("s", 2, b"b", b"k"))
        assert isinstance(peer.next(), wire.Ack)
    found = [(event.data, event.key, event.id) for event in read_events(log, "raw")]
    assert sorted(found) == [(b"A", b"s", "s/1"), (b"B", b"k", "s/2")]


def test_a_lack_of_memory_is_no_damage_of_a_message(log: Log) -> None:
    def decode(data: bytes) -> object:
        raise MemoryError

    composer, stream = Composer("p", log.limits), log.stream("raw")
    with pytest.raises(MemoryError):
        to_parts(composer, log.limits, stream, "s", [message("s", n) for n in (1, 2)], decode)


def test_streams_that_nobody_has_answered_for_count_too() -> None:
    """A connector that asks for all at once has no more of them than one that waits."""
    session = SourceSession(Terms(streams_max=2))
    asked = [wire.Notify(number, f"s{number}", 0) for number in (1, 2, 3)]
    assert failure(session.receive([HELLO, *asked])) == "a connection can have at most 2 streams"
