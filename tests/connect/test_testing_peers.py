"""The other side of a connector, as authors test with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.connect.clients.source import ConnectorOptions, Source, SourceConnector
from penstock.connect.hosts.sink_host import SinkHost
from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.sinks.file import FileSink
from penstock.testing.connectors import SinkPeer, SourcePeer


class Counting(Source):
    def handle_reset(self, point_of_ref: int | None) -> None:
        self.next = 0 if point_of_ref is None else point_of_ref + 1

    def handle_next(self) -> tuple[bytes, int] | None:
        if self.next >= 3000:
            return None
        self.next += 1
        return b"%d" % (self.next - 1), self.next - 1


@pytest.mark.row("X10", engine="any")
def test_a_source_peer_takes_each_message_once(tmp_path: Path) -> None:
    """Over a cut, a restart, and messages that it has not acknowledged."""
    quick = ConnectorOptions(backoff_s=0.01, backoff_s_max=0.05)
    with SourcePeer(credits_given=5000, acknowledges=False) as listener:
        with SourceConnector(listener.address, [Counting("numbers")], quick):
            listener.wait(1)
            listener.acknowledges = True
            listener.drop()
            listener.wait(1000)
            listener.restart()
            found = listener.wait(3000)
    assert [message.data for message in found] == [b"%d" % n for n in range(3000)]
    assert {message.stream for message in found} == {"numbers"}
    assert listener.connections >= 2


@pytest.mark.row("X10", engine="any")
def test_a_sink_peer_plays_a_worker(tmp_path: Path) -> None:
    messages = [SinkMessage(b"key", 0, b"one"), SinkMessage(None, 0, b"two")]
    with SinkHost(lambda worker: FileSink(tmp_path, worker), tmp_path) as host:
        with SinkPeer("{}:{}".format(*host.address)) as peer:
            peer.deliver(messages)
            peer.repeat(messages)
            name = peer.vote([SinkMessage(None, 0, b"never")])
            assert name is not None
            peer.tell(name, False)
            peer.disconnect()
            progress = peer.wait_applied()
    assert progress is not None
    assert progress.applied == progress.staged == (6, 2)
    assert FileSink(tmp_path, "worker").path.read_bytes() == b"one\ntwo\n"
