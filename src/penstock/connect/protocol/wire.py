"""The connector protocol's frames and messages as data: encoding, decoding, and parsing a stream
of bytes. There is no I/O here.

A frame is `u32 length | u8 tag | body`, everything big-endian; texts are a `u16` length and UTF-8.
Two-phase-commit messages travel as the payload of a `Message` of stream 0.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from penstock.errors import ProtocolError

NEVER: Final = 2**64 - 1
"""The point of reference of a stream that was never seen before."""
SOURCE_VERSION: Final = "0.0.1"
SINK_VERSION: Final = "v0.0.1"
VERSIONS: Final = (SOURCE_VERSION, SINK_VERSION)
FRAME_BYTES_MAX: Final = 1 << 20
TEXT_BYTES_MAX: Final = 0xFFFF


class Hello(msgspec.Struct, frozen=True):
    """Opens a connection: who connects, and its credentials."""

    version: str
    cookie: str
    program: str
    instance: str


class Ok(msgspec.Struct, frozen=True):
    """Answers `Hello`: how many frames may be sent."""

    credits: int


class Error(msgspec.Struct, frozen=True):
    """Says why the connection is closed now."""

    message: str


class Notify(msgspec.Struct, frozen=True):
    """Asks for a stream."""

    stream_id: int
    name: str
    point_of_ref: int


class NotifyAck(msgspec.Struct, frozen=True):
    """Answers `Notify`: whether the stream is granted, and after which message to continue."""

    success: bool
    stream_id: int
    point_of_ref: int


class Message(msgspec.Struct, frozen=True):
    """A message of a stream; on stream 0, a message of the two-phase commit."""

    stream_id: int
    message_id: int
    event_time: int
    key: bytes | None
    payload: bytes


class Ack(msgspec.Struct, frozen=True):
    """Grants credits, and says up to and including which message each stream is safe."""

    credits: int
    points: tuple[tuple[int, int], ...]


class Restart(msgspec.Struct, frozen=True):
    """Tells the connector to reconnect, to another address or to the same one."""

    address: str = ""


class Eos(msgspec.Struct, frozen=True):
    """Gives a stream back."""

    stream_id: int


class WorkersLeft(msgspec.Struct, frozen=True):
    """Workers that will not return."""

    rtag: int
    workers: tuple[str, ...]


class ListUncommitted(msgspec.Struct, frozen=True):
    """Asks a sink for the transactions that it has voted for without knowing the outcome."""

    rtag: int


class ReplyUncommitted(msgspec.Struct, frozen=True):
    """Answers `ListUncommitted`."""

    rtag: int
    transactions: tuple[str, ...]


class Phase1(msgspec.Struct, frozen=True):
    """Asks for a vote on stretches of streams: `(stream_id, start, end)`."""

    transaction: str
    stretches: tuple[tuple[int, int, int], ...]


class Reply(msgspec.Struct, frozen=True):
    """Votes."""

    transaction: str
    commit: bool


class Phase2(msgspec.Struct, frozen=True):
    """Tells the outcome."""

    transaction: str
    commit: bool


Frame = Hello | Ok | Error | Notify | NotifyAck | Message | Ack | Restart | Eos | WorkersLeft
TwoPhase = ListUncommitted | ReplyUncommitted | Phase1 | Reply | Phase2 | WorkersLeft
T = TypeVar("T")

_MESSAGE = struct.Struct(">QQqH")
_LENGTH = struct.Struct(">I")
_MESSAGE_TAG = 5


def stream_id(name: str) -> int:
    """The id of a stream; every implementation computes the same."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16)


# Encoding


def encode(frame: Frame) -> bytes:
    """A frame as bytes. Raises `ProtocolError` if a text is too long."""
    if type(frame) is Message:
        return encode_message(frame)
    tag, write = _ENCODERS[type(frame)]
    body = write(frame)
    return _LENGTH.pack(len(body) + 1) + bytes([tag]) + body


def encode_message(message: Message) -> bytes:
    key = message.key or b""
    if len(key) > TEXT_BYTES_MAX:
        raise ProtocolError(
            f"a key of {len(key)} bytes is too long: at most {TEXT_BYTES_MAX} are allowed"
        )
    return b"".join((
        _LENGTH.pack(1 + _MESSAGE.size + len(key) + len(message.payload)),
        b"\x05",
        _MESSAGE.pack(message.stream_id, message.message_id, message.event_time, len(key)),
        key,
        message.payload,
    ))  # fmt: skip


def encode_two_phase(message: TwoPhase) -> bytes:
    """A message of the two-phase commit, wrapped in its frame."""
    return encode(Message(0, 0, 0, None, two_phase_payload(message)))


def two_phase_payload(message: TwoPhase) -> bytes:
    tag, write = _TWO_PHASE_ENCODERS[type(message)]
    return bytes([tag]) + write(message)


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > TEXT_BYTES_MAX:
        raise ProtocolError(
            f"a text of {len(data)} bytes is too long: at most {TEXT_BYTES_MAX} are allowed"
        )
    return struct.pack(">H", len(data)) + data


def _whole(number: int) -> bytes:
    return struct.pack(">Q", number)


def _many(items: Iterable[bytes]) -> bytes:
    found = list(items)
    return _LENGTH.pack(len(found)) + b"".join(found)


def _texts(frame: Any) -> bytes:
    return b"".join(_text(getattr(frame, name)) for name in frame.__struct_fields__)


def _ack(frame: Ack) -> bytes:
    return _LENGTH.pack(frame.credits) + _many(struct.pack(">QQ", *p) for p in frame.points)


def _restart(frame: Restart) -> bytes:
    address = frame.address.encode()
    return _LENGTH.pack(len(address)) + address


def _left(frame: WorkersLeft) -> bytes:
    return _whole(frame.rtag) + _many(map(_text, frame.workers))


def _phase1(frame: Phase1) -> bytes:
    return _text(frame.transaction) + _many(struct.pack(">QQQ", *s) for s in frame.stretches)


def _outcome(frame: Reply | Phase2) -> bytes:
    return _text(frame.transaction) + bytes([frame.commit])


_ENCODERS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    Hello: (0, _texts),
    Ok: (1, lambda f: _LENGTH.pack(f.credits)),
    Error: (2, _texts),
    Notify: (3, lambda f: _whole(f.stream_id) + _text(f.name) + _whole(f.point_of_ref)),
    NotifyAck: (4, lambda f: struct.pack(">?QQ", f.success, f.stream_id, f.point_of_ref)),
    Ack: (6, _ack),
    Restart: (7, _restart),
    Eos: (8, lambda f: _whole(f.stream_id)),
}

_TWO_PHASE_ENCODERS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    ListUncommitted: (201, lambda m: _whole(m.rtag)),
    ReplyUncommitted: (202, lambda m: _whole(m.rtag) + _many(map(_text, m.transactions))),
    Phase1: (203, _phase1),
    Reply: (204, _outcome),
    Phase2: (205, _outcome),
    WorkersLeft: (206, _left),
}


# Decoding


class Parser:
    """Turns bytes, split at any point, into frames.

    Buffers at most one incomplete frame, whose size `frame_bytes_max` limits.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._most = frame_bytes_max
        self._held: list[bytes] = []
        self._size = 0
        self._needed = _LENGTH.size

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes; return the frames that are now complete.

        Raises `ProtocolError`, with the frames before the error; the rest is then lost.
        """
        self._held.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return []
        data = b"".join(self._held) if len(self._held) > 1 else data
        frames: list[Frame] = []
        at, size = 0, len(data)
        try:
            while at + 4 <= size:
                (length,) = _LENGTH.unpack_from(data, at)
                if not 1 <= length <= self._most:
                    raise ProtocolError(
                        f"a frame has {length} bytes; it must have 1 to {self._most}"
                    )
                end = at + 4 + length
                if end > size:
                    self._needed = 4 + length
                    break
                frames.append(_frame(data, at + 4, end))
                at = end
            else:
                self._needed = _LENGTH.size
        except ProtocolError as error:
            error.frames = frames
            raise
        self._held = [data[at:]] if at < size else []
        self._size = size - at
        return frames


def decode(data: bytes) -> Frame:
    """Decode bytes that are exactly one frame."""
    frames = (parser := Parser(max(1, len(data)))).feed(data)
    if len(frames) != 1 or parser._size:
        raise ProtocolError(f"{len(data)} bytes are not exactly one frame")
    return frames[0]


def two_phase(message: Message) -> TwoPhase | None:
    """A message's two-phase commit content; `None` if it is a message of a stream."""
    if message.stream_id:
        return None
    if message.message_id or message.event_time or message.key:
        raise ProtocolError("a message on stream 0 is not part of the two-phase commit")
    return decode_two_phase(message.payload)


def decode_two_phase(payload: bytes) -> TwoPhase:
    body = _Body(payload, 0, len(payload))
    tag = body.take(1)[0]
    read = _TWO_PHASE_DECODERS.get(tag)
    if read is None:
        raise ProtocolError(f"unknown two-phase commit message, tag {tag}")
    found = read(body)
    body.check_end(type(found).__name__)
    return found


def _frame(data: bytes, start: int, end: int) -> Frame:
    tag = data[start]
    if tag == _MESSAGE_TAG:
        return _message(data, start + 1, end)
    read = _DECODERS.get(tag)
    if read is None:
        raise ProtocolError(f"unknown frame, tag {tag}")
    body = _Body(data, start + 1, end)
    found = read(body)
    body.check_end(type(found).__name__)
    return found


def _message(data: bytes, at: int, end: int) -> Message:
    if end - at < _MESSAGE.size:
        raise ProtocolError("a MESSAGE is too short for its fields")
    stream, number, time, key_size = _MESSAGE.unpack_from(data, at)
    at += _MESSAGE.size
    split = at + key_size
    if split > end:
        raise ProtocolError("the key of a MESSAGE extends past the end of its frame")
    return Message(stream, number, time, data[at:split] if key_size else None, data[split:end])


class _Body:
    """Reads the fields of a body; every length is checked against its end."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        self._data = data
        self._at = start
        self._end = end

    def take(self, size: int) -> bytes:
        if self._at + size > self._end:
            raise ProtocolError("a field extends past the end of its frame")
        self._at += size
        return self._data[self._at - size : self._at]

    def whole(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def text(self, length_bytes: int = 2) -> str:
        try:
            return self.take(self.whole(length_bytes)).decode()
        except UnicodeDecodeError:
            raise ProtocolError("invalid UTF-8 in a text") from None

    def many(self, read: Callable[[], T], size_min: int) -> tuple[T, ...]:
        """A counted list; a count that cannot fit is refused before anything is allocated."""
        count = self.whole(4)
        if count * size_min > self._end - self._at:
            raise ProtocolError(f"{count} items do not fit into their frame")
        return tuple(read() for _ in range(count))

    @property
    def is_over(self) -> bool:
        return self._at == self._end

    def check_end(self, name: str) -> None:
        if not self.is_over:
            raise ProtocolError(f"{self._end - self._at} extra bytes at the end of {name}")


def _read_left(body: _Body) -> WorkersLeft:
    return WorkersLeft(body.whole(8), body.many(body.text, 2))


_DECODERS: dict[int, Callable[[_Body], Frame]] = {
    0: lambda b: Hello(b.text(), b.text(), b.text(), b.text()),
    1: lambda b: Ok(b.whole(4)),
    2: lambda b: Error(b.text()),
    3: lambda b: Notify(b.whole(8), b.text(), b.whole(8)),
    4: lambda b: NotifyAck(bool(b.whole(1)), b.whole(8), b.whole(8)),
    6: lambda b: Ack(b.whole(4), b.many(lambda: (b.whole(8), b.whole(8)), 16)),
    7: lambda b: Restart("" if b.is_over else b.text(4)),
    8: lambda b: Eos(b.whole(8)),
    9: _read_left,
}

_TWO_PHASE_DECODERS: dict[int, Callable[[_Body], TwoPhase]] = {
    201: lambda b: ListUncommitted(b.whole(8)),
    202: lambda b: ReplyUncommitted(b.whole(8), b.many(b.text, 2)),
    203: lambda b: Phase1(b.text(), b.many(lambda: (b.whole(8), b.whole(8), b.whole(8)), 24)),
    204: lambda b: Reply(b.text(), bool(b.whole(1))),
    205: lambda b: Phase2(b.text(), bool(b.whole(1))),
    206: _read_left,
}
