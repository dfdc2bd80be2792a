"""The library for authors of sources: the controller, writing, generators; under kills."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from penstock import CreateStream, Log, declare, read_events
from penstock import open as open_log
from penstock.connect.clients.source import END, ConnectorOptions, Source, SourceConnector
from penstock.connect.clients.writer import SourceClient, source
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.registry import records
from penstock.connect.protocol import wire
from penstock.connect.protocol.numbering import OwnNumbers
from penstock.connect.protocol.source_client import ClientSession, Failed, Greeting, Restarted
from penstock.errors import BufferFullError, ConnectorError, ConnectorTimeoutError, UsageError
from penstock.testing.processes import wait_until
from tests.connect.peer import Peer

RAW = ListenerOptions(routes=[("*", "raw")])


class Numbers(Source):
    """Counts; remembers how it was used."""

    def __init__(self, name: str, until: int, step: int = 1) -> None:
        super().__init__(name)
        self.until = until
        self.step = step
        self.next = 0
        self.calls: list[object] = []
        self.safe = -1

    def handle_open(self) -> None:
        self.calls.append("open")

    def handle_reset(self, point_of_ref: int | None) -> None:
        self.calls.append(point_of_ref)
        self.next = 0 if point_of_ref is None else point_of_ref + self.step

    def handle_next(self) -> Any:
        if self.next >= self.until:
            return END
        self.next += self.step
        number = self.next - self.step
        return f"{self.name}:{number}".encode(), number

    def handle_progress(self, stream: str, point_of_ref: int) -> None:
        assert stream == self.name
        assert point_of_ref > self.safe
        self.safe = point_of_ref

    def handle_close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("raw", content="bytes", partitions=2))])
        yield opened


def address_of(listener: Listener) -> str:
    return "{}:{}".format(*listener.address)


@contextmanager
def running(log: Log, sources: Sequence[Source]) -> Iterator[SourceConnector]:
    with Listener(log, RAW) as listener:
        with SourceConnector(address_of(listener), sources) as connector:
            yield connector


def data_of(log: Log) -> Counter[str]:
    events: list[Any] = list(read_events(log, "raw"))
    return Counter(event.data.decode() for event in events)


@pytest.mark.row("W3", engine="any")
def test_a_controller_runs_beside_the_program(log: Log) -> None:
    sources = [Numbers("a", 3000), Numbers("b", 50, step=7)]
    with running(log, sources) as connector:
        connector.finish(30)
        assert connector.counts.messages == 3000 + 8
    assert data_of(log) == Counter(
        [f"a:{n}" for n in range(3000)] + [f"b:{n}" for n in range(0, 50, 7)]
    )
    assert sources[0].calls == ["open", None, "close"]
    assert (sources[0].safe, sources[1].safe) == (2999, 49)


@pytest.mark.row("W3", engine="any")
@pytest.mark.row("W5", engine="any")
def test_a_source_goes_on_where_the_log_has_it(log: Log) -> None:
    for until in (10, 10, 25):
        numbers = Numbers("a", until)
        with running(log, [numbers]) as connector:
            connector.finish(30)
    assert numbers.calls[1] == 9
    assert data_of(log) == Counter(f"a:{n}" for n in range(25))


def test_what_a_source_raises_ends_the_connector(log: Log) -> None:
    class Broken(Numbers):
        def handle_next(self) -> Any:
            raise OSError("the file is gone")

    broken = Broken("a", 3)
    with running(log, [broken]) as connector:
        with pytest.raises(ConnectorError, match="source a failed: OSError: the file is gone"):
            connector.finish(30)
    assert broken.calls[-1] == "close"


@pytest.mark.row("W4", engine="any")
def test_a_connector_without_any_stream_fails_clearly(log: Log) -> None:
    class Endless(Numbers):
        def handle_next(self) -> Any:
            return None

    options = ConnectorOptions(take_timeout_s=0.5)
    with Listener(log, RAW) as listener:
        address = address_of(listener)
        with SourceConnector(address, [Endless("a", 1)]) as first:
            wait_until(lambda: list(records(log)), 10, "the first one having it")
            with SourceConnector(address, [Endless("a", 1)], options) as second:
                with pytest.raises(ConnectorError, match="another connector has a"):
                    second.finish(30)
            first.check()


def test_a_refusal_is_raised(log: Log) -> None:
    guarded = ListenerOptions(routes=[("*", "raw")], cookie="secret")
    with Listener(log, guarded) as listener, SourceClient(address_of(listener), "a") as client:
        with pytest.raises(ConnectorError, match="wrong cookie"):
            client.write(b"x", timeout_s=20)
        client.close(flush=False)


@pytest.mark.row("W7", engine="any")
def test_writing_with_partitions_and_sequences(log: Log) -> None:
    with Listener(log, RAW) as listener:
        with SourceClient(address_of(listener), "s") as client:
            for n in range(100):
                client.write(f"x{n}", partition=n % 3, sequence=n)
            client.write("own", key="k", time_ns=1_700_000_000_000_000_000)
        with SourceClient(address_of(listener), "s") as client:  # everything again, and more
            assert client.point_of_ref(0) == 99
            for n in range(120):
                client.write(f"x{n}", partition=n % 3, sequence=n)
            with pytest.raises(UsageError, match="use 0, 1, 2"):
                client.write("x", partition=0, sequence=client.point_of_ref(0))
    assert data_of(log) == Counter([*(f"x{n}" for n in range(120)), "own"])
    (own,) = [event for event in read_events(log, "raw") if event.data == b"own"]
    assert (own.key, own.id.partition("/")[0], own.time.year) == (b"k", "s", 2023)
    assert {record.name for record in records(log)} == {"s", "s.0", "s.1", "s.2"}


def test_what_is_not_confirmed_is_bounded() -> None:
    with SourceClient("127.0.0.1:9", "s", buffer_bytes_max=10_000) as client:
        with pytest.raises(BufferFullError, match="has confirmed no message"):
            for n in range(1000):
                client.write(b"x" * 100, sequence=n, timeout_s=0.3)
        with pytest.raises(ConnectorTimeoutError):
            client.flush(0.1)
        client.close(flush=False)


@pytest.mark.row("W7", engine="any")
def test_a_generator_is_a_source(log: Log) -> None:
    @source("lines")
    def lines(after: int | None) -> Iterator[Any]:
        for number, line in enumerate(["one", "two", None, "three"]):
            if line is None:
                yield None
            elif after is None or number > after:
                yield line, number

    for _ in range(2):
        with running(log, [lines()]) as connector:
            connector.finish(30)
    assert data_of(log) == Counter(["one", "two", "three"])


@pytest.mark.row("W4", engine="any")
def test_a_third_connector_takes_two_streams_from_each_of_two_others(log: Log) -> None:
    """Twelve partitions over two connectors; a third is added, under load; nothing is lost."""
    names = [f"p{n}" for n in range(12)]
    sources: dict[str, list[Numbers]] = {name: [] for name in names}

    def numbers(name: str) -> Numbers:
        made = Numbers(name, 4000)
        sources[name].append(made)
        return made

    with Listener(log, ListenerOptions(routes=[("*", "raw")], credits=200)) as listener:
        address = address_of(listener)
        with (
            SourceConnector(address, [numbers(n) for n in names[:6]]) as one,
            SourceConnector(address, [numbers(n) for n in names[6:]]) as two,
            SourceConnector(address, []) as three,
        ):
            wait_until(lambda: one.counts.messages > 500 < two.counts.messages, 30, "load")
            for connector, mine in ((one, names[:2]), (two, names[6:8])):
                for name in mine:
                    connector.give_back(name)
                    three.add(numbers(name))
            for connector in (one, two, three):
                connector.finish(60)
    assert data_of(log) == Counter(f"{name}:{n}" for name in names for n in range(4000))
    assert all(len(sources[name]) == 2 for name in (*names[:2], *names[6:8]))


class Programs:
    """A listener and a program that writes, each a process that can be killed and started again."""

    def __init__(self, log: str, total: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            address = f"127.0.0.1:{found.getsockname()[1]}"
        self._commands = {
            "listener": ["penstock.cli", "listen", "raw", "--log", log, "--at", address],
            "writer": ["tests.connect.counting", address, str(total)],
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self.kill(name)

    def ensure(self, name: str) -> subprocess.Popen[bytes]:
        """The program, started if it does not run."""
        found = self._running.get(name)
        if found is None or found.poll() is not None:
            command = [sys.executable, "-m", *self._commands[name]]
            found = self._running[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        return found

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running.pop(name).wait(30)


@pytest.mark.row("W5", engine="any")
@pytest.mark.timeout(240)
def test_kills_on_either_side(log: Log, chance: random.Random) -> None:
    feed_under_kills(log, 200_000, chance)


def feed_under_kills(log: Log, total: int, chance: random.Random) -> None:
    """The listener is killed with -9 again and again, and so is the program that writes."""

    def stored() -> int:
        return sum(record.messages for record in records(log))

    with Programs(log.url, total) as programs:
        for n in range(6):
            programs.ensure("listener")
            programs.ensure("writer")
            before = stored()
            wait_until(lambda: stored() > before or stored() == 2 * total, 60, "messages")  # noqa: B023
            threading.Event().wait(chance.random() / 2)
            programs.kill(("listener", "writer")[n % 2])
        programs.ensure("listener")
        assert programs.ensure("writer").wait(120) == 0
        opened = max(record.opened for record in records(log))
    assert opened > 3, "the kills came too late"
    for name in ("a", "b"):
        texts = [event.data.decode() for event in read_events(log, "raw")]  # type: ignore[attr-defined]
        mine = [int(text[2:]) for text in texts if text.startswith(name)]
        assert mine == sorted(mine), "the order of a stream is kept"
    assert data_of(log) == Counter(f"{name}:{n}" for name in ("a", "b") for n in range(total))


def test_a_listener_that_is_away_is_told_of_once(log: Log) -> None:
    told: list[str] = []
    options = ConnectorOptions(backoff_s=0.01, backoff_s_max=0.05, tell=told.append)
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    with SourceConnector(address, [Numbers("a", 10)], options) as connector:
        wait_until(lambda: told, 30, "something being said")
        with Listener(log, ListenerOptions(routes=RAW.routes, address=address)):
            connector.finish(30)
            assert len(told) == 2
    assert told[0].startswith(f"the listener at {address} is not available (")
    assert told[1] == f"the listener at {address} is available again"


class Wrong(Source):
    """An author's mistake."""

    def __init__(self, found: Any) -> None:
        super().__init__("wrong")
        self._found = found

    def handle_reset(self, point_of_ref: int | None) -> None:
        pass

    def handle_next(self) -> Any:
        return self._found


@pytest.mark.parametrize("found", [("text", 1), (b"x", -1), (b"x", 1, None, 0, 5), (b"x", 1 << 70)])
def test_what_is_no_message_ends_the_connector(log: Log, found: Any) -> None:
    with Listener(log, RAW) as listener:
        with SourceConnector(address_of(listener), [Wrong(found)]) as connector:
            with pytest.raises(ConnectorError, match="source wrong failed"):
                connector.finish(30)


def test_a_source_that_is_given_back_is_closed_and_may_come_again(log: Log) -> None:
    closed: list[str] = []

    class Closing(Numbers):
        def handle_close(self) -> None:
            closed.append(self.name)

    with Listener(log, RAW) as listener:
        with SourceConnector(address_of(listener), [Closing("a", 5)]) as connector:
            connector.finish(30)
            connector.give_back("a")
            wait_until(lambda: closed == ["a"], 30, "it being closed")
            connector.add(Closing("a", 10))
            connector.finish(30)
    assert data_of(log) == Counter(f"a:{n}" for n in range(10))


def test_many_open_files_are_no_obstacle(log: Log) -> None:
    with ExitStack() as files, Listener(log, RAW) as listener:
        for _ in range(1100):
            files.enter_context(open("/dev/null"))
        with SourceConnector(address_of(listener), [Numbers("a", 10)]) as connector:
            connector.finish(30)


def test_messages_that_were_not_sent_come_behind_those_of_another(log: Log) -> None:
    """A program without numbers of its own loses nothing to one that was first."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    options = ListenerOptions(routes=RAW.routes, address=address)
    quick = ConnectorOptions(backoff_s=0.01, backoff_s_max=0.05)
    with SourceClient(address, "s", options=quick) as one:
        with Listener(log, options):
            one.write("a0")
            one.flush()
        one.write("a1")
        one.write("a2")
        with Listener(log, RAW) as listener, SourceClient(address_of(listener), "s") as two:
            two.write("b1")
            two.write("b2")
            two.flush()
        with Listener(log, options):
            one.flush()
    assert data_of(log) == Counter(["a0", "a1", "a2", "b1", "b2"])


def swallow(server: socket.socket, name: str, point: int, count: int) -> None:
    """Be a listener that takes so many messages of a stream, stores none, and dies."""
    peer, _ = server.accept()
    with peer:
        parser = wire.Parser()
        seen = 0
        while seen < count:
            for frame in parser.feed(peer.recv(1 << 16)):
                if isinstance(frame, wire.Hello):
                    peer.sendall(wire.encode(wire.Ok(100)))
                elif isinstance(frame, wire.Notify):
                    answer = wire.NotifyAck(True, wire.stream_id(name), point)
                    peer.sendall(wire.encode(answer))
                seen += isinstance(frame, wire.Message)


@pytest.mark.parametrize("others", [0, 1, 2, 3])
def test_what_another_program_wrote_is_not_taken_for_ones_own(log: Log, others: int) -> None:
    """Two messages were sent and not stored when the listener died; another program writes as
    many, or fewer, or more. What the first wrote is there, or it is told that nobody knows.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    options = ListenerOptions(routes=RAW.routes, address=address)
    quick = ConnectorOptions(backoff_s=0.01, backoff_s_max=0.05)
    with SourceClient(address, "s", options=quick) as one:
        with Listener(log, options):
            one.write("a0")
            one.flush()
        (record,) = records(log)
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as dying:
            one.write("a1")
            one.write("a2")
            swallow(dying, "s", record.point_of_ref, 2)
        with Listener(log, RAW) as listener, SourceClient(address_of(listener), "s") as two:
            for n in range(others):
                two.write(f"b{n}")
        with Listener(log, options):
            if others:
                with pytest.raises(ConnectorError, match="another program has written to s"):
                    one.flush(30)
                one.close(flush=False)
            else:
                one.flush(30)
    mine = ["a0", "a1", "a2"] if not others else ["a0"]
    assert data_of(log) == Counter([*mine, *(f"b{n}" for n in range(others))])


def test_numbers_of_ones_own_are_not_mixed_with_those_given_here(log: Log) -> None:
    """They would be taken for numbers that are safe already."""
    with Listener(log, RAW) as listener:
        with SourceClient(address_of(listener), "s") as client:
            client.write("a")
            with pytest.raises(UsageError, match="s was written to without numbers before"):
                client.write("b", sequence=1)
        with SourceClient(address_of(listener), "s") as client:
            assert client.point_of_ref() is not None
            with pytest.raises(UsageError, match="s was written to without numbers before"):
                client.write("c", sequence=1)
            client.write("d")
    assert data_of(log) == Counter(["a", "d"])


def test_a_listener_that_sends_it_nowhere_ends_the_connector() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with SourceConnector(address, [Numbers("a", 10)]) as connector:
            peer, _ = server.accept()
            with peer:
                peer.sendall(wire.encode(wire.Ok(10)) + wire.encode(wire.Restart("nowhere")))
                with pytest.raises(ConnectorError, match="'nowhere' is not a valid address"):
                    connector.finish(30)


@pytest.mark.row("W3", engine="any")
def test_a_restart_somewhere_else_is_followed(log: Log) -> None:
    with Listener(log, RAW) as listener, socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with SourceConnector(address, [Numbers("a", 10)]) as connector:
            peer, _ = server.accept()
            with peer:
                away = wire.Restart(address_of(listener))
                peer.sendall(wire.encode(wire.Ok(10)) + wire.encode(away))
                connector.finish(30)
    assert len(data_of(log)) == 10


def test_a_listener_that_never_answers_is_left() -> None:
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options = ConnectorOptions(answer_timeout_s=0.5, tell=told.append)
        with SourceConnector(address, [Numbers("a", 10)], options):
            silent, _ = server.accept()
            again, _ = server.accept()
            with silent, again:
                again.sendall(wire.encode(wire.Ok(10)))  # and nothing about the stream
                with accepted(server) as third:  # it gives the stream, and confirms nothing of it
                    give(third, "a", 100)
                    fourth, _ = server.accept()
                    fourth.close()
    assert sum("has not answered for 0.5 s" in line for line in told) >= 1


# A listener that says what a test likes


@contextmanager
def accepted(server: socket.socket) -> Iterator[Peer]:
    """A connector's connection, as the listener has it."""
    peer = Peer(server.getsockname())
    server.settimeout(30)
    peer.socket, _ = server.accept()
    peer.socket.settimeout(30)
    with peer.socket:
        yield peer


def give(peer: Peer, name: str, credits_: int) -> int:
    """Let the connector in, and give it the stream that it asks for; the stream's id."""
    assert isinstance(peer.next(), wire.Hello)
    peer.send(wire.Ok(credits_))
    number = wire.stream_id(name)
    assert peer.next() == wire.Notify(number, name, 0)
    peer.send(wire.NotifyAck(True, number, wire.NEVER))
    return number


def numbers_until(peer: Peer, last: int) -> list[int]:
    """The numbers of the messages that come, up to this one."""
    found: list[int] = []
    while not found or found[-1] < last:
        frame = peer.next()
        assert isinstance(frame, wire.Message)
        found.append(frame.message_id)
    return found


class Waiting(Numbers):
    """Has nothing more at its end, for now; and at first has nothing for some time."""

    def __init__(self, name: str, until: int, idle: int = 0) -> None:
        super().__init__(name, until)
        self.idle = idle

    def handle_next(self) -> Any:
        self.idle -= 1
        found = None if self.idle >= 0 else super().handle_next()
        return None if found is END else found


@pytest.mark.row("W3", engine="any")
def test_a_source_is_finished_once_its_last_message_is_safe() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with SourceConnector(address, [numbers := Numbers("a", 10)]) as connector:
            with accepted(server) as peer:
                number = give(peer, "a", 100)
                assert numbers_until(peer, 9) == list(range(10))
                assert peer.next() == wire.Eos(number)
                peer.send(wire.Ack(0, ((number, 4),)))
                wait_until(lambda: numbers.safe == 4, 30, "its hearing of that")
                with pytest.raises(ConnectorTimeoutError, match="not all messages were safe"):
                    connector.finish(0.1)
                peer.send(wire.Ack(0, ((number, 9),)))
                connector.finish(30)


@pytest.mark.row("W4", engine="any")
def test_a_stream_is_given_back_once_what_was_sent_of_it_is_safe() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with SourceConnector(address, [numbers := Waiting("a", 3)]) as connector:
            with accepted(server) as peer:
                number = give(peer, "a", 100)
                assert numbers_until(peer, 2) == [0, 1, 2]
                connector.give_back("a")
                assert peer.next() == wire.Eos(number)
                peer.send(wire.Ack(0, ((number, 1),)))
                wait_until(lambda: numbers.safe == 1, 30, "its hearing of that")
                assert "close" not in numbers.calls
                peer.send(wire.Ack(0, ((number, 2),)))
                wait_until(lambda: "close" in numbers.calls, 30, "its end")
                assert numbers.safe == 2


def test_a_source_that_has_nothing_costs_no_credits() -> None:
    """And of those that there are, all are used, and none twice."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with SourceConnector(address, [Waiting("a", 10, idle=20)]) as connector:
            with accepted(server) as peer:
                number = give(peer, "a", 5)
                assert numbers_until(peer, 3) == [0, 1, 2, 3]
                connector.wake()
                peer.socket.settimeout(0.3)  # that nothing comes cannot be waited for otherwise
                with pytest.raises(TimeoutError):
                    peer.next()
                peer.socket.settimeout(30)
                peer.send(wire.Ack(2, ((number, 3),)))
                assert numbers_until(peer, 5) == [4, 5]


@pytest.mark.row("W4", engine="any")
def test_a_source_that_has_ended_may_come_again(log: Log) -> None:
    with running(log, [Numbers("a", 3)]) as connector:
        connector.finish(30)
        connector.give_back("a")
        connector.add(again := Numbers("a", 6))
        wait_until(lambda: again.safe == 5, 30, "what is new being safe")
        connector.finish(30)
    assert again.calls == ["open", 2, "close"]
    assert data_of(log) == Counter(f"a:{n}" for n in range(6))


def test_a_source_that_waits_for_its_turn_can_be_given_back_too() -> None:
    """As where Kafka gives a partition, takes it, and takes it again before the first is done."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with SourceConnector(address, [first := Waiting("a", 3)]) as connector:
            with accepted(server) as peer:
                number = give(peer, "a", 100)
                numbers_until(peer, 2)
                connector.give_back("a")
                assert peer.next() == wire.Eos(number)
                connector.add(second := Waiting("a", 5))
                connector.give_back("a")
                peer.send(wire.Ack(0, ((number, 2),)))
                wait_until(lambda: "close" in first.calls, 30, "its end")
                connector.add(Waiting("b", 1))
                other = wire.stream_id("b")
                assert peer.next() == wire.Notify(other, "b", 0)
                peer.send(wire.NotifyAck(True, other, wire.NEVER))
                assert numbers_until(peer, 0) == [0], "and nothing was asked for besides"
    assert second.calls == []


def test_what_is_not_kept_takes_no_room(log: Log) -> None:
    """Messages that are safe already, and those whose number is wrong."""
    with Listener(log, RAW) as listener:
        with SourceClient(address_of(listener), "s", buffer_bytes_max=2000) as client:
            client.write(b"x", sequence=7)
            client.flush(30)
            for _ in range(100):
                client.write(b"x", sequence=7, timeout_s=0)
    with SourceClient("127.0.0.1:9", "s", buffer_bytes_max=2000) as client:
        client.write(b"x", sequence=7)
        for number in (7, 6) * 50:
            with pytest.raises(UsageError, match=f"message {number} of s follows 7"):
                client.write(b"x", sequence=number, timeout_s=0)
        client.write(b"x", sequence=8, timeout_s=0)
        client.close(flush=False)
    assert len(data_of(log)) == 1


def test_numbers_of_ones_own_are_not_anothers() -> None:
    """Two programs go on behind the same message, and no number of one is one of the other."""
    one, other = OwnNumbers(), OwnNumbers()
    assert one.resume(7)
    assert other.resume(7)
    mine, theirs = [one.take() for _ in range(1000)], [other.take() for _ in range(1000)]
    assert mine == list(range(mine[0], mine[0] + 1000))
    assert not {*mine} & {*theirs}
    assert one.resume(7), "nothing has come since"
    assert one.resume(mine[500])
    assert one.take() == mine[-1] + 1
    assert not one.resume(mine[-1] + 2), "a number that was not given yet is somebody else's"
    assert one.take() > mine[-1] + 2


def test_nothing_behind_a_farewell_counts() -> None:
    for last, news in ((wire.Restart(""), Restarted("")), (wire.Error("no"), Failed("no"))):
        session = ClientSession(Greeting(program="p", instance="i"))
        frames = [wire.Ok(7), last, wire.Error("it should not have come to this")]
        assert session.receive(frames) == [news]
