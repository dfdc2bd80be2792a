"""Redis channels as a source: messages published while the source is listening.

RedisSubscribeSource("news", "redis://127.0.0.1/0", "news")
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import cast

import redis

from penstock.connect.clients.source import Item, Source
from penstock.connect.protocol.numbering import OwnNumbers, explain_overtaking
from penstock.connect.systems.redis import CONNECT_TIMEOUT_S, HOPELESS, TIMEOUT_S, make_client
from penstock.patience import Patience

TICK_S = 0.2
BUFFER_BYTES_MAX = 32 << 20
MESSAGE_BYTES = 200
"""Approximately how much memory a waiting message takes besides its data."""


class RedisSubscribeSource(Source):
    """Messages of Redis channels, at most once.

    Redis stores no messages: those published while nobody listens are lost, which may have
    happened between any two of `connections`. Messages wait in memory until they are safe in the
    log; beyond `buffer_bytes_max` the oldest one that was not sent is lost, and counted in
    `dropped`. Waiting messages are lost with the process.
    """

    def __init__(
        self, name: str, url: str, *channels: str, buffer_bytes_max: int = BUFFER_BYTES_MAX
    ) -> None:
        super().__init__(name)
        self._url = url
        self._channels = channels
        self._room = buffer_bytes_max
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._sent: deque[Item] = deque()
        self._numbers = OwnNumbers()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, name=f"redis-{name}", daemon=True)
        self._failure: redis.RedisError | None = None
        self.dropped = 0
        self.connections = 0

    def handle_open(self) -> None:
        self._thread.start()

    def handle_close(self) -> None:
        self._stopping.set()
        self._thread.join(CONNECT_TIMEOUT_S + TIMEOUT_S)

    def handle_reset(self, point_of_ref: int | None) -> None:
        with self._lock:
            if self._numbers.resume(point_of_ref):
                self._forget(point_of_ref)
                self._waiting.extendleft(item.data for item in reversed(self._sent))
            elif self._sent:  # messages that may not have arrived are not sent again
                self.tell(explain_overtaking(self.name, len(self._sent)))
                self.dropped += len(self._sent)
                self._room += sum(len(item.data) + MESSAGE_BYTES for item in self._sent)
            self._sent.clear()

    def handle_next(self) -> Item | None:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            if not self._waiting:
                return None
            item = Item(self._waiting.popleft(), self._numbers.take())
            self._sent.append(item)
        return item

    def handle_progress(self, stream: str, point_of_ref: int) -> None:  # noqa: ARG002  its own
        with self._lock:
            self._forget(point_of_ref)

    def _forget(self, point_of_ref: int | None) -> None:
        while point_of_ref is not None and self._sent and self._sent[0][1] <= point_of_ref:
            self._room += len(self._sent.popleft().data) + MESSAGE_BYTES

    def _listen(self) -> None:
        patience = Patience("Redis", self.tell)
        while not self._stopping.is_set():
            try:
                with make_client(self._url) as client, client.pubsub() as there:
                    there.subscribe(*self._channels)
                    while not self._stopping.is_set():
                        self._heard(there.get_message(timeout=TICK_S))
                        patience.note_answer()
            except HOPELESS as error:
                self._failure = error
                return
            except (redis.ConnectionError, redis.TimeoutError) as error:
                self._stopping.wait(patience.note_failure(error))
            except redis.RedisError as error:
                self._failure = error
                return

    def _heard(self, message: Mapping[str, object] | None) -> None:
        if message is None:
            return
        if message["type"] == "subscribe":
            self.connections += 1
        elif message["type"] == "message":
            data = cast(bytes, message["data"])
            with self._lock:
                self._waiting.append(data)
                self._room -= len(data) + MESSAGE_BYTES
                while self._room < 0 and self._waiting:
                    self._room += len(self._waiting.popleft()) + MESSAGE_BYTES
                    self.dropped += 1
