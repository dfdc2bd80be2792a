"""Between what a program means and the bytes that travel: encoders and decoders.

    @encoder
    def text(line: str) -> bytes:
        return line.encode()

    @decoder
    def text_of(data: bytes) -> str:
        return data.decode()

They see one whole message at a time; where a message begins and ends is not theirs to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import RecordError, UsageError

T = TypeVar("T")
Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], T]


def encoded(message: object) -> bytes:
    """Bytes as they are, text as UTF-8: what is done where there is no encoder."""
    return _as_bytes(message, "a message is bytes or str, not {}: give an encoder")


def encoder(function: Callable[[T], bytes | str]) -> Callable[[T], bytes]:
    """Make an encoder: the function gives the bytes (or text) of a message."""

    @functools.wraps(function)
    def encode(message: T) -> bytes:
        told = f"the encoder {function.__name__} gave {{}}, not bytes or str"
        return _as_bytes(function(message), told)

    return encode


def decoder(function: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Make a decoder: what it raises becomes a `RecordError` that has the message with it."""

    @functools.wraps(function)
    def decode(data: bytes) -> T:
        try:
            return function(data)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise RecordError(
                f"the decoder {function.__name__} cannot read {data[:60]!r}: {what}"
            ) from error

    return decode


def _as_bytes(made: object, wrong: str) -> bytes:
    if isinstance(made, bytes):
        return made
    if isinstance(made, str):
        return made.encode()
    raise UsageError(wrong.format(type(made).__name__))
