"""Encoders and decoders: between a program's values and the bytes that are sent.

    @encoder
    def text(line: str) -> bytes:
        return line.encode()

    @decoder
    def text_of(data: bytes) -> str:
        return data.decode()

They get one whole message at a time; framing messages is not their job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import RecordError, UsageError

T = TypeVar("T")
Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], T]


def encode_plainly(message: object) -> bytes:
    """Bytes unchanged, text as UTF-8: used if there is no encoder."""
    return _as_bytes(message, "a message must be bytes or str, not {}: pass an encoder")


def encoder(function: Callable[[T], bytes | str]) -> Callable[[T], bytes]:
    """Make an encoder of a function that returns the bytes (or text) of a message."""

    @functools.wraps(function)
    def encode(message: T) -> bytes:
        told = f"encoder {function.__name__} must return bytes or str, not {{}}"
        return _as_bytes(function(message), told)

    return encode


def decoder(function: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Make a decoder: its exceptions become a `RecordError` that quotes the message."""

    @functools.wraps(function)
    def decode(data: bytes) -> T:
        try:
            return function(data)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise RecordError(
                f"decoder {function.__name__} cannot decode {data[:60]!r}: {what}"
            ) from error

    return decode


def _as_bytes(made: object, wrong: str) -> bytes:
    if isinstance(made, bytes):
        return made
    if isinstance(made, str):
        return made.encode()
    raise UsageError(wrong.format(type(made).__name__))
