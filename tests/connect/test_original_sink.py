"""A sink as the original behaves: credits once, no reasons, no word of what is applied."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from penstock import App, CreateStream, Log, Producer, declare, failpoints
from penstock import open as open_log
from penstock.connect.protocol import wire
from penstock.connect.push.delivery import Delivery
from penstock.connect.push.remote import RemoteSink
from penstock.connect.push.worker import DialOptions, SinkWorker
from penstock.errors import ConnectorError
from penstock.testing.apps import AppTest
from penstock.testing.processes import wait_until
from tests.connect.pushing import Number

CREDITS = 500


class OriginalSink:
    """Takes one connection at a time. `says` is its vote.

    What it answers to NOTIFY lives in its memory: how much it has received, committed or not, and 0
    once it was started again.
    """

    def __init__(self, says: bool = True) -> None:
        self.says = says
        self.visible: list[bytes] = []
        self.committed = 0
        self._staged: list[bytes] = []
        self._received = 0
        self._said = 0
        self._pending: tuple[str, int, list[bytes]] | None = None
        self.votes = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    @property
    def has_more(self) -> bool:
        """Whether it has received more than was committed."""
        return self._said > self.committed

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._listening.getsockname()[:2])

    def __enter__(self) -> Self:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.1)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._listening.close()

    def forget(self, said: int = 0) -> None:
        """As after a start: what it has on disk stays."""
        self._said = said

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                peer, _ = self._listening.accept()
            except TimeoutError:
                continue
            with peer:
                peer.settimeout(0.1)
                self._talk(peer)

    def _talk(self, peer: socket.socket) -> None:
        parser = wire.Parser()
        while not self._stopping.is_set():
            try:
                data = peer.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionResetError:
                return
            if not data:
                return
            for frame in parser.feed(data):
                if answer := self._answer(frame):
                    peer.sendall(answer)

    def _answer(self, frame: wire.Frame) -> bytes:
        match frame:
            case wire.Hello():
                kept = None if self._pending is None else self._pending[1]
                self._staged, self._received = [], self.committed if kept is None else kept
                return wire.encode(wire.Ok(CREDITS))
            case wire.Notify(stream_id=stream):
                return wire.encode(wire.NotifyAck(True, stream, self._said))
            case wire.Message(stream_id=0):
                return self._two_phase(wire.two_phase(frame))
            case wire.Message(message_id=start, payload=payload) if start == self._received:
                self._staged.append(payload)
                self._received += len(payload)
                self._said = self._received
        return b""

    def _two_phase(self, message: wire.TwoPhase | None) -> bytes:
        match message:
            case wire.ListUncommitted(rtag=rtag):
                names = () if self._pending is None else (self._pending[0],)
                return wire.encode_two_phase(wire.ReplyUncommitted(rtag, names))
            case wire.Phase1(transaction=name, stretches=((_, start, end),)):
                self.votes += 1
                is_yes = self.says and (start, end) == (self.committed, self._received)
                if is_yes:
                    self._pending, self._staged = (name, end, self._staged), []
                return wire.encode_two_phase(wire.Reply(name, is_yes))
            case wire.Phase2(transaction=name, commit=commit):
                if self._pending is not None and self._pending[0] == name:
                    if commit:
                        self.committed = self._pending[1]
                        self.visible += self._pending[2]
                    self._pending = None
        return b""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log.db") as opened:
        opened.apply([CreateStream(declare("rows", content="bytes"))])
        with Producer(opened) as producer:
            for number in range(20_000):
                producer.send("rows", b"%d" % number)
        yield opened


@pytest.mark.row("X10", engine="any")
def test_credits_are_not_waited_for(log: Log) -> None:
    """It grants 500 and never again; 20,000 messages arrive, each once."""
    with OriginalSink() as sink:
        options = DialOptions(timeout_s=10)
        remote = RemoteSink("q", sink.address, 1, options, "begin anew")
        assert Delivery(log, remote, "rows", "stream").deliver() == 20_000
        assert sink.visible == [b"%d" % number for number in range(20_000)]
        with SinkWorker(sink.address, "q-0", (1,), options) as worker:
            assert worker.progress is None, "it does not say what its target has"
        with Producer(log) as producer:
            producer.send("rows", b"more")
        # Another driver: what was told counts as done, and nothing is sent twice.
        assert Delivery(log, remote, "rows", "stream").deliver() == 1
        assert sink.visible[19_999:] == [b"19999", b"more"]


@pytest.mark.row("X10", engine="any")
def test_what_it_says_of_itself_is_not_relied_on(log: Log) -> None:
    """Started again it says 0, after a send that was cut off too much; nothing is lost or twice."""
    with OriginalSink() as sink:
        options = DialOptions(timeout_s=10)
        remote = RemoteSink("q", sink.address, 1, options, "begin anew")
        sent = 20_000
        assert Delivery(log, remote, "rows", "stream").deliver() == sent
        for cut_off in (False, True, False, True):
            if cut_off:
                with SinkWorker(sink.address, "q-0", (2,), options) as worker:
                    worker.sent = worker.committed = sink.committed
                    worker.send([(None, 0, b"never decided")] * 3)
                wait_until(lambda: sink.has_more, 30, "what is cut off")
            else:
                sink.forget()
            with Producer(log) as producer:
                producer.send("rows", b"%d" % sent)
            sent += 1
            assert Delivery(log, remote, "rows", "stream").deliver() == 1
        assert sink.visible == [b"%d" % number for number in range(sent)]


@pytest.mark.row("X10", engine="any")
def test_a_first_send_that_is_cut_off_is_made_again(log: Log) -> None:
    """Where the sink began is saved before anything is sent to it."""
    with OriginalSink() as sink:
        options = DialOptions(timeout_s=10)
        remote = RemoteSink("q", sink.address, 1, options, "begin anew")
        failpoints.arm("push.voted", "raise")
        try:
            with pytest.raises(failpoints.FailpointError):
                Delivery(log, remote, "rows", "stream").deliver()
        finally:
            failpoints.disarm()
        assert Delivery(log, remote, "rows", "stream").deliver() == 20_000
        assert sink.visible == [b"%d" % number for number in range(20_000)]


@pytest.mark.row("X10", engine="any")
def test_a_sink_of_another_make_counts_as_done_when_it_was_told(tmp_path: Path) -> None:
    with OriginalSink() as sink:
        made = App("pushing")
        numbers = made.stream("numbers", Number, key="key")
        made.sink(numbers, sink.address, workers=1, timeout="10 seconds")
        with AppTest(made, tmp_path) as run:
            for number in range(3):
                run.send(numbers, Number("k", number))
                run.until_idle()
            run.restart()
            run.send(numbers, Number("k", 3))
            run.until_idle()
        assert len(sink.visible) == 4
        sink.committed = 1  # it has lost some, and what it had is not kept here
        sink.forget(said=1)
        with AppTest(made, tmp_path, tries_max=1) as run:
            assert "it is a different sink, or has lost data" in str(run.until_failed())


def test_a_sink_that_votes_against_without_a_reason_is_given_up_after_some_tries(
    tmp_path: Path,
) -> None:
    with OriginalSink(says=False) as sink:
        made = App("pushing")
        numbers = made.stream("numbers", Number, key="key")
        made.sink(numbers, sink.address, workers=1, timeout="10 seconds")
        with AppTest(made, tmp_path, tries_max=2) as run:
            run.send(numbers, Number("k", 1))
            failure = str(run.until_failed())
        assert "votes against batch" in failure
        assert "it gives no reason; see its output" in failure
        assert sink.votes == 2
    with OriginalSink(says=False) as sink, pytest.raises(ConnectorError, match="gives no reason"):
        remote = RemoteSink("q", sink.address, 1, DialOptions(timeout_s=10), "begin anew")
        with open_log(tmp_path / "other.db") as log:
            log.apply([CreateStream(declare("rows", content="bytes"))])
            with Producer(log) as producer:
                producer.send("rows", b"x")
            Delivery(log, remote, "rows", "stream").deliver()
