"""Every sink keeps the promises of `Sink`: random steps and restarts against a model."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.connect.reading import SPOOL_BYTES_MAX
from penstock.connect.sink import Sink
from penstock.connect.sinks.file import FileSink
from penstock.connect.spool import Spool, SpoolSink
from penstock.connect.wire import Message

Texts = list[bytes]


class Kind:
    """A kind of sink, and how to see what it has made visible."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> Sink:
        raise NotImplementedError

    def restart(self) -> Sink:
        """As after a kill: what was in memory is gone."""
        return self.make()

    def visible(self, committed: int) -> Texts:
        """What readers see; a sink that cannot hide anything shows it up to `committed`."""
        raise NotImplementedError


class Files(Kind):
    def make(self) -> Sink:
        return FileSink(self.folder, "w")

    def visible(self, committed: int) -> Texts:
        texts, at = [], 0
        for line in FileSink(self.folder, "w").path.read_bytes().splitlines():
            at += len(line)
            texts.append(line)
        assert at == committed
        return texts


class Spools(Kind):
    spool: Spool | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._read: Texts = []

    def make(self) -> Sink:
        self.spool = Spool(self.folder, SPOOL_BYTES_MAX)
        return SpoolSink(self.spool, "w")

    def restart(self) -> Sink:
        assert self.spool is not None
        self.spool.close()
        return self.make()

    def visible(self, committed: int) -> Texts:
        assert self.spool is not None
        while (found := self.spool.take()) is not None:
            self._read.append(found.data)
        return self._read


@contextmanager
def plain(kind: type[Kind], folder: Path) -> Iterator[Kind]:
    yield kind(folder)


KINDS: dict[str, Callable[[Path], object]] = {
    "file": lambda folder: plain(Files, folder),
    "spool": lambda folder: plain(Spools, folder),
}


@pytest.mark.row("W12", engine="any")
@pytest.mark.parametrize("name", KINDS)
def test_random_steps(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seed = int(os.environ.get("PENSTOCK_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"{request.node.name}: PENSTOCK_SEED={seed}")
    chance = random.Random(seed)
    with KINDS[name](tmp_path) as kind:  # type: ignore[attr-defined]
        Walk(kind, chance).go(300)


class Walk:
    """A worker that sends, asks for votes, tells outcomes, and is interrupted anywhere."""

    def __init__(self, kind: Kind, chance: random.Random) -> None:
        self.kind = kind
        self.chance = chance
        self.sink = kind.make()
        self.done: Texts = []
        """What was committed."""
        self.sent: Texts = []
        self.pending: Texts | None = None
        self.count = 0
        self.sink.open(0, None)

    @property
    def committed(self) -> int:
        return sum(map(len, self.done))

    def go(self, steps: int) -> None:
        for _ in range(steps):
            step = self.chance.choice(
                [self.append, self.append, self.vote, self.tell, self.restart]
            )
            step()
            if self.pending is None and not self.sent:
                assert self.kind.visible(self.committed) == self.done
        self.sink.close()

    def append(self) -> None:
        if self.pending is not None:
            return
        texts = []
        for _ in range(self.chance.randrange(1, 4)):
            self.count += 1
            texts.append(self.chance.choice([b"", b"%d" % self.count]))
        at = self.committed + sum(map(len, self.sent))
        messages = []
        for text in texts:
            messages.append(Message(1, at, 0, None, text))
            at += len(text)
        self.sink.append(messages)
        self.sent += texts

    def vote(self) -> None:
        if self.pending is None:
            self.sink.flush()
            if self.chance.random() < 0.2:  # killed before the vote was saved
                self.reopened()
            else:
                self.pending, self.sent = self.sent, []

    def tell(self) -> None:
        if self.pending is None:
            return
        start = self.committed
        is_yes = self.chance.random() < 0.6
        again = 1 + (self.chance.random() < 0.3)
        for left in reversed(range(again)):
            if is_yes:
                self.sink.commit(start, start + sum(map(len, self.pending)))
            else:
                self.sink.abort(start)
            if left:  # killed before the outcome was saved
                self.reopened()
        self.done += self.pending if is_yes else []
        self.pending = None

    def restart(self) -> None:
        self.reopened()

    def reopened(self) -> None:
        self.sink.close()
        self.sink = self.kind.restart()
        kept = None if self.pending is None else self.committed + sum(map(len, self.pending))
        self.sink.open(self.committed, kept)
        self.sent = []
