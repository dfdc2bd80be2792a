"""Connectors with thousands of streams, and who owns a stream for how long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.connect.clients.source import Source, SourceConnector
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.registry import (
    LEASE_S,
    LEASES,
    LOST_MAX,
    Asked,
    Lease,
    Owner,
    Registry,
    SourceRecord,
    StreamClaim,
    amend,
    progress_key,
    records,
    this_owner,
)
from penstock.connect.protocol import wire
from penstock.errors import ConnectorError
from penstock.log.api import Commit
from penstock.testing.processes import wait_until
from tests.connect.peer import Peer, message

RAW = ListenerOptions(routes=[("*", "raw")])


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db", upkeep_interval_ms=0) as opened:
        opened.apply([CreateStream(declare("raw", content="bytes"))])
        yield opened


class Few(Source):
    """So many messages, and then nothing more for now."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name)
        self.count = count
        self._next = 0
        self.safe: int | None = None
        self.is_open = False

    def handle_reset(self, point_of_ref: int | None) -> None:
        self._next = 0 if point_of_ref is None else point_of_ref + 1
        self.is_open = True

    def handle_next(self) -> tuple[bytes, int] | None:
        if self._next >= self.count:
            return None
        self._next += 1
        return f"{self.name}:{self._next - 1}".encode(), self._next - 1

    def handle_progress(self, stream: str, point_of_ref: int) -> None:
        self.safe = point_of_ref

    @property
    def is_done(self) -> bool:
        return self.is_open and (self.count == 0 or self.safe == self.count - 1)


@pytest.mark.row("W4", engine="any")
@pytest.mark.timeout(200)
def test_ten_thousand_streams_of_one_connector(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are opened, then half of them send at once, and nobody else gets one of them."""
    monkeypatch.setattr("penstock.connect.hosts.registry.LEASE_S", 5.0)
    sources = [Few(f"s{n}", 0) for n in range(10_000)]
    with Listener(log, RAW) as listener:
        address = "{}:{}".format(*listener.address)
        with SourceConnector(address, sources) as connector:

            def are(done: str) -> bool:
                connector.check()
                return all(getattr(source, done) for source in sources)

            wait_until(lambda: are("is_open"), 120, "all being open")
            for source in sources[::2]:
                source.count = 1
            connector.wake()
            wait_until(lambda: are("is_done"), 120, "everything being safe")
            with Peer(listener.address) as other:
                other.hello(instance="other")
                answers = [other.notify(name) for name in ("s0", "s5001", "s9999")]
            assert not any(map(is_given, answers))
            assert sum(record.is_owned() for record in records(log)) == 10_000
            assert connector.counts.connections == 1
    assert len(list(read_events(log, "raw"))) == 5000
    assert not any(record.is_owned() for record in records(log))


def test_a_connection_renews_one_lease_for_all_its_streams(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.connect.hosts.registry.LEASE_S", 1.0)
    names = [f"s{n}" for n in range(20)]

    def sequences() -> list[int]:
        found = [log.last_commit(progress_key(wire.stream_id(name))) for name in names]
        return [-1 if last is None else last.sequence for last in found]

    with Listener(log, RAW) as listener, Peer(listener.address) as peer:
        peer.hello()
        for name in names:
            peer.notify(name)
        before = sequences()
        seen: set[bytes] = set()

        def has_renewed() -> bool:
            seen.update(log.progress_items(LEASES).values())
            return len(seen) > 4

        wait_until(has_renewed, 30, "renewals")
        assert sequences() == before, "nothing is committed for each of them"
        assert all(record.is_owned() for record in records(log))
    assert log.progress_items(LEASES) == {}


def test_a_lease_is_renewed_well_before_it_ends(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever renews late would have its streams taken from it in between."""
    now_us = time.time_ns() // 1000
    monkeypatch.setattr("penstock.connect.hosts.registry.now_us", lambda: now_us)
    lease, seen = Lease(log), set()
    for _ in range(40):
        lease.renew()
        (until,) = log.progress_items(LEASES).values()
        assert int(until) >= now_us + LEASE_S * 1e6 / 2
        seen.add(until)
        now_us += int(LEASE_S * 1e5)
    assert len(seen) <= 8, "and not each time"


def test_streams_are_kept_while_messages_take_long_to_store(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than their lease: it is renewed meanwhile."""
    monkeypatch.setattr("penstock.connect.hosts.registry.LEASE_S", 1.0)
    may_go_on = threading.Event()

    def decode(data: bytes) -> bytes:
        assert may_go_on.wait(60)
        return data

    options = ListenerOptions(routes=RAW.routes, decoder=decode)
    with Listener(log, options) as listener, Peer(listener.address) as peer:
        peer.hello()
        for name in ("a", "b"):
            peer.notify(name)
        peer.send(message("a", 1), message("b", 1))
        seen: set[bytes] = set()

        def has_renewed() -> bool:
            seen.update(log.progress_items(LEASES).values())
            return len(seen) > 4

        wait_until(has_renewed, 30, "renewals")
        may_go_on.set()
        assert isinstance(peer.next(), wire.Ack)


@pytest.mark.row("W4", engine="any")
def test_of_many_that_ask_at_once_one_gets_a_stream_and_keeps_it(log: Log) -> None:
    with Listener(log, RAW) as listener, ExitStack() as stack:
        peers = [stack.enter_context(Peer(listener.address)) for _ in range(6)]
        for number, peer in enumerate(peers):
            peer.hello(instance=f"i{number}")
        for name in (f"s{n}" for n in range(15)):
            for peer in peers:
                peer.send(wire.Notify(wire.stream_id(name), name, 0))
            answers = [peer.next() for peer in peers]
            (given,) = [peer for peer, a in zip(peers, answers, strict=True) if is_given(a)]
            given.send(message(name, 1))
            assert isinstance(given.next(), wire.Ack)


def is_given(answer: wire.Frame | None) -> bool:
    assert isinstance(answer, wire.NotifyAck)
    return answer.success


def test_a_stream_that_was_given_meanwhile_is_left_to_its_owner(log: Log) -> None:
    """One listener looks, another one gives the stream away, and only then the first holds it."""
    number = wire.stream_id("s")
    asked = Asked(number, "s", "raw")
    lease = Lease(log)
    lease.renew()

    class Late(Registry):
        """Is overtaken between its first look and its hold."""

        def record(self, stream_id: int) -> SourceRecord | None:
            found = super().record(stream_id)
            if not self.given:
                owner = Owner("elsewhere", "1.1", 1, "p", "first")
                self.given.append(Registry(log).take(asked, owner, lease.token, Told().hear))
            return found

        given: list[object] = []  # noqa: RUF012  of this one test

    late = Late(log)
    found = late.take(asked, this_owner(2, "p", "second"), "x", Told().hear)
    assert isinstance(late.given[0], StreamClaim)
    assert isinstance(found, SourceRecord)
    assert found.owner is not None
    assert found.owner.instance == "first"
    # It was fenced, comes again, and gets it.
    lease.release()
    again = Registry(log).take(asked, this_owner(1, "p", "first"), "y", Told().hear)
    assert isinstance(again, StreamClaim)


def test_who_is_fenced_while_taking_a_stream_leaves_it_to_the_other(log: Log) -> None:
    """Both saw that it is free, and both hold it: the last one who did has it."""
    asked = Asked(wire.stream_id("s"), "s", "raw")
    lease = Lease(log)
    lease.renew()
    looks: list[object] = []

    class Slow(Registry):
        """Is overtaken between its second look and saving."""

        def record(self, stream_id: int) -> SourceRecord | None:
            found = super().record(stream_id)
            looks.append(found)
            if len(looks) == 2:
                owner = Owner("elsewhere", "1.1", 1, "p", "first")
                looks.append(Registry(log).take(asked, owner, lease.token, Told().hear))
            return found

    found = Slow(log).take(asked, this_owner(2, "p", "second"), "x", Told().hear)
    assert isinstance(looks[2], StreamClaim)
    assert isinstance(found, SourceRecord)
    assert found.owner is not None
    assert found.owner.instance == "first"
    looks[2].save(looks[2].record, [])  # it was not fenced by that


@pytest.mark.parametrize("when", ["before it is held", "after it is held"])
def test_a_stream_that_is_taken_meanwhile_is_not_amended(
    log: Log, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    asked = Asked(wire.stream_id("s"), "s", "raw")
    first = Registry(log).take(asked, this_owner(1, "p", "first"), "", Told().hear)
    assert isinstance(first, StreamClaim)
    first.release()
    lease = Lease(log)
    lease.renew()
    taken: list[object] = []
    look = Registry.record

    def take() -> None:
        if not taken:
            taken.append(None)
            owner = this_owner(2, "p", "second")
            taken.append(Registry(log).take(asked, owner, lease.token, Told().hear))

    def record(registry: Registry, stream_id: int) -> SourceRecord | None:
        found = look(registry, stream_id)
        if when == "before it is held":
            take()
        return found

    def forget(record: SourceRecord) -> None:
        assert when == "after it is held"
        take()

    monkeypatch.setattr(Registry, "record", record)
    with pytest.raises(ConnectorError, match=r"p second has s|has just taken s"):
        amend(log, asked.stream_id, forget)
    assert isinstance(taken[1], StreamClaim)
    assert [record.name for record in records(log)] == ["s"], "it is kept"


def test_not_everybody_who_lost_a_stream_is_remembered(log: Log) -> None:
    """However often it is taken over, what is kept of it stays small."""
    asked = Asked(wire.stream_id("s"), "s", "raw")
    owner = Owner("elsewhere", "1.1", 1, "p", "i")
    lost = tuple(f"i{n}" for n in range(LOST_MAX))
    until = time.time_ns() // 1000 + 60_000_000
    record = SourceRecord(name="s", stream="raw", owner=owner, until_us=until, lost=lost)
    progress = {progress_key(asked.stream_id): msgspec.json.encode(record)}
    log.commit(log.hold(progress_key(asked.stream_id)), 0, Commit(progress=progress))
    registry = Registry(log, "takeover")
    found = registry.take(asked, this_owner(2, "p", "new"), "x", Told().hear)
    assert isinstance(found, StreamClaim)
    assert len(found.record.lost) == LOST_MAX


class Told:
    def hear(self) -> None:
        """Nobody asks."""


def test_a_process_of_another_container_is_not_taken_for_dead() -> None:
    """They may share the host's name, and processes have the same numbers there."""
    here = this_owner(1, "p", "i")
    assert not here.is_gone()
    gone = msgspec.structs.replace(here, process="1.1")
    assert gone.is_gone()
    assert not msgspec.structs.replace(gone, space="another").is_gone()
    assert not msgspec.structs.replace(gone, space="").is_gone(), "an earlier version said nothing"
    assert here.host == socket.gethostname()


def test_what_killed_connections_leave_behind_is_forgotten(log: Log) -> None:
    now = time.time_ns() // 1000
    day = 86_400_000_000
    left = {f"{LEASES}a": b"%d" % (now - 2 * day), f"{LEASES}b": b"%d" % now}
    log.commit(log.hold("left"), 0, Commit(progress=left))
    with Listener(log, RAW):
        assert list(log.progress_items(LEASES)) == [f"{LEASES}b"]


def test_a_record_of_an_earlier_version_counts(log: Log) -> None:
    """It says itself until when it is owned."""
    owner = Owner("elsewhere", "1.1", 1, "p", "i")
    number = wire.stream_id("s")
    until = time.time_ns() // 1000 + 60_000_000
    record = SourceRecord(name="s", stream="raw", point_of_ref=7, owner=owner, until_us=until)
    progress = {progress_key(number): msgspec.json.encode(record)}
    log.commit(log.hold(progress_key(number)), 0, Commit(progress=progress))
    with Listener(log, RAW) as listener, Peer(listener.address) as peer:
        peer.hello()
        assert peer.notify("s") == wire.NotifyAck(False, number, 7)


def test_sources_that_are_many_are_asked_at_once_when_they_wake(log: Log) -> None:
    """A source that says that it has something does not wait for its turn."""
    sources = [Few(f"s{n}", 0) for n in range(300)]
    with Listener(log, RAW) as listener:
        with SourceConnector("{}:{}".format(*listener.address), sources) as connector:
            wait_until(lambda: all(source.is_open for source in sources), 60, "all being open")
            for source in sources[::100]:
                source.count = 1
                connector.wake(source.name)
            wait_until(lambda: all(s.safe == 0 for s in sources[::100]), 30, "those being safe")
