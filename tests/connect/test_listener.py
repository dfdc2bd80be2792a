"""The listener with real sockets: handshake, ownership, credits, durability, and bad peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NoReturn

import pytest

from penstock import CreateStream, DeadLetter, Log, Record, declare, read_events
from penstock import open as open_log
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.registry import Asked, Lease, Owner, Registry, StreamClaim, records
from penstock.connect.hosts.server import READ_BYTES
from penstock.connect.protocol import wire
from penstock.connect.protocol.effects import Close
from penstock.connect.protocol.source_session import SourceSession, Terms
from penstock.log.declaring.objects import Metric
from penstock.testing.processes import wait_until
from tests.connect.peer import Peer, message

Listen = Callable[..., Listener]


class Order(Record):
    user: str
    amount: int


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([
            CreateStream(declare("raw", content="bytes", partitions=3)),
            CreateStream(declare("orders", Order, key="user")),
            CreateStream(declare("json", partitions=2)),
        ])  # fmt: skip
        yield opened


@pytest.fixture
def listen(log: Log) -> Iterator[Listen]:
    with ExitStack() as stack:

        def start(to: str = "raw", **options: Any) -> Listener:
            given = ListenerOptions(routes=[("*", to)], **options)
            return stack.enter_context(Listener(log, given, print))

        yield start


def data_of(log: Log) -> list[Any]:
    events: list[Any] = list(read_events(log, "raw"))
    return sorted(event.data for event in events)


def is_given(peer: Peer, name: str = "s") -> bool:
    answer = peer.notify(name)
    return isinstance(answer, wire.NotifyAck) and answer.success


@pytest.mark.row("W2", engine="any")
@pytest.mark.row("W5", engine="any")
def test_messages_are_stored_once_and_acknowledged_when_they_are(log: Log, listen: Listen) -> None:
    listener = listen()
    with Peer(listener.address) as peer:
        assert peer.hello() == wire.Ok(32_768)
        number = wire.stream_id("celsius")
        assert peer.notify("celsius") == wire.NotifyAck(True, number, wire.NEVER)
        peer.send(message("celsius", 0, b"a"), message("celsius", 7, b"b", b"k"))
        assert peer.next() == wire.Ack(3, ((number, 7),))
        events = list(read_events(log, "raw"))
        assert {e.data: (e.id, e.key) for e in events} == {
            b"a": ("celsius/0", b"celsius"), b"b": ("celsius/7", b"k")
        }  # fmt: skip
    with Peer(listener.address) as peer:
        peer.hello()
        assert peer.notify("celsius") == wire.NotifyAck(True, number, 7)
        peer.send(*(message("celsius", n, b"again") for n in (0, 7)), message("celsius", 8, b"c"))
        assert peer.next() == wire.Ack(4, ((number, 8),))
    assert data_of(log) == [b"a", b"b", b"c"]


@pytest.mark.row("W2", engine="any")
@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([wire.Hello("0.0.2", "", "p", "i")], "version '0.0.2'"),
        ([wire.Hello("0.0.1", "wrong", "p", "i")], "cookie"),
        ([wire.Notify(1, "s", 0)], "Notify was sent before Hello"),
        ([wire.Hello("0.0.1", "", "p", "i")] * 2, "Hello was sent twice"),
        ([wire.Hello("v0.0.1", "", "p", "i"), message("s", 1)], "which is not open"),
        ([wire.Hello("0.0.1", "", "p", "i"), wire.Ok(1)], "a connector cannot send"),
        ([wire.Hello("0.0.1", "", "p", "i"), wire.Eos(4)], "EOS was sent for stream 4"),
        ([wire.Hello("0.0.1", "", "p", "i"), wire.Notify(1, "", 0)], "1 to 1000"),
        ([wire.Hello("0.0.1", "", "p", "i"), wire.Notify(1, "s", 0), wire.Notify(1, "s", 0)],
         "requested twice"),
    ],
)  # fmt: skip
def test_a_wrong_peer_is_told_why_and_others_live_on(
    listen: Listen, frames: list[wire.Frame], why: str
) -> None:
    listener = listen()
    with Peer(listener.address) as good, Peer(listener.address) as bad:
        good.hello()
        good.notify("fine")
        bad.send(*frames)
        found: wire.Frame | None = wire.Ok(0)
        while found is not None and not isinstance(found, wire.Error):
            found = bad.next()
        assert isinstance(found, wire.Error)
        assert why in found.message
        assert bad.next() is None, "it is closed"
        good.send(message("fine", 1))
        assert good.next() == wire.Ack(2, ((wire.stream_id("fine"), 1),))


def test_bytes_that_are_no_frames_are_told_so(listen: Listen) -> None:
    with Peer(listen().address) as peer:
        peer.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        found = peer.next()
        assert isinstance(found, wire.Error)
        assert "a frame has 1195725856 bytes" in found.message
        assert peer.next() is None


@pytest.mark.row("W2", engine="any")
def test_credits_are_kept_to(listen: Listen) -> None:
    with Peer(listen(credits=4).address) as peer:
        assert peer.hello() == wire.Ok(4)
        peer.notify("s")
        peer.send(*(message("s", n) for n in range(20)))
        frames: list[Any] = [peer.next() for _ in range(2)]
        assert frames[0].points == ((wire.stream_id("s"), 2),), "what was allowed is safe"
        assert "credits" in frames[1].message
        assert peer.next() is None


@pytest.mark.row("W2", engine="any")
def test_old_clients_do_not_charge_the_end_of_a_stream() -> None:
    """Each end lets one frame too many pass, and no more."""
    session = SourceSession(Terms(credits=3))
    list(session.receive([wire.Hello("0.0.1", "", "p", "i")]))
    for name in ("s", "t"):
        list(session.receive([wire.Notify(wire.stream_id(name), name, 0)]))
        session.grant(wire.stream_id(name), wire.NEVER)
    list(session.receive([message("s", 1), wire.Eos(wire.stream_id("s"))]))
    assert session.state == "streaming", "one more than there were credits for"
    told = [effect for effect in session.receive([message("t", 1)]) if isinstance(effect, Close)]
    assert ["credits" in effect.reason for effect in told] == [True]


def test_what_came_before_a_wrong_frame_is_stored(log: Log, listen: Listen) -> None:
    with Peer(listen(frame_bytes_max=1000).address) as peer:
        peer.hello()
        peer.notify("s")
        peer.send(message("s", 1, b"good"), message("s", 2, b"x" * 2000))
        assert peer.next() == wire.Ack(2, ((wire.stream_id("s"), 1),))
        found = peer.next()
        assert isinstance(found, wire.Error)
        assert "it must have 1 to 1000" in found.message
    assert data_of(log) == [b"good"]


def test_a_message_larger_than_an_event_may_be_is_damage(log: Log, listen: Listen) -> None:
    with Peer(listen(on_damage="skip").address) as peer:
        peer.hello()
        peer.notify("s")
        peer.send(
            message("s", 1, b"good"), message("s", 2, b"x" * (3 << 20)), message("s", 3, b"z")
        )
        safe = 0
        while safe < 3:
            found = peer.next()
            assert isinstance(found, wire.Ack), found
            safe = max([safe, *(point for _, point in found.points)])
    assert data_of(log) == [b"good", b"z"]


@pytest.mark.row("W4", engine="any")
def test_a_stream_is_owned_until_its_time_is_over(
    log: Log, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner on another machine that dies; one that lives keeps it though nothing comes."""
    monkeypatch.setattr("penstock.connect.hosts.registry.LEASE_S", 2.0)
    elsewhere = Owner("elsewhere", "1.1", 1, "p", "i")
    registry = Registry(log)
    number = wire.stream_id("s")
    lease = Lease(log)
    lease.renew()
    claim = registry.take(Asked(number, "s", "raw"), elsewhere, lease.token, Told().hear)
    assert isinstance(claim, StreamClaim)
    with Peer(listen().address) as peer:
        peer.hello()
        began = time.monotonic()
        for _ in range(8):
            lease.renew()
            assert peer.notify("s") == wire.NotifyAck(False, number, wire.NEVER)
            time.sleep(0.5)
        assert time.monotonic() > began + 2.5, "longer than its time, which is moved on"
        wait_until(lambda: is_given(peer), 20, "the end of its time")


class Told:
    def hear(self) -> None:
        """Nobody asks."""


@pytest.mark.row("W4", engine="any")
@pytest.mark.parametrize("policy", ["oldest", "takeover"])
def test_two_connectors_want_one_stream(log: Log, listen: Listen, policy: str) -> None:
    listener = listen(policy=policy)
    number = wire.stream_id("s")
    with Peer(listener.address) as first, Peer(listener.address) as second:
        first.hello(instance="first")
        first.notify("s")
        first.send(message("s", 1, b"first"))
        first.next()
        second.hello(instance="second")
        answer = second.notify("s")
        if policy == "oldest":
            assert answer == wire.NotifyAck(False, number, 1)
            first.send(wire.Eos(number))
            wait_until(lambda: is_given(second), 10, "the stream being free")
        else:
            assert answer == wire.NotifyAck(True, number, 1)
            assert first.next() == wire.Restart("")
            assert first.next() is None
            with Peer(listener.address) as again:
                again.hello(instance="first")
                assert again.notify("s") == wire.NotifyAck(False, number, 1)
        second.send(message("s", 2, b"second"))
        second.next()
    assert data_of(log) == [b"first", b"second"]


@pytest.mark.row("W4", engine="any")
def test_one_owner_across_listeners(log: Log, listen: Listen) -> None:
    one, other = listen(), listen(policy="takeover")
    number = wire.stream_id("s")
    with Peer(one.address) as first, Peer(other.address) as second:
        first.hello(instance="a")
        first.notify("s")
        first.send(message("s", 1, b"1"))
        first.next()
        second.hello(instance="b")
        assert second.notify("s") == wire.NotifyAck(True, number, 1)
        first.send(message("s", 2, b"lost"))
        assert first.next() == wire.Restart("")
        second.send(message("s", 2, b"2"))
        assert second.next() == wire.Ack(2, ((number, 2),))
    assert data_of(log) == [b"1", b"2"]


def test_a_typed_stream_takes_json(log: Log, listen: Listen) -> None:
    with Peer(listen("orders").address) as peer:
        peer.hello()
        peer.notify("o")
        good = b'{"user": "ada", "amount": %d}'
        peer.send(
            message("o", 1, good % 1), message("o", 2, b'{"user": 3}'), message("o", 3, good % 3)
        )
        assert peer.next() == wire.Ack(4, ((wire.stream_id("o"), 1),))
        found = peer.next()
        assert isinstance(found, wire.Error)
        assert "message 2 of o" in found.message
    (event,) = read_events(log, "orders", Order)
    assert (event.data, event.key) == (Order("ada", 1), b"ada")


def test_damaged_messages_are_skipped_if_told(log: Log, listen: Listen) -> None:
    with Peer(listen("json", on_damage="skip").address) as peer:
        peer.hello()
        peer.notify("j")
        peer.send(*(message("j", n, d) for n, d in enumerate([b"1", b"no", b"[2]", b"\xff"])))
        assert peer.next() == wire.Ack(5, ((wire.stream_id("j"), 3),))
    assert [e.data for e in read_events(log, "json")] == [1, [2]]


def test_a_message_that_cannot_be_held_becomes_a_dead_letter(log: Log, listen: Listen) -> None:
    """Once: sent again, it is dropped like others. The connector is told that it is safe."""
    good, bad = b'{"user": "ada", "amount": 1}', b'{"user": "ada"}'
    for sent, used in ([good, bad, good], 4), ([good, bad, good, good], 5):
        with Peer(listen("orders", on_damage="dead-letter").address) as peer:
            peer.hello()
            peer.notify("o")
            peer.send(*(message("o", n, data) for n, data in enumerate(sent)))
            assert peer.next() == wire.Ack(used, ((wire.stream_id("o"), len(sent) - 1),))
    assert [event.id for event in read_events(log, "orders")] == ["o/0", "o/2", "o/3"]
    (letter,) = read_events(log, "orders_dead", DeadLetter)
    assert (letter.id, letter.data.id, letter.data.offset) == ("o/1", "o/1", 1)
    assert letter.data.data == '{"user": "ada"}'
    assert "amount" in letter.data.error
    (record,) = records(log)
    assert (record.messages, record.dropped, record.damaged) == (4, 3, 1)


def test_what_connectors_do_is_measured(log: Log) -> None:
    options = ListenerOptions(routes=[("*", "raw")], metrics_interval_ms=50, credits=100)
    with Listener(log, options) as listener, Peer(listener.address) as peer:
        peer.hello()
        peer.notify("s")
        old_ns = time.time_ns() - 7_000_000_000
        peer.send(message("s", 1, b"four"), message("s", 2, b"4"))
        peer.next()
        peer.send(wire.Message(wire.stream_id("s"), 3, old_ns, None, b""))
        peer.next()
    events = [event.data for event in read_events(log, "_system.metrics", Metric)]
    assert {tuple(e.labels.items()) for e in events} == {(("connector", "s"), ("stream", "raw"))}
    last = {event.name: event.value for event in events}
    assert last["connector.messages"] == 3
    assert last["connector.bytes"] == 5
    assert last["connector.reconnects"] == 0
    assert 0 < last["connector.credits"] <= 100
    assert 7_000 <= last["connector.lag_ms"] < 60_000


def test_a_stream_that_nobody_routes_is_refused(log: Log) -> None:
    options = ListenerOptions(routes=[("a.*", "raw"), ("b", "json")])
    with Listener(log, options) as listener, Peer(listener.address) as peer:
        peer.hello()
        assert isinstance(peer.notify("a.1"), wire.NotifyAck)
        found = peer.notify("c")
        assert isinstance(found, wire.Error)
        assert "no route" in found.message


def test_stopping_sends_connectors_away_with_everything_safe(log: Log) -> None:
    with Listener(log, ListenerOptions(routes=[("*", "raw")])) as listener:
        peer = Peer(listener.address).__enter__()
        peer.hello()
        peer.notify("s")
        peer.send(message("s", 5))
        wait_until(lambda: data_of(log), 10, "the message having come")
    with closing(peer.socket):
        assert peer.next() == wire.Ack(2, ((wire.stream_id("s"), 5),))
        assert peer.next() == wire.Restart("")
        assert peer.next() is None
    (record,) = records(log)
    assert (record.is_owned(), record.point_of_ref, record.messages) == (False, 5, 1)


@pytest.mark.row("W6", engine="any")
def test_order_is_kept_within_a_stream(log: Log, listen: Listen) -> None:
    listener = listen()
    with Peer(listener.address) as one, Peer(listener.address) as two:
        for peer, name in ((one, "a"), (two, "b")):
            peer.hello(instance=name)
            peer.notify(name)
        for start in range(0, 300, 30):
            for peer, name in ((one, "a"), (two, "b")):
                peer.send(*(message(name, n, b"%d" % n) for n in range(start, start + 30)))
        for peer in (one, two):
            safe = 0
            while safe < 299:
                found = peer.next()
                assert isinstance(found, wire.Ack)
                safe = found.points[0][1]
    for key in (b"a", b"b"):
        events: list[Any] = [e for e in read_events(log, "raw") if e.key == key]
        assert [int(event.data) for event in events] == list(range(300))


def test_a_read_that_is_just_full_does_not_end_the_connection(listen: Listen) -> None:
    """Whoever has sent a whole read and waits for credits is answered, not given up."""
    with Peer(listen().address) as peer:
        peer.hello()
        peer.notify("s")
        empty = len(wire.encode(message("s", 1, b"")))
        peer.send(message("s", 1, b"x" * (READ_BYTES - empty)))
        points = ((wire.stream_id("s"), 1),)
        assert peer.next() == wire.Ack(2, points)
        peer.send(message("s", 2))
        assert peer.next() == wire.Ack(1, ((wire.stream_id("s"), 2),))


@pytest.mark.parametrize("on_damage", ["stop", "skip"])
def test_what_only_the_log_can_refuse_is_damage_too(
    log: Log, listen: Listen, on_damage: str
) -> None:
    """Such as a key that is empty: the connector is not sent away to try for ever."""
    good, bad = b'{"user": "ada", "amount": 1}', b'{"user": "", "amount": 2}'
    with Peer(listen("orders", on_damage=on_damage).address) as peer:
        peer.hello()
        peer.notify("o")
        peer.send(*(message("o", n, data) for n, data in enumerate([good, bad, good])))
        if on_damage == "skip":
            assert peer.next() == wire.Ack(4, ((wire.stream_id("o"), 2),))
        else:
            assert peer.next() == wire.Ack(4, ((wire.stream_id("o"), 0),))
            found = peer.next()
            assert isinstance(found, wire.Error)
            assert "message 1 of o: stream orders: a key is empty" in found.message
    kept = ["o/0", "o/2"] if on_damage == "skip" else ["o/0"]
    assert [event.id for event in read_events(log, "orders")] == kept


def test_a_peer_that_only_dribbles_is_sent_away(log: Log) -> None:
    options = ListenerOptions(routes=[("*", "raw")], hello_timeout_s=0.3)
    with Listener(log, options) as listener, Peer(listener.address) as peer:
        for byte in wire.encode(wire.Hello("0.0.1", "", "p", "i")):
            try:
                peer.socket.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.1)
        found = peer.next()
        assert isinstance(found, wire.Error)
        assert "no Hello was received in time" in found.message


def test_a_stream_is_one_stream_however_a_route_writes_it(log: Log) -> None:
    """In what is kept of a connector, in metrics, and for its dead letters; those that are
    missing are made, though others are there.
    """
    log.apply([CreateStream(declare("orders_dead", DeadLetter))])
    options = ListenerOptions(
        routes=[("o", "default.orders"), ("j", "default.json")], on_damage="dead-letter"
    )
    with Listener(log, options) as listener, Peer(listener.address) as peer:
        peer.hello()
        for name in ("o", "j"):
            peer.notify(name)
            peer.send(message(name, 1, b"no"))
            assert isinstance(peer.next(), wire.Ack)
    assert sorted(record.stream for record in records(log)) == ["json", "orders"]
    letters = [
        letter.data.stream
        for name in ("orders_dead", "json_dead")
        for letter in read_events(log, name, DeadLetter)
    ]
    assert letters == ["orders", "json"]
    metrics = read_events(log, "_system.metrics", Metric)
    assert {event.data.labels["stream"] for event in metrics} == {"orders", "json"}


@pytest.mark.parametrize("on_damage", ["stop", "skip", "dead-letter"])
def test_whatever_a_message_makes_fail_is_damage_of_that_message(
    log: Log, listen: Listen, on_damage: str
) -> None:
    """Such as JSON that is nested deeper than Python follows; what came before it is stored."""
    deep = b"[" * 2000 + b"]" * 2000
    with Peer(listen("json", on_damage=on_damage).address) as peer:
        peer.hello()
        peer.notify("s")
        peer.send(*(message("s", n, data) for n, data in enumerate([b"0", deep, b"2"])))
        last = 0 if on_damage == "stop" else 2
        assert peer.next() == wire.Ack(4, ((wire.stream_id("s"), last),))
        if on_damage == "stop":
            found = peer.next()
            assert isinstance(found, wire.Error)
            assert "message 1 of s" in found.message
            assert "nested" in found.message
    kept = [event.id for event in read_events(log, "json")]
    assert kept == (["s/0"] if on_damage == "stop" else ["s/0", "s/2"])
    if on_damage == "dead-letter":
        assert [event.id for event in read_events(log, "json_dead")] == ["s/1"]


def test_a_dead_letter_is_made_of_a_message_of_any_size(log: Log, listen: Listen) -> None:
    with Peer(listen("json", on_damage="dead-letter").address) as peer:
        peer.hello()
        peer.notify("s")
        keyed, last = message("s", 2, b"no", b"k" * 5000), 2**64 - 2
        peer.send(message("s", 1, b'"%s"' % (b"\xff" * (3 << 20))), keyed, message("s", 3, b"1"))
        peer.send(message("s", last, b"not either"))
        safe = 0
        while safe < last:
            found = peer.next()
            assert isinstance(found, wire.Ack), found
            safe = max([safe, *(point for _, point in found.points)])
    assert [event.id for event in read_events(log, "json")] == ["s/3"]
    dead = [event.id for event in read_events(log, "json_dead")]
    assert dead == ["s/1", "s/2", f"s/{last}"]


def test_an_error_that_nobody_knows_ends_one_connection_and_is_told(
    log: Log, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides; the connector may come again, and what was not stored comes then."""

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("nobody knows")

    listener = listen()
    with Peer(listener.address) as other, Peer(listener.address) as peer:
        other.hello(instance="other")
        for one, name in ((other, "o"), (peer, "s")):
            if one is peer:
                one.hello()
            one.notify(name)
        with monkeypatch.context() as broken:
            broken.setattr("penstock.connect.hosts.listener.to_parts", fail)
            peer.send(message("s", 1, b"a"))
            found = peer.next()
        assert isinstance(found, wire.Error)
        assert found.message.startswith("try again later: RuntimeError: nobody knows")
        assert peer.next() is None
        other.send(message("o", 1, b"b"))
        assert isinstance(other.next(), wire.Ack)
    with Peer(listener.address) as peer:
        peer.hello()
        wait_until(lambda: is_given(peer), 20, "the stream being free")
        peer.send(message("s", 1, b"a"))
        assert isinstance(peer.next(), wire.Ack)
    assert data_of(log) == [b"a", b"b"]
