"""What every sink promises, as tests: subclass with fixtures that create it and read its target.

    class TestLines(SinkTargetContract):
        @pytest.fixture
        def make(self, tmp_path): return lambda worker: Lines(tmp_path, worker)

        @pytest.fixture
        def visible(self, tmp_path): return lambda: ...

See docs/testing.md for a complete example.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

from penstock.connect.hosts.sink_host import SinkHost
from penstock.connect.hosts.targets import SinkMessage, SinkTarget, TargetMaker
from penstock.connect.protocol.marks import Mark
from penstock.errors import MarkMovedError
from penstock.testing.connectors import SinkPeer

OpenSink = Callable[[Path], AbstractContextManager[str]]
Visible = Callable[[], list[bytes]]
"""Returns the data of everything that readers of the target can see, in order."""


class SinkContract:
    """A sink as Penstock sees it, over the protocol: each decided message once, and no others.

    A subclass defines the fixtures `open_sink`, which runs the sink at an address with a folder
    for its spool, and `visible`.
    """

    steps: ClassVar[int] = 60
    """The number of steps of the random walk."""
    looks: ClassVar[bool] = True
    """Whether to check the target after every step, or only at the end."""
    survives_loss: ClassVar[bool] = True
    """Whether the target is separate from the spool, so that losing the spool loses nothing."""

    @pytest.fixture
    def worker(self) -> str:
        """The worker's name; unique to each test if the target is shared."""
        return "worker"

    @pytest.fixture
    def open_sink(self) -> OpenSink:
        raise NotImplementedError("define a fixture open_sink")

    @pytest.fixture
    def visible(self) -> Visible:
        raise NotImplementedError("define a fixture visible")

    def message(self, number: int) -> SinkMessage:
        """A message that the target can accept; no two are equal."""
        return SinkMessage(b"k", 0, b"%d" % number)

    def messages(self, first: int, count: int) -> list[SinkMessage]:
        return [self.message(number) for number in range(first, first + count)]

    def test_a_decided_transaction_is_visible_once(
        self, open_sink: OpenSink, visible: Visible, worker: str, tmp_path: Path
    ) -> None:
        with open_sink(tmp_path / "spool") as address, SinkPeer(address, worker) as peer:
            first, second = self.messages(0, 3), self.messages(3, 2)
            peer.deliver(first)
            peer.repeat(first)
            name = peer.vote(second)
            assert name is not None
            peer.wait_applied()
            assert visible() == data_of(first), "nothing of it before it is decided"
            peer.decide(name, second)
            peer.tell(name, True)
            peer.tell(name, True)
            peer.wait_applied()
            assert visible() == data_of(first + second)

    def test_an_abort_leaves_nothing(
        self, open_sink: OpenSink, visible: Visible, worker: str, tmp_path: Path
    ) -> None:
        with open_sink(tmp_path / "spool") as address, SinkPeer(address, worker) as peer:
            name = peer.vote(self.messages(0, 3))
            assert name is not None
            peer.tell(name, False)
            peer.deliver(self.messages(3, 2))
            peer.wait_applied()
        assert visible() == data_of(self.messages(3, 2))

    def test_a_vote_outlives_the_sink(
        self, open_sink: OpenSink, visible: Visible, worker: str, tmp_path: Path
    ) -> None:
        peer = SinkPeer("", worker)
        with self._opened(open_sink, tmp_path, peer):
            name = peer.vote(self.messages(0, 3))
            assert name is not None
        with self._opened(open_sink, tmp_path, peer):
            peer.decide(name, self.messages(0, 3))
            peer.connect()
            peer.wait_applied()
        assert visible() == data_of(peer.decided)

    def test_random_steps_and_restarts(
        self, open_sink: OpenSink, visible: Visible, worker: str, tmp_path: Path
    ) -> None:
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")  # noqa: T201  shown when it fails
        chance = random.Random(seed)
        peer, left = SinkPeer("", worker), self.steps
        while left > 0:
            with self._opened(open_sink, tmp_path, peer):
                while left > 0 and chance.random() < 0.9:
                    left -= 1
                    self._walk(peer, chance)
                    if self.looks and chance.random() < 0.3:
                        peer.wait_applied()
                        assert visible() == data_of(peer.decided)
            if self.survives_loss and chance.random() < 0.3:
                shutil.rmtree(tmp_path / "spool")
        with self._opened(open_sink, tmp_path, peer):
            peer.wait_applied()
        assert visible() == data_of(peer.decided)

    def _walk(self, peer: SinkPeer, chance: random.Random) -> None:
        """One transaction, which may be interrupted at any point."""
        self._number = getattr(self, "_number", 0)
        messages = self.messages(self._number, chance.randrange(0, 5))
        self._number += len(messages)
        name = peer.vote(messages)
        assert name is not None
        ways = ["told", "told", "aborted", "forgotten", "decided"]
        match chance.choice(ways):
            case "told":
                peer.decide(name, messages)
                peer.tell(name, True)
            case "aborted":
                peer.tell(name, False)
            case "forgotten":
                peer.disconnect()
            case "decided":
                peer.decide(name, messages)
                peer.disconnect()

    @contextlib.contextmanager
    def _opened(self, open_sink: OpenSink, folder: Path, peer: SinkPeer) -> Iterator[None]:
        with open_sink(folder / "spool") as address:
            peer.address = address
            try:
                yield
            finally:
                peer.disconnect()

    def test_a_sink_that_lost_its_spool_is_sent_the_rest_again(
        self, open_sink: OpenSink, visible: Visible, worker: str, tmp_path: Path
    ) -> None:
        if not self.survives_loss:
            pytest.skip("its folder is the target")
        peer = SinkPeer("", worker)
        with self._opened(open_sink, tmp_path, peer):
            peer.deliver(self.messages(0, 3))
            peer.wait_applied()
            name = peer.vote(self.messages(3, 3))
            assert name is not None
            peer.decide(name, self.messages(3, 3))
        shutil.rmtree(tmp_path / "spool")
        with self._opened(open_sink, tmp_path, peer):
            peer.deliver(self.messages(6, 2))
            peer.wait_applied()
        assert visible() == data_of(self.messages(0, 8))


class SinkTargetContract(SinkContract):
    """A `SinkTarget` by itself, and in a host. A subclass defines the fixtures `make` and
    `visible`."""

    @pytest.fixture
    def make(self) -> TargetMaker:
        raise NotImplementedError("define a fixture make")

    @pytest.fixture
    def open_sink(self, make: TargetMaker) -> OpenSink:
        @contextlib.contextmanager
        def open_(folder: Path) -> Iterator[str]:
            with SinkHost(make, folder, tell=print) as host:
                yield "{}:{}".format(*host.address)

        return open_

    @pytest.fixture
    def target(self, make: TargetMaker, worker: str) -> Iterator[SinkTarget]:
        found = make(worker)
        yield found
        found.close()

    def test_messages_and_mark_move_together(
        self, make: TargetMaker, target: SinkTarget, visible: Visible, worker: str
    ) -> None:
        messages = self.messages(0, 3)
        assert target.applied() == Mark()
        end = apply(target, messages, Mark())
        assert visible() == data_of(messages)
        target.apply(iter(()), end, Mark(end.offset, end.messages + 1))
        target.close()
        again = make(worker)
        assert again.applied() == Mark(end.offset, end.messages + 1), "it is kept in the target"
        again.close()

    def test_a_step_from_elsewhere_changes_nothing(
        self, target: SinkTarget, visible: Visible
    ) -> None:
        target.applied()
        end = apply(target, self.messages(0, 2), Mark())
        for wrong in (Mark(), Mark(end.offset, end.messages + 1), Mark(end.offset + 1, 7)):
            with pytest.raises(MarkMovedError):
                target.apply(self.messages(2, 1), wrong, Mark(1000, 1000))
        assert target.applied() == end
        assert visible() == data_of(self.messages(0, 2))

    def test_a_frozen_host_does_not_apply_over_its_successor(
        self, make: TargetMaker, target: SinkTarget, visible: Visible, worker: str
    ) -> None:
        frozen = make(worker)
        frozen.applied()
        target.applied()
        apply(target, self.messages(0, 2), Mark())
        with pytest.raises(MarkMovedError):
            apply(frozen, self.messages(0, 2), Mark())
        frozen.close()
        assert visible() == data_of(self.messages(0, 2))

    def test_a_step_that_is_interrupted_can_be_done_again(
        self, target: SinkTarget, visible: Visible
    ) -> None:
        messages = self.messages(0, 4)

        def break_off() -> Iterator[SinkMessage]:
            yield from messages[:2]
            raise OSError("interrupted")

        assert target.applied() == Mark()
        with pytest.raises(OSError, match="interrupted"):
            target.apply(break_off(), Mark(), Mark(1, 4))
        assert target.applied() == Mark()
        apply(target, messages, Mark())
        assert visible() == data_of(messages)

    def test_a_vote_does_not_need_the_target(
        self, make: TargetMaker, visible: Visible, worker: str, tmp_path: Path
    ) -> None:
        """If the host knows the worker. What was decided is applied when the target is back."""
        is_away = False

        class Away(SinkTarget):
            def __init__(self) -> None:
                self._real = make(worker)
                self.page_bytes = self._real.page_bytes

            def applied(self) -> Mark:
                self._meet()
                return self._real.applied()

            def apply(self, messages, after, mark) -> None:  # type: ignore[no-untyped-def]
                self._meet()
                self._real.apply(messages, after, mark)

            def close(self) -> None:
                self._real.close()

            def _meet(self) -> None:
                if is_away:
                    raise OSError("the target is away")

        with SinkHost(lambda _: Away(), tmp_path / "spool", tell=print) as host:
            with SinkPeer("{}:{}".format(*host.address), worker) as peer:
                peer.deliver(self.messages(0, 1))
                peer.wait_applied()
                is_away = True
                peer.deliver(self.messages(1, 2))
                progress = peer.connect().ask()
                assert progress is not None
                assert progress.applied < progress.staged
                is_away = False
                peer.wait_applied()
        assert visible() == data_of(self.messages(0, 3))


def apply(target: SinkTarget, messages: list[SinkMessage], after: Mark) -> Mark:
    """Apply messages after a mark, and return the mark after them."""
    mark = after
    for message in messages:
        mark = mark.advance(message.data)
    target.apply(iter(messages), after, mark)
    return mark


def data_of(messages: list[SinkMessage]) -> list[bytes]:
    return [message.data for message in messages]
