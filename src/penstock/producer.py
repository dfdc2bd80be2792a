"""The producer: sends events one by one or in columns, and commits them in batches.

A background thread takes everything that has been sent, writes it as one numbered commit, and
continues with whatever was sent in the meantime. So batches grow with the load, without any
added delay.
"""

from __future__ import annotations

import datetime as dt
import secrets
import threading
import time as clock
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Literal, NamedTuple, Self, cast

import msgspec
import pyarrow as pa

from penstock.errors import (
    BufferFullError,
    ClosedError,
    CommitOutcomeUnknownError,
    DeliveryTimeoutError,
    FencedError,
    PenstockError,
    UsageError,
)
from penstock.log.api import Commit, CommitOptions, Committed, Holder, Log, Part, Placement
from penstock.log.batch import Compression, check_compression
from penstock.log.declaring.objects import Acks, Stream
from penstock.log.writing.commit import next_sequence
from penstock.log.writing.compose import Composer, EventOptions, Outgoing
from penstock.log.writing.fate import Again, Ending, Fate, Tries, fate_of
from penstock.log.writing.partitioning import places
from penstock.records.event import Key

STREAM_KEPT_S = 1.0
GATHER_S = 0.001


class ProducerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a producer.

    name: its transactional id; opening it fences an older producer of that name. The default
        is a unique name, which the log forgets after days without use.
    client_id: the source of its events.
    batch_bytes_max, batch_rows_max: a commit is made as soon as this much is waiting.
    batch_delay_ms: how long to wait for more before committing less than that.
    buffer_bytes_max: how much may wait in memory.
    on_full: whether a send blocks when the buffer is full (for at most `block_ms_max`), or
        raises immediately.
    compression: none, lz4 or zstd.
    acks: what a commit waits for; by default, what its streams specify.
    retries: how often to retry a commit, waiting `retry_backoff_ms`, doubled each time up
        to `retry_backoff_ms_max`.
    request_timeout_ms: how long one attempt may take.
    delivery_timeout_ms: how long an event may take from being sent until it is committed or
        given up.
    """

    name: str | None = None
    client_id: str = "penstock"
    batch_bytes_max: int = 4 << 20
    batch_rows_max: int = 65_536
    batch_delay_ms: float = 0.0
    buffer_bytes_max: int = 64 << 20
    on_full: Literal["block", "error"] = "block"
    block_ms_max: int = 60_000
    compression: Compression = "lz4"
    acks: Acks | None = None
    retries: int = 1_000_000
    retry_backoff_ms: int = 20
    retry_backoff_ms_max: int = 1_000
    request_timeout_ms: int = 30_000
    delivery_timeout_ms: int = 120_000

    def check(self) -> None:
        """Raise `UsageError` if a setting is not valid."""
        check_compression(self.compression)
        if self.on_full not in ("block", "error"):
            raise UsageError(f"on_full is {self.on_full!r}; it must be block or error")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 0 if name in ("batch_delay_ms", "retries") else 1
            if isinstance(value, int | float) and value < least:
                raise UsageError(f"{name} is {value}; it must be at least {least}")
        if self.request_timeout_ms > self.delivery_timeout_ms:
            raise UsageError("request_timeout_ms is longer than delivery_timeout_ms")


class Place(NamedTuple):
    """Where an event is stored. The offset is `None` if the stream already held the event."""

    partition: int
    offset: int | None
    id: str

    @property
    def duplicate(self) -> bool:
        return self.offset is None


class Admitted(NamedTuple):
    """An event that has been checked and given an id, but not sent yet."""

    stream: Stream
    event: Outgoing


class _Waiting(NamedTuple):
    """Something waiting to be committed: one event, or columns that already form a part."""

    stream: Stream
    what: Outgoing | Part
    future: Future[Place] | Future[Committed]
    size: int
    rows: int
    deadline: float


class Producer:
    """Sends events to a log.

        with Producer(log) as producer:
            place = producer.send("orders", order).result()

    Safe to use from many threads; their events share commits. Events of one producer are
    committed in the order they were sent. Leaving the block, or `close`, commits whatever is
    still waiting.
    """

    def __init__(self, log: Log, options: ProducerOptions = ProducerOptions()) -> None:
        options.check()
        if not hasattr(log, "commit"):
            raise UsageError(
                f"a producer takes an open log, not {type(log).__name__}: "
                "with penstock.open(...) as log"
            )
        self._log = log
        self._options = options
        self._composer = Composer(options.client_id, log.limits)
        self._commit_options = CommitOptions(
            acks=options.acks,
            compression=options.compression,
            timeout_ms=options.request_timeout_ms,
        )
        self._streams: dict[str, tuple[Stream, float]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._rows = 0
        self._in_flight: list[_Waiting] = []
        self._hurry = 0
        self._last_group = 1
        self._changed = threading.Condition()
        self._closing = False
        self._failure: PenstockError | None = None
        self.trouble: Exception | None = None
        """Why the commit that is being retried has not succeeded yet; for callers that wait."""
        self._holder: Holder | None = None
        self._sequence = 0
        self._thread: threading.Thread | None = None

    def open(self) -> Self:
        """Take the producer's name, fencing its older holder, and start the background thread."""
        self._holder = self._hold()
        name = self._options.name or self._options.client_id
        self._thread = threading.Thread(target=self._loop, name=f"penstock-{name}", daemon=True)
        self._thread.start()
        return self

    def _hold(self) -> Holder:
        name = self._options.name or f"{self._options.client_id}-{secrets.token_hex(8)}"
        holder = self._log.hold(name, ephemeral=self._options.name is None)
        self._sequence = next_sequence(self._log, name)
        return holder

    def __enter__(self) -> Self:
        return self if self._thread is not None else self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(
        self,
        stream: str,
        data: object,
        *,
        key: Key | None = None,
        id: str | int | None = None,  # noqa: A002  the word for it
        time: dt.datetime | None = None,
        type: str | None = None,  # noqa: A002  the word for it
        headers: Mapping[str, str] | None = None,
    ) -> Future[Place]:
        """Send one event; the future resolves to its place once it is committed.

        An invalid event raises here, immediately. The future raises `FencedError`,
        `DeliveryTimeoutError` (not committed) or `CommitOutcomeUnknownError`.
        """
        options = EventOptions(key=key, id=id, time=time, type=type, headers=headers)
        return self.send_admitted(self.admit(stream, data, options))

    def admit(self, stream: str, data: object, options: EventOptions = EventOptions()) -> Admitted:
        """Check an event and give it its id, without sending it yet.

        For callers that want to know that all of several events are valid before sending the first.
        """
        found = self._stream(stream)
        return Admitted(found, self._composer.admit(found, data, options))

    def send_admitted(self, admitted: Admitted) -> Future[Place]:
        """Send an event returned by `admit`."""
        stream, event = admitted
        future: Future[Place] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._enqueue(_Waiting(stream, event, future, event.size, 1, self._deadline()))
        return future

    def append(self, stream: str, batch: pa.RecordBatch | pa.Table) -> Future[Committed]:
        """Send a batch of columns; the future resolves to the commit that contains it."""
        found = self._stream(stream)
        part = self._log.prepare(self._composer.arrow_part(found, batch), self._commit_options)
        future: Future[Committed] = Future()
        future.set_running_or_notify_cancel()
        size, rows = part.batch.nbytes, part.batch.num_rows
        self._enqueue(_Waiting(found, part, future, size, rows, self._deadline()))
        return future

    def flush(self) -> None:
        """Wait until everything sent so far is committed or has failed.

        Must not be called from a future's callback: callbacks run in the thread that commits.
        """
        with self._changed:
            pending: list[Future[Place] | Future[Committed]] = [
                sent.future for sent in (*self._in_flight, *self._waiting)
            ]
            self._hurry = len(self._waiting)
            self._changed.notify_all()
        wait(cast(list[Future[object]], pending))

    def close(self) -> None:
        """Commit whatever is waiting, then stop. A second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # Sending

    def _stream(self, name: str) -> Stream:
        found, until = self._streams.get(name, (None, 0.0))
        if found is None or clock.monotonic() > until:
            found = self._log.stream(name)
            self._streams[name] = (found, clock.monotonic() + STREAM_KEPT_S)
        return found

    def _deadline(self) -> float:
        return clock.monotonic() + self._options.delivery_timeout_ms / 1000

    def _enqueue(self, sent: _Waiting) -> None:
        with self._changed:
            self._check_usable()
            if self._bytes and self._bytes + sent.size > self._options.buffer_bytes_max:
                self._wait_for_room(sent.size)
            self._waiting.append(sent)
            self._bytes += sent.size
            self._rows += sent.rows
            if len(self._waiting) == 1 or self._is_full():  # otherwise nobody is waiting for this
                self._changed.notify_all()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing or self._thread is None or not self._thread.is_alive():
            raise ClosedError("the producer is closed: use it inside its `with` block")

    def _wait_for_room(self, size: int) -> None:
        most = self._options.buffer_bytes_max
        fact = f"the producer's buffer is full ({self._bytes} of {most} bytes, buffer_bytes_max)"
        if self._options.on_full == "error":
            raise BufferFullError(f"{fact}: send more slowly, or set on_full to block")
        self._hurry = len(self._waiting)
        self._changed.notify_all()
        room = self._changed.wait_for(
            lambda: not self._bytes or self._bytes + size <= most or self._failure or self._closing,
            timeout=self._options.block_ms_max / 1000,
        )
        self._check_usable()
        if not room:
            raise BufferFullError(
                f"{fact} and stayed so for {self._options.block_ms_max} ms (block_ms_max)"
            )

    # Committing, in the background thread

    def _loop(self) -> None:
        try:
            while group := self._next_group():
                self._deliver(group)
                with self._changed:
                    self._in_flight = []
                    self._bytes -= sum(sent.size for sent in group)
                    self._changed.notify_all()
        except BaseException as error:  # no caller may wait forever
            broken = ClosedError(f"the producer stopped because of an unexpected error: {error!r}")
            self._stop_with(broken)
            for sent in self._in_flight:
                if not sent.future.done():
                    sent.future.set_exception(broken)
            raise

    def _next_group(self) -> list[_Waiting]:
        """Wait for the next commit's events; empty once the producer is closed and drained."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return []
            self._linger()
            self._in_flight = self._take()
            return self._in_flight

    def _linger(self) -> None:
        """Wait for more, up to the batch delay, unless enough is waiting or a caller is blocked.

        Without a batch delay: if the last commit had many events, their senders will send again in
        a moment, and committing the first of these alone would only make the others wait.
        """
        delay_s = self._options.batch_delay_ms / 1000
        self._changed.wait_for(
            lambda: self._closing or self._hurry or self._is_full(),
            timeout=delay_s or GATHER_S,
        )

    def _is_full(self) -> bool:
        gathered = not self._options.batch_delay_ms and len(self._waiting) >= self._last_group
        return (
            gathered
            or self._bytes >= self._options.batch_bytes_max
            or self._rows >= self._options.batch_rows_max
        )

    def _take(self) -> list[_Waiting]:
        """The next commit's events: in order, within the limits, at least one."""
        group: list[_Waiting] = []
        size = rows = 0
        while self._waiting:
            sent = self._waiting[0]
            size, rows = size + sent.size, rows + sent.rows
            full = size > self._options.batch_bytes_max or rows > self._options.batch_rows_max
            if group and full:
                break
            group.append(self._waiting.popleft())
        self._last_group = len(group)
        self._rows -= sum(sent.rows for sent in group)
        self._hurry = max(0, self._hurry - len(group))
        return group

    def _deliver(self, group: Sequence[_Waiting]) -> None:
        """Commit a group. If it is refused, halve it until only the faulty events are left."""
        if self._failure is not None:
            self._fail(group, self._failure)
            return
        try:
            parts, members = self._parts(group)
        except Exception as error:  # whatever it was, nothing has been committed
            self._leave_out(group, error)
            return
        try:
            committed = self._commit(Commit(parts=parts), min(sent.deadline for sent in group))
        except PenstockError as error:
            if fate_of(error) is Fate.REFUSED:
                self._leave_out(group, error)
            else:
                self._fail(group, error)
            return
        for placement, part, sent in zip(committed.placements, parts, members, strict=True):
            _resolve(placement, part, sent, committed)

    def _leave_out(self, group: Sequence[_Waiting], error: Exception) -> None:
        if len(group) == 1:
            self._fail(group, error)
            return
        half = len(group) // 2
        self._deliver(group[:half])
        self._deliver(group[half:])

    def _parts(self, group: Sequence[_Waiting]) -> tuple[list[Part], list[list[_Waiting]]]:
        """Combine adjacent single events of a stream into one part; the order is kept."""
        members: list[list[_Waiting]] = []
        open_: dict[str, list[_Waiting]] = {}
        for sent in group:
            name = str(sent.stream.name)
            same = open_.get(name)
            if isinstance(sent.what, Part):
                open_.pop(name, None)
                members.append([sent])
            elif same is not None and same[0].stream.version == sent.stream.version:
                same.append(sent)
            else:
                open_[name] = [sent]
                members.append(open_[name])
        return [self._part(sents) for sents in members], members

    def _part(self, sents: Sequence[_Waiting]) -> Part:
        first = sents[0]
        if isinstance(first.what, Part):
            return first.what
        events = [sent.what for sent in sents if isinstance(sent.what, Outgoing)]
        return self._composer.part(first.stream, events)

    def _commit(self, commit: Commit, deadline: float) -> Committed:
        holder = self._holder = self._holder or self._hold()
        try:
            return self._commit_as(holder, commit, deadline)
        except FencedError:
            if self._options.name is not None:
                raise
            # Nobody else knows this name: the log has forgotten it, after days without use.
            self._holder = self._hold()
            return self._commit_as(self._holder, commit, deadline)

    def _commit_as(self, holder: Holder, commit: Commit, deadline: float) -> Committed:
        """Commit under the next number, retrying as long as that may help.

        Raises `CommitOutcomeUnknownError` if any attempt may have succeeded, and otherwise an error
        that says that none did.
        """
        sequence, self._sequence = self._sequence, self._sequence + 1
        self.trouble = None
        tries = Tries(self._pauses(), deadline_s=deadline)
        while True:
            try:
                return self._log.commit(holder, sequence, commit, self._commit_options)
            except Exception as error:
                self.trouble = error
                match tries.after(error, clock.monotonic()):
                    case Again(pause_s):
                        clock.sleep(pause_s)
                    case Ending.FAILED:
                        raise
                    case ending:
                        raise self._give_up(error, ending) from error

    def _pauses(self) -> Iterator[float]:
        """How long to wait before each retry."""
        pause_ms = self._options.retry_backoff_ms
        for _ in range(self._options.retries):
            yield pause_ms / 1000
            pause_ms = min(pause_ms * 2, self._options.retry_backoff_ms_max)

    def _give_up(self, error: Exception, ending: Ending) -> PenstockError:
        limit = self._options.delivery_timeout_ms
        why = str(error) if isinstance(error, PenstockError) else repr(error)
        if ending is Ending.UNKNOWN:
            return CommitOutcomeUnknownError(
                f"the events may or may not be committed, and retrying ended ({why}): read the "
                f"stream to find out, or raise delivery_timeout_ms ({limit})"
            )
        return DeliveryTimeoutError(
            f"the events were not committed within delivery_timeout_ms ({limit}) or the allowed "
            f"retries: {why}"
        )

    def _fail(self, group: Sequence[_Waiting], error: Exception) -> None:
        for sent in group:
            sent.future.set_exception(error)
        for cause in (error, error.__cause__):
            if isinstance(cause, FencedError | ClosedError) and self._failure is None:
                self._stop_with(cause)  # this producer can do nothing more

    def _stop_with(self, error: PenstockError) -> None:
        with self._changed:
            self._failure = error
            left, self._waiting = list(self._waiting), deque()
            self._bytes -= sum(sent.size for sent in left)
            self._rows = 0
            self._changed.notify_all()
        for sent in left:
            sent.future.set_exception(error)


def _resolve(
    placement: Placement, part: Part, sents: Sequence[_Waiting], committed: Committed
) -> None:
    if isinstance(sents[0].what, Part):  # columns are a part of their own
        sents[0].future.set_result(committed)  # type: ignore[arg-type]
        return
    for sent, (partition, offset) in zip(sents, places(placement, part), strict=True):
        if isinstance(sent.what, Outgoing):
            sent.future.set_result(Place(partition, offset, sent.what.id))  # type: ignore[arg-type]
