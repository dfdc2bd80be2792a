"""The wire format: the given vectors, any frame cut anywhere, and any bytes at all."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.connect.protocol import wire
from penstock.errors import ProtocolError

VECTORS = json.loads(Path(__file__).with_name("connector-vectors.json").read_text("utf-8"))
TYPES = {
    "Hello": wire.Hello, "Ok": wire.Ok, "Error": wire.Error, "Notify": wire.Notify,
    "NotifyAck": wire.NotifyAck, "Message": wire.Message, "Ack": wire.Ack,
    "Restart": wire.Restart, "EosMessage": wire.Eos, "WorkersLeft": wire.WorkersLeft,
    "ListUncommitted": wire.ListUncommitted, "ReplyUncommitted": wire.ReplyUncommitted,
    "TwoPCPhase1": wire.Phase1, "TwoPCReply": wire.Reply, "TwoPCPhase2": wire.Phase2,
}  # fmt: skip


def value_of(given: Any, wanted: str) -> Any:
    """A field of a vector as ours has it; bytes are written as such, or as repetitions."""
    if isinstance(given, dict):
        if "bytes_hex" in given:
            found: bytes = bytes.fromhex(given["bytes_hex"])
        else:
            found = str(given["repeat"]).encode() * given["times"]
        return found.decode() if wanted == "str" else found
    if isinstance(given, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in given)
    return given


def made(kind: type, fields: dict[str, Any]) -> Any:
    annotations = [str(kind.__annotations__[name]) for name in kind.__struct_fields__]  # type: ignore[attr-defined]
    values = [value_of(v, a) for v, a in zip(fields.values(), annotations, strict=True)]
    if kind is wire.Message:
        values = [*values[:3], values[3] or None, values[4] or b""]
    return kind(*values)


def is_as_told(data: bytes, vector: dict[str, Any]) -> bool:
    if "hex" in vector:
        return bytes.fromhex(vector["hex"]) == data
    same = data.hex().startswith(vector["hex_prefix"]) and len(data) == vector["length"]
    return same and hashlib.sha256(data).hexdigest() == vector["sha256"]


@pytest.mark.row("W1", engine="any")
@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: v["name"])
def test_the_vectors_both_ways(vector: dict[str, Any]) -> None:
    outer, _, inner = vector["type"].partition("/")
    kind = TYPES[(inner or outer).partition("@")[0]]
    wanted = made(kind, vector["fields"])
    if outer.endswith("@tag9"):  # known to be read, never sent
        assert wire.decode(bytes.fromhex(vector["hex"])) == wanted
        with pytest.raises(KeyError):
            wire.encode(wanted)
    elif inner:
        data = wire.encode_two_phase(wanted)
        assert is_as_told(data, vector)
        message = wire.decode(data)
        assert isinstance(message, wire.Message)
        assert wire.two_phase(message) == wanted
    elif vector["name"].startswith("2pc inner"):
        assert is_as_told(wire.two_phase_payload(wanted), vector)
        assert wire.decode_two_phase(bytes.fromhex(vector["hex"])) == wanted
    else:
        assert is_as_told(wire.encode(wanted), vector)
        assert wire.decode(wire.encode(wanted)) == wanted


def test_ids_follow_from_names() -> None:
    for name, number in VECTORS["stream_id_examples"].items():
        assert wire.stream_id(name) == number


u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
text = st.text(max_size=20)
frames: st.SearchStrategy[wire.Frame] = st.one_of(
    st.builds(wire.Hello, text, text, text, text),
    st.builds(wire.Ok, u32),
    st.builds(wire.Error, text),
    st.builds(wire.Notify, u64, text, u64),
    st.builds(wire.NotifyAck, st.booleans(), u64, u64),
    st.builds(
        wire.Message, u64, u64, st.integers(-(2**63), 2**63 - 1),
        st.none() | st.binary(min_size=1, max_size=20), st.binary(max_size=50),
    ),
    st.builds(wire.Ack, u32, st.lists(st.tuples(u64, u64), max_size=4).map(tuple)),
    st.builds(wire.Restart, text),
    st.builds(wire.Eos, u64),
)  # fmt: skip
two_phase_messages: st.SearchStrategy[wire.TwoPhase] = st.one_of(
    st.builds(wire.ListUncommitted, u64),
    st.builds(wire.ReplyUncommitted, u64, st.lists(text, max_size=4).map(tuple)),
    st.builds(wire.Phase1, text, st.lists(st.tuples(u64, u64, u64), max_size=4).map(tuple)),
    st.builds(wire.Reply, text, st.booleans()),
    st.builds(wire.Phase2, text, st.booleans()),
    st.builds(wire.WorkersLeft, u64, st.lists(text, max_size=4).map(tuple)),
)


@pytest.mark.row("W1", engine="any")
@settings(max_examples=300, deadline=None)
@given(st.lists(frames, max_size=6), st.data())
def test_any_frames_survive_being_cut_anywhere(sent: list[wire.Frame], data: st.DataObject) -> None:
    whole = b"".join(wire.encode(frame) for frame in sent)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=8).map(sorted))
    parser = wire.Parser()
    found: list[wire.Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += parser.feed(whole[start:end])
    assert found == sent


@settings(max_examples=200, deadline=None)
@given(two_phase_messages)
def test_any_message_of_a_transaction_survives(sent: wire.TwoPhase) -> None:
    message = wire.decode(wire.encode_two_phase(sent))
    assert isinstance(message, wire.Message)
    assert wire.two_phase(message) == sent


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\0\0\0\0", "0 bytes"),
        (b"\x7f\xff\xff\xff\x05", "2147483647 bytes"),
        (b"\0\0\0\x01\x0c", "tag 12"),
        (b"\0\0\0\x03\x02\0\x09", "past the end of its frame"),
        (b"\0\0\0\x06\x01\0\0\0\1\1", "1 extra bytes at the end of Ok"),
        (b"\0\0\0\x04\x02\0\1\xff", "invalid UTF-8"),
        (b"\0\0\0\x09\x06\0\0\0\0\xff\xff\xff\xff", "4294967295 items do not fit"),
        (b"\0\0\0\x02\x05\0", "too short"),
        (b"\0\0\0\x1b\x05" + b"\0" * 24 + b"\0\1", "the key of a MESSAGE extends past"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        wire.Parser().feed(data)


def test_a_bare_restart_is_taken() -> None:
    assert wire.decode(b"\0\0\0\x01\x07") == wire.Restart("")


def test_texts_too_long_are_refused_and_never_cut() -> None:
    for frame in (wire.Error("x" * 65536), wire.Message(1, 1, 0, b"k" * 65536, b"")):
        with pytest.raises(ProtocolError, match="65536 bytes is too long: at most 65535"):
            wire.encode(frame)


def test_a_message_of_stream_0_is_of_a_transaction_or_wrong() -> None:
    for number, time_ns, key in ((1, 0, None), (0, 1, None), (0, 0, b"k")):
        with pytest.raises(ProtocolError, match="not part of the two-phase commit"):
            wire.two_phase(wire.Message(0, number, time_ns, key, b"\xc9" + b"\0" * 8))
    with pytest.raises(ProtocolError, match="tag 7"):
        wire.two_phase(wire.Message(0, 0, 0, None, b"\x07"))
    with pytest.raises(ProtocolError, match="past the end of its frame"):
        wire.two_phase(wire.Message(0, 0, 0, None, b""))


@pytest.mark.row("W1", engine="any")
def test_random_and_mutated_bytes_do_no_harm(chance: random.Random) -> None:
    """Only `ProtocolError` comes out, and nothing is held on to."""
    good = [bytes.fromhex(v["hex"]) for v in VECTORS["vectors"] if "hex" in v]
    deadline = time.monotonic() + float(os.environ.get("PENSTOCK_FUZZ_S") or 3)
    tracemalloc.start()
    try:
        rounds = 0
        while time.monotonic() < deadline:
            parser = wire.Parser(1 << 16)
            for _ in range(50):
                _feed(parser, _some_bytes(chance, good))
            assert parser._size <= (1 << 16) + 4 + 1000
            rounds += 1
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rounds
    assert held < 5_000_000


def _some_bytes(chance: random.Random, good: list[bytes]) -> bytes:
    if chance.random() < 0.3:
        return chance.randbytes(chance.randrange(60))
    data = bytearray(b"".join(chance.choices(good, k=chance.randrange(1, 4))))
    for _ in range(chance.randrange(4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[: chance.randrange(len(data) + 1)])


def _feed(parser: wire.Parser, data: bytes) -> None:
    try:
        for frame in parser.feed(data):
            if isinstance(frame, wire.Message):
                wire.two_phase(frame)
    except ProtocolError:
        parser.__init__(1 << 16)  # type: ignore[misc]  # the connection is closed
