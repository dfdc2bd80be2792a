"""Sinks: votes, outcomes, what is kept after kills, and peers that err."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from penstock import failpoints
from penstock.connect.hosts.sink_host import SinkHost, SinkOptions
from penstock.connect.hosts.spool import Spool, read_dead
from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.protocol import wire
from penstock.connect.protocol.effects import Close, Send
from penstock.connect.protocol.marks import Mark
from penstock.connect.protocol.sink_session import Open, SinkSession, SinkTerms, WorkerStanding
from penstock.connect.push.worker import DialOptions, SinkWorker
from penstock.connect.sinks.file import FileEnds, FileSink
from penstock.errors import ConnectorError, SinkGoneError, UsageError
from penstock.failpoints import CONNECTOR_NAMES
from penstock.testing.processes import wait_until
from tests.connect.hosting import SinkProcess, wait_applied
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


def assert_lines(folder: Path, wanted: list[str], worker: str = "w") -> None:
    """What was decided is there, soon; by a sink that runs, or one that is started for it."""
    with contextlib.ExitStack() as exits:
        with contextlib.suppress(UsageError):  # it runs
            exits.enter_context(a_host(folder))
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: lines(folder, worker) == wanted, 10, "the lines")
        assert lines(folder, worker) == wanted


def committed_lines(folder: Path, worker: str = "w") -> list[str]:
    """Without what was only voted for."""
    path = FileSink(folder, worker).path
    ends = path.with_suffix(".ends")
    if not ends.exists():
        return []
    place = msgspec.json.decode(ends.read_bytes(), type=FileEnds).committed.place
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
    assert_lines(tmp_path, ["one", "two"])
    with SinkWorker(address_of(host), "w", (2,)) as worker:
        assert worker.committed == 6
        worker.send(rows("three"))
        assert worker.vote("t3", 6)
        worker.resolve("t3", True)
    assert_lines(tmp_path, ["one", "two", "three"])


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
    assert_lines(tmp_path, (["one"] if commit else []))
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
        assert peer.next() == wire.Error(
            "Phase1 of t3 was sent while another transaction is pending"
        )
    with connected() as peer:
        peer.tell(wire.ListUncommitted(1))
        assert told(peer) == wire.ReplyUncommitted(1, ("t2",))
        peer.tell(wire.Phase2("t2", True), wire.ListUncommitted(2))
        assert told(peer) == wire.ReplyUncommitted(2, ())
    assert_lines(tmp_path, ["one", "two"])


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
    assert_lines(tmp_path, ["ab", "cd", "ef"])


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
        with pytest.raises(ConnectorError, match="worker w is already connected"):
            SinkWorker(address_of(host), "w", (1, 0)).__enter__()
        with SinkWorker(address_of(host), "other", (1, 0)) as other:
            assert other.committed == 0
        with SinkWorker(address_of(host), "w", (1, 1)) as second:
            second.send(rows("new"))
            assert second.vote("t", 0)
            second.resolve("t", True)
            with pytest.raises(SinkGoneError):
                first.vote("t", 0)
    assert_lines(tmp_path, ["new"])


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
    monkeypatch.setattr(f"penstock.connect.protocol.sink_session.{limit}", 2)
    session = SinkSession(SinkTerms())
    list(session.receive([wire.Hello("v0.0.1", "", "p", "w")]))
    if limit == "STREAMS_MAX":
        list(session.admit(WorkerStanding()))
    assert not any(isinstance(effect, Close) for effect in carried_out(session, frames[:2]))
    *_, told, closed = carried_out(session, frames[2:])
    assert isinstance(told, Send)
    assert isinstance(told.frame, wire.Error)
    assert isinstance(closed, Close)
    assert session.state == "closed"


def carried_out(session: SinkSession, frames: list[wire.Frame]) -> Iterator[object]:
    for effect in session.receive(frames):
        if isinstance(effect, Open):
            session.start_stream(effect.stream, 0)
        yield effect


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
        wait_until(lambda: any("no Hello was received in time" in t for t in told), 10, "its end")


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
    told: list[object] = []
    for effect in session.admit(WorkerStanding()):
        if isinstance(effect, Open):
            session.start_stream(effect.stream, 0)
        told.append(effect)
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
        ([wire.Notify(1, "w", 0)], "Notify was sent before Hello"),
        ([wire.Hello("v0.0.1", "", "p", "w"), wire.Ok(3)], "a worker cannot send Ok now"),
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


def test_a_spool_that_cannot_be_written_is_voted_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    host = SinkHost(lambda worker: FileSink(tmp_path, worker), tmp_path, tell=said.append)
    with host, SinkWorker(address_of(host), "w", (1,)) as worker:
        with monkeypatch.context() as patched:
            patched.setattr(Spool, "save_vote", fail)
            worker.send(rows("x"))
            assert not worker.vote("t", 0)
        assert isinstance(worker.refusal, SinkGoneError)
        assert "no space left" in str(worker.refusal)
        worker.resolve("t", False)
    assert any("no space left" in line for line in said)
    assert_lines(tmp_path, [])


@pytest.mark.row("W12", engine="any")
@pytest.mark.parametrize("commit", [True, False])
def test_an_outcome_that_could_not_be_saved_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: bool
) -> None:
    """It does not count as told before it is durable."""

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    with a_host(tmp_path) as host:
        with SinkWorker(address_of(host), "w", (1,)) as worker:
            worker.send(rows("one"))
            assert worker.vote("t", 0)
            with monkeypatch.context() as patched:
                patched.setattr(Spool, "save_outcome", fail)
                with pytest.raises(SinkGoneError, match="no space left"):
                    worker.resolve("t", commit)
        with SinkWorker(address_of(host), "w", (2,)) as worker:
            assert worker.uncommitted == ("t",)
            worker.resolve("t", commit)
            assert worker.committed == (3 if commit else 0)
    assert_lines(tmp_path, ["one"] if commit else [])


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
    assert_lines(tmp_path, ["one", "two"])
    assert_lines(tmp_path, ["seven"], "w#7")
    assert_lines(tmp_path, ["nine"], "w#9")


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
    assert said[0] == "worker w connected: 0 bytes committed"
    assert ", which has connected before" in said[1]


def test_more_is_sent_than_there_are_credits(tmp_path: Path) -> None:
    with a_host(tmp_path, credits=10) as host:
        with SinkWorker(address_of(host), "w", (1,), DialOptions(timeout_s=10)) as worker:
            worker.send(rows(*(f"{n}" for n in range(500))))
            assert worker.vote("t", 0)
            worker.resolve("t", True)
    assert_lines(tmp_path, [f"{n}" for n in range(500)])


def test_nobody_there_is_told_in_time() -> None:
    with pytest.raises(SinkGoneError, match=r"lost its connection to the sink at 127\.0\.0\.1:9"):
        SinkWorker("127.0.0.1:9", "w", (1,), DialOptions(timeout_s=2)).__enter__()


class Fussy(FileSink):
    """Never takes a message that says no, and says so only when it is to be applied."""

    def apply(self, messages: Iterable[SinkMessage], after: Mark, mark: Mark) -> None:
        kept = list(messages)
        if any(message.data == b"no" for message in kept):
            raise ValueError("no is no answer")
        super().apply(kept, after, mark)


@pytest.mark.row("X10", engine="any")
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("step", ["sink.apply", "sink.applied", "sink.buried"])
def test_what_a_target_refuses_after_the_outcome_is_put_aside_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool, step: str
) -> None:
    """After some tries, interrupted anywhere; what comes around it is applied, in order."""
    monkeypatch.setattr(Fussy, "page_bytes", None if is_whole else 4)
    said: list[str] = []
    texts = ["a", "no", "b", "", "no", "c", "d", "no"]
    failpoints.arm(step, "raise", at=2)
    try:
        with SinkHost(lambda w: Fussy(tmp_path, w), tmp_path, tell=said.append) as host:
            with SinkWorker(address_of(host), "w", (1,)) as worker:
                worker.send(rows(*texts))
                assert worker.vote("t", 0)
                worker.resolve("t", True)
                wait_applied(worker)
            found = host.spool.dead()
    finally:
        failpoints.disarm()
    assert lines(tmp_path) == ["a", "b", "", "c", "d"]
    assert [(dead.name, dead.place.messages) for dead in found] == [("w", 1), ("w", 4), ("w", 7)]
    assert {(dead.message.data, dead.error) for dead in found} == {
        (b"no", "ValueError: no is no answer")
    }
    assert read_dead(tmp_path) == found


@pytest.mark.row("W11", engine="any")
def test_what_is_kept_of_workers_that_left_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vote that is open goes, and what was only sent; where they were is kept for a while."""
    with a_host(tmp_path) as host:
        with SinkWorker(address_of(host), "gone", (1,)) as worker:
            worker.send(rows("one"))
            assert worker.vote("t1", 0)
            worker.resolve("t1", True)
            worker.send(rows("two"))
            assert worker.vote("t2", 3)
        wait_until(lambda: not host._active, 10, "the sink letting go of it")
        with Peer(host.address) as peer:
            peer.send(wire.Hello("v0.0.1", "", "p", "w"))
            peer.tell(wire.WorkersLeft(7, ("gone", "never-here")), wire.ListUncommitted(8))
            assert isinstance(peer.next(), wire.Ok)
            assert told(peer) == wire.ReplyUncommitted(8, ())
        assert_lines(tmp_path, ["one"], "gone")
        count = "SELECT count(*) FROM chunks"
        wait_until(
            lambda: host.spool._database.execute(count).fetchone() == (0,), 10, "an empty spool"
        )
        with SinkWorker(address_of(host), "gone", (2,)) as worker:
            assert (worker.committed, worker.uncommitted) == (3, ())
        with Peer(host.address) as peer:
            wait_until(lambda: not host._active, 10, "the sink letting go of it")
            peer.send(wire.Hello("v0.0.1", "", "p", "w"))
            peer.tell(wire.WorkersLeft(7, ("gone",)), wire.ListUncommitted(8))
            peer.next()
            assert told(peer) == wire.ReplyUncommitted(8, ())
    monkeypatch.setattr("penstock.connect.hosts.spool.LEFT_MS", -1000)
    with a_host(tmp_path) as host:
        assert "gone" not in host.spool.standings()
        with SinkWorker(address_of(host), "gone", (1,)) as worker:
            assert worker.committed == 3, "the target knows it"


# What is on the disk


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
def test_a_vote_and_an_outcome_outlive_a_loss_of_power(tmp_path: Path) -> None:
    """Whatever is voted for or decided is synced before it counts."""
    chosen: list[str] = []
    with a_host(tmp_path) as host, SinkWorker(address_of(host), "w", (1,)) as worker:
        host.spool._database.set_trace_callback(chosen.append)

        def is_synced() -> bool:
            found = [text for text in chosen if text.startswith("PRAGMA synchronous")]
            chosen.clear()
            return "PRAGMA synchronous = FULL" in found

        worker.send(rows("one"))
        assert worker.vote("t1", 0)
        assert is_synced()
        worker.resolve("t1", True)
        assert is_synced()
        worker.send(rows("two"))
        assert worker.vote("t2", 3)
        assert is_synced()
        worker.resolve("t2", False)
        assert is_synced()
        host.spool._database.set_trace_callback(None)


@pytest.mark.row("W12", engine="any")
def test_what_is_applied_to_a_file_outlives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = Synced(monkeypatch)
    sink = FileSink(tmp_path, "w")
    after = sink.applied()
    for _ in range(3):
        message = SinkMessage(None, 0, b"one")
        sink.apply([message], after, after.advance(message.data))
        after = after.advance(message.data)
        assert synced.has(sink.path)
        assert synced.has(sink.path.with_suffix(".ends"))


def test_one_process_has_the_folder(host: SinkHost, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another process is using the sink folder"):
        a_host(tmp_path).__enter__()


# Kills

ATTEMPTS = itertools.count()


@pytest.mark.row("W12", engine="any")
@pytest.mark.parametrize(
    "step",
    [name for name in CONNECTOR_NAMES if name.startswith("sink.") and name != "sink.buried"],
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
    assert_lines(tmp_path, wanted)


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
            with pytest.raises(ConnectorError, match="wrong cookie"):
                with SinkWorker(address_of(host), "w", (1,)) as worker:
                    worker.send(rows(*["x" * 1000] * 1000))


def test_an_older_attempt_is_refused_after_a_restart_of_the_sink_too(tmp_path: Path) -> None:
    """It would abort what a newer one has voted for, and perhaps decided."""
    with a_host(tmp_path) as host, SinkWorker(address_of(host), "w", (2,)) as newer:
        newer.send(rows("one"))
        assert newer.vote("t2", 0)
    with a_host(tmp_path) as host:
        with pytest.raises(ConnectorError, match=r"attempt 1 of worker w is older than 2, .*: an"):
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
        with pytest.raises(ConnectorError, match="resolved before, with the opposite outcome"):
            worker.resolve("t1", True)


def test_a_file_of_an_earlier_version_is_gone_on_with(tmp_path: Path) -> None:
    """It had what was only voted for behind what was committed; that is cut off."""
    sink = FileSink(tmp_path, "w")
    sink.path.write_bytes(b"one\ntwo\n")
    before = b'{"committed":{"at":3,"place":4},"voted":{"at":6,"place":8}}'
    sink.path.with_suffix(".ends").write_bytes(before)
    assert sink.applied() == Mark(3, 0)
    sink.apply([SinkMessage(None, 0, b"three")], Mark(3, 0), Mark(8, 1))
    assert sink.applied() == Mark(8, 1)
    assert lines(tmp_path) == ["one", "three"]


def test_a_file_that_lost_what_was_applied_is_refused(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, "w")
    sink.apply([SinkMessage(None, 0, b"one")], Mark(), Mark(3, 1))
    sink.path.write_bytes(b"")
    with pytest.raises(UsageError, match="is shorter than what was written to it"):
        sink.apply([SinkMessage(None, 0, b"two")], Mark(3, 1), Mark(6, 2))


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
        def applied(self) -> Mark:
            raise OSError("no route to host")

    with SinkHost(lambda worker: Away(tmp_path, worker), tmp_path) as host:
        with pytest.raises(SinkGoneError, match="try again later: the target cannot be used"):
            with SinkWorker(address_of(host), "w", (1,)):
                pass
