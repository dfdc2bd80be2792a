"""Sinks: votes, outcomes, what is kept after kills, and peers that err."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import random
import resource
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from penstock.connect import wire
from penstock.connect.dial import DialOptions, SinkWorker
from penstock.connect.effects import Close, Send
from penstock.connect.sink import SinkHost, SinkOptions
from penstock.connect.sinking import SinkSession, SinkTerms, Standing, Stretch, Vote
from penstock.connect.sinks.file import Ends, FileSink
from penstock.connect.transactions import FILE, Line, TransactionLog
from penstock.errors import ConnectorError, DamagedError, SinkGoneError, UsageError
from penstock.testing.processes import wait_until
from tests.connect.hosting import SinkProcess
from tests.connect.peer import Peer


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SinkHost]:
    with a_host(tmp_path) as found:
        yield found


def a_host(folder: Path, **options: object) -> SinkHost:
    given = SinkOptions(**options)  # type: ignore[arg-type]
    return SinkHost(lambda worker: FileSink(folder, worker), folder, given, print)


def address_of(host: SinkHost) -> str:
    return "{}:{}".format(*host.address)


def lines(folder: Path, worker: str = "w") -> list[str]:
    path = FileSink(folder, worker).path
    return path.read_text().splitlines() if path.exists() else []


def committed_lines(folder: Path, worker: str = "w") -> list[str]:
    """Without what was only voted for."""
    path = FileSink(folder, worker).path
    ends = path.with_suffix(".ends")
    if not ends.exists():
        return []
    place = msgspec.json.decode(ends.read_bytes(), type=Ends).committed.place
    return path.read_bytes()[:place].decode().splitlines()


def rows(*texts: str) -> list[tuple[bytes | None, int, bytes]]:
    return [(None, 0, text.encode()) for text in texts]


@pytest.mark.row("W11", engine="any")
@pytest.mark.row("W13", engine="any")
def test_a_transaction_is_committed_or_not(host: SinkHost, tmp_path: Path) -> None:
    with SinkWorker(address_of(host), "w", (1,)) as worker:
        assert (worker.committed, worker.uncommitted) == (0, ())
        worker.send(rows("one", "two"))
        assert worker.vote("t1", 0)
        worker.resolve("t1", True)
        worker.send(rows("no", "never"))
        assert worker.vote("t2", 6)
        worker.resolve("t2", False)
    assert lines(tmp_path) == ["one", "two"]
    with SinkWorker(address_of(host), "w", (2,)) as worker:
        assert worker.committed == 6
        worker.send(rows("three"))
        assert worker.vote("t3", 6)
        worker.resolve("t3", True)
    assert lines(tmp_path) == ["one", "two", "three"]


@pytest.mark.row("W12", engine="any")
@pytest.mark.parametrize("commit", [True, False])
def test_a_vote_outlives_the_sink(tmp_path: Path, commit: bool) -> None:
    with a_host(tmp_path) as host, SinkWorker(address_of(host), "w", (1,)) as worker:
        worker.send(rows("one"))
        assert worker.vote("t1", 0)
        worker.send(rows("later"))
    with a_host(tmp_path) as host, SinkWorker(address_of(host), "w", (2,)) as worker:
        assert (worker.committed, worker.uncommitted) == (0, ("t1",))
        worker.resolve("t1", commit)
        worker.resolve("t1", commit)  # told again: ignored
        assert worker.uncommitted == ()
    assert lines(tmp_path) == (["one"] if commit else [])
    with a_host(tmp_path) as host, SinkWorker(address_of(host), "w", (3,)) as worker:
        assert worker.committed == (3 if commit else 0)


@pytest.mark.row("W12", engine="any")
def test_a_vote_waits_for_its_outcome_on_a_new_connection_too(
    host: SinkHost, tmp_path: Path
) -> None:
    """What comes meanwhile lies behind what was voted for; and there is one vote at a time."""

    @contextlib.contextmanager
    def connected() -> Iterator[Peer]:
        with Peer(host.address) as peer:
            assert isinstance(peer.hello(instance="w", version=wire.SINK_VERSION), wire.Ok)
            yield peer
        wait_until(lambda: not host._active, 10, "the sink letting go of it")

    with connected() as peer:
        peer.send(wire.Message(1, 0, 0, None, b"one"))
        peer.tell(wire.Phase1("t1", ((1, 0, 3),)))
        assert told(peer) == wire.Reply("t1", True)
    with connected() as peer:
        peer.send(wire.Message(1, 3, 0, None, b"two"))
        peer.tell(wire.Phase2("t1", True), wire.Phase1("t2", ((1, 3, 6),)))
        assert told(peer) == wire.Reply("t2", True)
    with connected() as peer:
        peer.send(wire.Message(1, 6, 0, None, b"three"))
        peer.tell(wire.Phase1("t3", ((1, 3, 11),)))
        assert peer.next() == wire.Error("Phase1 of t3 while another one is pending")
    with connected() as peer:
        peer.tell(wire.ListUncommitted(1))
        assert told(peer) == wire.ReplyUncommitted(1, ("t2",))
        peer.tell(wire.Phase2("t2", True), wire.ListUncommitted(2))
        assert told(peer) == wire.ReplyUncommitted(2, ())
    assert lines(tmp_path) == ["one", "two"]


@pytest.mark.row("W11", engine="any")
def test_gaps_and_repeats(host: SinkHost, tmp_path: Path) -> None:
    with Peer(host.address) as peer:
        assert isinstance(peer.hello(instance="w", version=wire.SINK_VERSION), wire.Ok)
        part = [wire.Message(1, 0, 0, None, b"ab"), wire.Message(1, 2, 0, None, b"cd")]
        peer.send(*part, *part)  # repeated: dropped
        peer.tell(wire.Phase1("t1", ((1, 0, 4),)))
        assert told(peer) == wire.Reply("t1", True)
        peer.tell(wire.Phase2("t1", True))
        peer.send(wire.Message(1, 6, 0, None, b"gap"))
        peer.send(wire.Message(1, 4, 0, None, b"late"))
        peer.tell(wire.Phase1("t2", ((1, 4, 8),)))
        assert told(peer) == wire.Reply("t2", False), "nothing behind a gap is taken"
        peer.tell(wire.Phase2("t2", False))
        peer.send(wire.Message(1, 4, 0, None, b"ef"))
        for transaction, stretch in (
            ("other start", (1, 0, 6)), ("backwards", (1, 4, 3)), ("more", (1, 4, 9)),
            ("less", (1, 4, 5)),
        ):  # fmt: skip
            peer.tell(wire.Phase1(transaction, (stretch,)))
            assert told(peer) == wire.Reply(transaction, False)
        peer.tell(wire.Phase2("unknown", True), wire.Phase2("unknown", False))
        peer.tell(wire.Phase1("t3", ((1, 4, 6),)))
        assert told(peer) == wire.Reply("t3", True)
        peer.tell(wire.Phase2("t3", True), wire.ListUncommitted(7))
        assert told(peer) == wire.ReplyUncommitted(7, ())
    assert lines(tmp_path) == ["ab", "cd", "ef"]


def told(peer: Peer) -> wire.TwoPhase | None:
    frame = peer.next()
    assert isinstance(frame, wire.Message), frame
    return wire.two_phase(frame)


@pytest.mark.row("W11", engine="any")
def test_a_worker_connects_once_and_a_later_attempt_takes_over(
    host: SinkHost, tmp_path: Path
) -> None:
    with SinkWorker(address_of(host), "w", (1, 0)) as first:
        first.send(rows("old"))
        with pytest.raises(ConnectorError, match="worker w is connected already"):
            SinkWorker(address_of(host), "w", (1, 0)).__enter__()
        with SinkWorker(address_of(host), "other", (1, 0)) as other:
            assert other.committed == 0
        with SinkWorker(address_of(host), "w", (1, 1)) as second:
            second.send(rows("new"))
            assert second.vote("t", 0)
            second.resolve("t", True)
            with pytest.raises(SinkGoneError):
                first.vote("t", 0)
    assert lines(tmp_path) == ["new"]


def test_a_sink_is_closed_before_the_next_one_is_opened(tmp_path: Path) -> None:
    """A worker that is taken over from may be in the middle of something."""
    calls: list[str] = []
    is_opened_again = threading.Event()

    class Slow(FileSink):
        def open(self, committed: int, kept: int | None) -> None:
            super().open(committed, kept)
            calls.append("open")
            if calls.count("open") > 1:
                is_opened_again.set()

        def close(self) -> None:
            if self._file is not None:
                is_opened_again.wait(0.5)  # time enough to be opened, if it may
                calls.append("close")
            super().close()

    with SinkHost(lambda worker: Slow(tmp_path, worker), tmp_path) as host:
        with SinkWorker(address_of(host), "w", (1,)), SinkWorker(address_of(host), "w", (2,)):
            assert calls == ["open", "close", "open"]
        wait_until(lambda: calls[-1] == "close", 10, "its being closed")


@pytest.mark.parametrize(
    ("limit", "frames"),
    [
        ("STREAMS_MAX", [wire.Notify(n, "w", 0) for n in (1, 2, 3)]),
        ("STREAMS_MAX", [wire.Message(n, 0, 0, None, b"x") for n in (1, 2, 3)]),
        ("QUEUED_MAX", [wire.Notify(n, "w", 0) for n in (1, 2, 3)]),
    ],
)
def test_what_a_worker_may_have_is_bounded(
    monkeypatch: pytest.MonkeyPatch, limit: str, frames: list[wire.Frame]
) -> None:
    """So many streams; and so many frames while it is not yet known whether it may connect."""
    monkeypatch.setattr(f"penstock.connect.sinking.{limit}", 2)
    session = SinkSession(SinkTerms())
    list(session.receive([wire.Hello("v0.0.1", "", "p", "w")]))
    if limit == "STREAMS_MAX":
        list(session.approved(Standing()))
    assert not any(isinstance(effect, Close) for effect in session.receive(frames[:2]))
    *_, told, closed = session.receive(frames[2:])
    assert isinstance(told, Send)
    assert isinstance(told.frame, wire.Error)
    assert isinstance(closed, Close)
    assert session.state == "closed"


def test_an_idle_worker_is_let_go(tmp_path: Path) -> None:
    with a_host(tmp_path, idle_timeout_s=0.1) as host, SinkWorker(address_of(host), "w", (1,)):
        wait_until(lambda: not host._active, 10, "the sink letting go of it")


def test_a_peer_that_only_dribbles_is_let_go(tmp_path: Path) -> None:
    told: list[str] = []
    given = SinkOptions(idle_timeout_s=0.5)
    with SinkHost(lambda w: FileSink(tmp_path, w), tmp_path, given, told.append) as host:
        with Peer(host.address) as peer, contextlib.suppress(OSError):
            for byte in wire.encode(wire.Hello("v0.0.1", "", "p", "worker")):
                peer.socket.sendall(bytes([byte]))
                time.sleep(0.2)
        wait_until(lambda: any("no Hello came in time" in t for t in told), 10, "its end")


@pytest.mark.row("W11", engine="any")
def test_everything_else_that_a_worker_may_say(host: SinkHost) -> None:
    """Sent without waiting; workers that left are noted, and an error ends the connection."""
    with Peer(host.address) as peer:
        peer.send(wire.Hello("v0.0.1", "", "p", "w"), wire.Notify(1, "w", 0))
        peer.tell(wire.WorkersLeft(7, ("gone",)), wire.ListUncommitted(8))
        peer.send(wire.Eos(1))
        peer.tell(wire.ListUncommitted(9))
        found = [peer.next() for _ in range(4)]
        assert isinstance(found[0], wire.Ok)
        assert found[1] == wire.NotifyAck(True, 1, 0)
        replies = [wire.two_phase(cast(wire.Message, frame)) for frame in found[2:]]
        assert replies == [wire.ReplyUncommitted(8, ()), wire.ReplyUncommitted(9, ())]
        peer.send(wire.Error("I give up"))
        assert peer.next() is None


@pytest.mark.row("W11", engine="any")
def test_what_comes_before_the_answer_to_hello_is_not_lost() -> None:
    session = SinkSession(SinkTerms())
    asked = list(session.receive([wire.Hello("v0.0.1", "", "p", "w"), wire.Notify(1, "w", 0)]))
    assert [type(effect).__name__ for effect in asked] == ["Approve"]
    told = list(session.approved(Standing()))
    assert [effect.frame for effect in told if isinstance(effect, Send)] == [
        wire.Ok(SinkTerms().credits), wire.NotifyAck(True, 1, 0),
    ]  # fmt: skip


@pytest.mark.row("W11", engine="any")
@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([wire.Hello("9", "", "p", "w")], "version '9'"),
        ([wire.Hello("v0.0.1", "x", "p", "w")], "cookie"),
        ([wire.Hello("v0.0.1", "", "p", "../w\n")], "a worker's name"),
        ([wire.Notify(1, "w", 0)], "Notify before Hello"),
        ([wire.Hello("v0.0.1", "", "p", "w"), wire.Ok(3)], "not for a worker to send"),
        ([wire.Hello("v0.0.1", "", "p", "w"), wire.Message(0, 0, 0, None, b"\x01")], "tag 1"),
    ],
)
def test_a_wrong_peer_is_told_why_and_others_live_on(
    host: SinkHost, frames: list[wire.Frame], why: str
) -> None:
    with SinkWorker(address_of(host), "good", (1,)) as good, Peer(host.address) as bad:
        bad.send(*frames)
        found: wire.Frame | None = wire.Ok(0)
        while found is not None and not isinstance(found, wire.Error):
            found = bad.next()
        assert isinstance(found, wire.Error)
        assert why in found.message
        assert bad.next() is None
        good.send(rows("x"))
        assert good.vote("t", 0)


def test_a_target_that_fails_is_voted_against(tmp_path: Path) -> None:
    class Full(FileSink):
        def flush(self) -> None:
            raise OSError("no space left on device")

    said: list[str] = []
    host = SinkHost(lambda worker: Full(tmp_path, worker), tmp_path, tell=said.append)
    with host, SinkWorker(address_of(host), "w", (1,)) as worker:
        worker.send(rows("x"))
        assert not worker.vote("t", 0)
        assert isinstance(worker.refusal, SinkGoneError)
        assert "no space left" in str(worker.refusal)
        worker.resolve("t", False)
    assert any("no space left" in line for line in said)
    assert lines(tmp_path) == []


@pytest.mark.row("W12", engine="any")
@pytest.mark.parametrize("commit", [True, False])
def test_an_outcome_that_the_target_could_not_take_is_told_again(
    tmp_path: Path, commit: bool
) -> None:
    """It does not count as told before it is carried out."""
    failures = [OSError("no route to host")]

    class Away(FileSink):
        def commit(self, start: int, end: int) -> None:
            self.fail()
            super().commit(start, end)

        def abort(self, start: int) -> None:
            self.fail()
            super().abort(start)

        def fail(self) -> None:
            if failures:
                raise failures.pop()

    with SinkHost(lambda worker: Away(tmp_path, worker), tmp_path) as host:
        with SinkWorker(address_of(host), "w", (1,)) as worker:
            worker.send(rows("one"))
            assert worker.vote("t", 0)
            with pytest.raises(SinkGoneError, match="no route to host"):
                worker.resolve("t", commit)
        with SinkWorker(address_of(host), "w", (2,)) as worker:
            assert worker.uncommitted == ("t",)
            worker.resolve("t", commit)
            assert worker.committed == (3 if commit else 0)
    assert lines(tmp_path) == (["one"] if commit else [])


@pytest.mark.row("W11", engine="any")
def test_each_stream_of_a_worker_is_counted_for_itself(tmp_path: Path) -> None:
    """Penstock's workers have one; others may have more, and one transaction over them."""
    with a_host(tmp_path) as host, Peer(host.address) as peer:
        peer.hello(instance="w", version=wire.SINK_VERSION)
        for stream in (1, 7):
            peer.send(wire.Notify(stream, "w", 0))
            assert peer.next() == wire.NotifyAck(True, stream, 0)
        peer.send(
            wire.Message(1, 0, 0, None, b"one"), wire.Message(7, 0, 0, None, b"seven"),
            wire.Message(1, 3, 0, None, b"two"),
        )  # fmt: skip
        for wrong in (((1, 0, 6), (7, 0, 6)), ((1, 0, 6), (1, 0, 6)), ((1, 0, 6), (8, 0, 0)), ()):
            peer.tell(wire.Phase1("t0", wrong))
            assert told(peer) == wire.Reply("t0", False)
        peer.tell(wire.Phase1("t1", ((1, 0, 6), (7, 0, 5))))
        assert told(peer) == wire.Reply("t1", True)
    with a_host(tmp_path) as host, Peer(host.address) as peer:  # the sink has begun again
        peer.hello(instance="w", version=wire.SINK_VERSION)
        peer.tell(wire.ListUncommitted(1))
        assert told(peer) == wire.ReplyUncommitted(1, ("t1",))
        peer.tell(wire.Phase2("t1", True))
        for stream, end in ((1, 6), (7, 5), (9, 0)):
            peer.send(wire.Notify(stream, "w", 0))
            assert peer.next() == wire.NotifyAck(True, stream, end)
        peer.send(wire.Message(7, 5, 0, None, b"more"), wire.Message(9, 0, 0, None, b"nine"))
        peer.tell(wire.Phase1("t2", ((7, 5, 9),)))
        assert told(peer) == wire.Reply("t2", True)
        peer.tell(wire.Phase2("t2", False), wire.Phase1("t3", ((9, 0, 4),)))
        assert told(peer) == wire.Reply("t3", True)
        peer.tell(wire.Phase2("t3", True), wire.ListUncommitted(2))
        assert told(peer) == wire.ReplyUncommitted(2, ())
    assert lines(tmp_path) == ["one", "two"]
    assert lines(tmp_path, "w#7") == ["seven"]
    assert lines(tmp_path, "w#9") == ["nine"]


def test_a_worker_of_an_earlier_version_is_known(tmp_path: Path) -> None:
    """Of its one stream; a vote that waits, too."""
    with a_host(tmp_path) as host, SinkWorker(address_of(host), "w", (1,)) as worker:
        worker.send(rows("one"))
        assert worker.vote("t1", 0)
        worker.resolve("t1", True)
        worker.send(rows("two"))
        assert worker.vote("t2", 3)
    before = (
        b'{"worker":"w","standing":{"committed":3,"pending":{"transaction":"t2","start":3,"end":6},'
        b'"resolved":["t1",true],"attempt":[1]}}\n'
    )
    (tmp_path / FILE).write_bytes(before)
    with a_host(tmp_path) as host, SinkWorker(address_of(host), "w", (2,)) as worker:
        assert (worker.committed, worker.uncommitted) == (3, ("t2",))
        worker.resolve("t2", True)
    assert lines(tmp_path) == ["one", "two"]


def test_batches_are_not_told_of_one_by_one(tmp_path: Path) -> None:
    said: list[str] = []
    with SinkHost(lambda w: FileSink(tmp_path, w), tmp_path, tell=said.append) as host:
        for attempt in range(5):
            with SinkWorker(address_of(host), "w", (attempt,)) as worker:
                worker.send(rows("x"))
                assert worker.vote(f"t{attempt}", attempt)
                worker.resolve(f"t{attempt}", True)
        with SinkWorker(address_of(host), "w", (9,)) as worker:
            with pytest.raises(ConnectorError), SinkWorker(address_of(host), "w", (1,)):
                pass
    assert len(said) == 2, said
    assert said[0] == "worker w is here: 0 bytes are committed"
    assert "was here with a later attempt" in said[1]


def test_more_is_sent_than_there_are_credits(tmp_path: Path) -> None:
    with a_host(tmp_path, credits=10) as host:
        with SinkWorker(address_of(host), "w", (1,), DialOptions(timeout_s=10)) as worker:
            worker.send(rows(*(f"{n}" for n in range(500))))
            assert worker.vote("t", 0)
            worker.resolve("t", True)
    assert lines(tmp_path) == [f"{n}" for n in range(500)]


def test_nobody_there_is_told_in_time() -> None:
    with pytest.raises(SinkGoneError, match=r"lost the sink at 127\.0\.0\.1:9"):
        SinkWorker("127.0.0.1:9", "w", (1,), DialOptions(timeout_s=2)).__enter__()


# The transaction log


def standing_at(committed: int, *more: Any) -> Standing:
    return Standing({1: committed}, *more)


@pytest.mark.row("W12", engine="any")
def test_a_line_that_was_cut_does_not_count(tmp_path: Path) -> None:
    standing = standing_at(7, Vote("t", (Stretch(1, 7, 9),)), ("s", True))
    with TransactionLog(tmp_path) as log:
        log.save("a", standing)
        log.save("b", standing_at(1))
    whole = (tmp_path / FILE).read_bytes()
    for cut in range(len(whole)):
        (tmp_path / FILE).write_bytes(whole[:cut])
        with TransactionLog(tmp_path) as log:
            first = whole.index(b"\n") + 1
            assert log.standing("a") == (standing if cut >= first else Standing())
            assert log.standing("b") == Standing()
            log.save("b", standing_at(2))
        with TransactionLog(tmp_path) as log:
            assert log.standing("b") == standing_at(2)


def test_one_process_has_the_transactions(tmp_path: Path) -> None:
    with TransactionLog(tmp_path), pytest.raises(UsageError, match="another process"):
        TransactionLog(tmp_path).__enter__()


def test_a_damaged_transaction_log_is_not_guessed_at(tmp_path: Path) -> None:
    line = msgspec.json.encode(Line("w", standing_at(1)))
    (tmp_path / FILE).write_bytes(line + b'\n__import__("os")\n' + line + b"\n")
    with pytest.raises(DamagedError, match="line 2 is damaged"):
        TransactionLog(tmp_path).__enter__()


def test_the_transaction_log_is_condensed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.connect.transactions.LINES_MAX", 20)
    with TransactionLog(tmp_path) as log:
        for n in range(100):
            log.save(f"w{n % 3}", standing_at(n))
            with pytest.raises(UsageError):
                TransactionLog(tmp_path).__enter__()
    assert (tmp_path / FILE).read_bytes().count(b"\n") < 30
    with TransactionLog(tmp_path) as log:
        assert log.workers() == {
            "w0": standing_at(99),
            "w1": standing_at(97),
            "w2": standing_at(98),
        }


@pytest.mark.parametrize("fails", ["sync of the folder", "sync of the file", "open"])
def test_no_vote_is_lost_though_the_transaction_log_cannot_be_condensed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Whatever step of it fails: what counts as saved is in the file that is read back."""
    monkeypatch.setattr("penstock.connect.transactions.LINES_MAX", 5)
    real_sync, real_open = os.fsync, os.open

    def sync(file: int) -> None:
        of = "folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file"
        if is_failing and fails == f"sync of the {of}":
            raise OSError(errno.EIO, "input/output error")
        real_sync(file)

    def opened(path: str, *arguments: int, **more: object) -> int:
        if is_failing and fails == "open":
            raise OSError(errno.EMFILE, "too many open files")
        return real_open(path, *arguments, **more)  # type: ignore[arg-type]

    is_failing = False
    monkeypatch.setattr("os.fsync", sync)
    monkeypatch.setattr("os.open", opened)
    done = []
    with TransactionLog(tmp_path / "log") as log:
        for number in range(40):
            is_failing = 4 <= number < 35
            with contextlib.suppress(OSError):
                log.save("w", standing_at(number))
                done.append(number)
            assert log.standing("w") == standing_at(done[-1])
            is_failing = False  # what a sink that is killed here finds
            shutil.copytree(tmp_path / "log", tmp_path / f"{number}")
            with TransactionLog(tmp_path / f"{number}") as found:
                assert found.standing("w") == standing_at(done[-1])
    assert done[:4] + done[-5:] == [0, 1, 2, 3, 35, 36, 37, 38, 39]
    meanwhile = [number for number in done if 10 <= number < 35]
    assert bool(meanwhile) == (fails == "open"), "what may not outlive a loss of power is no vote"


def test_what_could_not_be_saved_does_not_come_back(tmp_path: Path) -> None:
    """A disk that takes half a line, and then more: the next line is whole, the other is gone."""
    with TransactionLog(tmp_path) as log:
        log.save("a", standing_at(1))
        size = (tmp_path / FILE).stat().st_size
        with no_larger_files(size + 20), pytest.raises(OSError, match="File too large"):
            log.save("a", standing_at(2, Vote("refused", (Stretch(1, 1, 2),))))
        assert log.standing("a") == standing_at(1)
        log.save("b", standing_at(3))
    with TransactionLog(tmp_path) as log:
        assert log.workers() == {"a": standing_at(1), "b": standing_at(3)}


class Synced:
    """What the disk was told to keep: of a file how much, of a folder which files it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sizes: dict[int, int] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._sync = os.fsync
        monkeypatch.setattr("os.fsync", self.sync)

    def sync(self, file: int) -> None:
        self._sync(file)
        found = os.fstat(file)
        self._sizes[found.st_ino] = found.st_size
        if stat.S_ISDIR(found.st_mode):
            folder = Path(f"/proc/self/fd/{file}").readlink()
            self._names[found.st_ino] = {p.name: p.stat().st_ino for p in folder.iterdir()}

    def has(self, path: Path) -> bool:
        """Whether all of the file, and its name, outlive a loss of power."""
        found, folder = path.stat(), path.parent.stat().st_ino
        is_named = self._names.get(folder, {}).get(path.name) == found.st_ino
        return is_named and self._sizes.get(found.st_ino) == found.st_size


@pytest.mark.row("W12", engine="any")
def test_a_vote_outlives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a line says is on the disk when it is saved, also in a file that was made anew."""
    synced = Synced(monkeypatch)
    monkeypatch.setattr("penstock.connect.transactions.LINES_MAX", 5)
    with TransactionLog(tmp_path) as log:
        for number in range(20):
            log.save("w", standing_at(number))
            assert synced.has(tmp_path / FILE)


@pytest.mark.row("W12", engine="any")
def test_what_is_voted_for_outlives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = Synced(monkeypatch)
    sink = FileSink(tmp_path, "w")
    sink.open(0, None)
    for number in range(3):
        sink.append([wire.Message(1, 0, 0, None, b"one")])
        sink.flush()
        assert synced.has(sink.path)
        assert synced.has(sink.path.with_suffix(".ends"))
        sink.commit(number * 3, number * 3 + 3)
        assert synced.has(sink.path.with_suffix(".ends"))
    sink.close()


def test_a_transaction_log_that_was_replaced_while_it_was_opened_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had it has put another file in its place, and ended: the old one says less."""
    with TransactionLog(tmp_path) as log:
        log.save("w", standing_at(1))
    lock = fcntl.flock

    def replaced(file: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        (tmp_path / "other").write_bytes(msgspec.json.encode(Line("w", standing_at(2))) + b"\n")
        (tmp_path / "other").replace(tmp_path / FILE)
        lock(file, how)

    monkeypatch.setattr("fcntl.flock", replaced)
    with TransactionLog(tmp_path) as log:
        assert log.standing("w") == standing_at(2)
        log.save("w", standing_at(3))
    with TransactionLog(tmp_path) as log:
        assert log.standing("w") == standing_at(3)


@contextlib.contextmanager
def no_larger_files(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Kills

ATTEMPTS = itertools.count()


@pytest.mark.row("W12", engine="any")
@pytest.mark.parametrize(
    "step",
    ["sink.append", "sink.flush", "sink.vote", "sink.voted", "sink.resolve", "sink.resolved"],
)
@pytest.mark.parametrize("commit", [True, False])
def test_killed_at_every_step(tmp_path: Path, step: str, commit: bool) -> None:
    """A worker that repeats what was not decided, and tells what was, has each row once."""
    sink = SinkProcess(tmp_path)
    sink.start(f"{step}=kill@2")
    chance = random.Random(step)
    decided: dict[str, bool] = {}
    wanted: list[str] = []
    try:
        for number in range(4):
            batch = [f"{number}-{n}" for n in range(chance.randrange(1, 5))]
            outcome = commit or number % 2 == 0
            deliver(sink, f"t{number}", batch, outcome, decided)
            wanted += batch if outcome else []
    finally:
        sink.stop()
    assert lines(tmp_path) == wanted


def deliver(
    sink: SinkProcess, transaction: str, batch: list[str], outcome: bool, decided: dict[str, bool]
) -> None:
    """What Penstock does: vote, decide, tell; and again from where it was, until it is through."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        sink.ensure()
        try:
            with SinkWorker(f"127.0.0.1:{sink.port}", "w", (next(ATTEMPTS),)) as worker:
                for open_ in worker.uncommitted:
                    worker.resolve(open_, decided.get(open_, False))
                if transaction in decided:
                    return
                start = worker.committed
                worker.sent = start
                worker.send(rows(*batch))
                if not worker.vote(transaction, start):
                    worker.resolve(transaction, False)
                    continue
                decided[transaction] = outcome
                worker.resolve(transaction, outcome)
                return
        except SinkGoneError:
            time.sleep(0.02)  # a process that was killed is not gone at once
    raise AssertionError("it never got through")


def test_why_a_sink_refuses_is_heard_though_it_has_closed(tmp_path: Path) -> None:
    """It sends its reason and closes while the worker is still sending."""
    with a_host(tmp_path, cookie="secret") as host:
        for _ in range(20):
            with pytest.raises(ConnectorError, match="the cookie is not the sink's"):
                with SinkWorker(address_of(host), "w", (1,)) as worker:
                    worker.send(rows(*["x" * 1000] * 1000))


def test_an_older_attempt_is_refused_after_a_restart_of_the_sink_too(tmp_path: Path) -> None:
    """It would abort what a newer one has voted for, and perhaps decided."""
    with a_host(tmp_path) as host, SinkWorker(address_of(host), "w", (2,)) as newer:
        newer.send(rows("one"))
        assert newer.vote("t2", 0)
    with a_host(tmp_path) as host:
        with pytest.raises(ConnectorError, match=r"a later attempt, 2, and this is 1: another"):
            with SinkWorker(address_of(host), "w", (1,)):
                pass
        with SinkWorker(address_of(host), "w", (3,)) as newest:
            assert newest.uncommitted == ("t2",)
            newest.resolve("t2", True)
            assert newest.committed == 3


def test_an_outcome_cannot_be_taken_back(host: SinkHost) -> None:
    with SinkWorker(address_of(host), "w", (1,)) as worker:
        worker.send(rows("one"))
        assert worker.vote("t1", 0)
        worker.resolve("t1", False)
        with pytest.raises(ConnectorError, match="t1 was resolved before, and the other way"):
            worker.resolve("t1", True)


def test_a_file_that_lost_what_was_committed_is_refused(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, "w")
    sink.open(0, None)
    sink.append([wire.Message(1, 0, 0, None, b"one")])
    sink.flush()
    sink.commit(0, 3)
    sink.close()
    sink.path.write_bytes(b"")
    with pytest.raises(ConnectorError, match="is shorter than what was committed"):
        sink.open(3, None)
    sink.close()


def test_a_file_sink_that_is_killed_while_it_discards_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of the file is never more than the file has."""

    def killed(sink: FileSink, ends: Ends) -> None:
        raise ZeroDivisionError

    sink = FileSink(tmp_path, "w")
    sink.open(0, None)
    sink.append([wire.Message(1, 0, 0, None, b"one")])
    sink.flush()
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(FileSink, "_save", killed)
        sink.abort(0)
    sink.close()
    sink.open(0, 3)  # the host did not get to save it, either
    sink.abort(0)
    sink.append([wire.Message(1, 0, 0, None, b"two")])
    sink.flush()
    sink.commit(0, 3)
    sink.close()
    assert lines(tmp_path) == ["two"]


def test_an_outcome_that_a_sink_passes_over_is_not_taken_for_heard(
    host: SinkHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another make may do."""
    with SinkWorker(address_of(host), "w", (1,)) as worker:
        worker.send(rows("one"))
        assert worker.vote("t", 0)
        monkeypatch.setattr(SinkSession, "_phase2", lambda session, told: [])
        with pytest.raises(SinkGoneError, match="has not resolved t"):
            worker.resolve("t", True)


def test_a_target_that_is_away_is_told_apart_from_one_that_refuses(tmp_path: Path) -> None:
    class Away(FileSink):
        def open(self, committed: int, kept: int | None) -> None:
            raise OSError("no route to host")

    with SinkHost(lambda worker: Away(tmp_path, worker), tmp_path) as host:
        with pytest.raises(SinkGoneError, match="try again later: the target cannot be used"):
            with SinkWorker(address_of(host), "w", (1,)):
                pass
