"""Names of objects: which are valid, and how a stream is addressed.

`orders` is the stream orders of the namespace default, `shop.orders` that of shop. Names
contain no dots, so that `namespace.stream` can be a Kafka topic and be split again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

from penstock.errors import BadNameError

DEFAULT = "default"
SYSTEM = "_system"
NAME_CHARS_MAX = 100
PRODUCER_CHARS_MAX = 200
GUESSES_MAX = 3

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_PRODUCER = re.compile(r"[\x21-\x7e]+")


class StreamName(NamedTuple):
    """A stream's namespace and name; as text, the default namespace is left out."""

    namespace: str
    stream: str

    def __str__(self) -> str:
        return self.stream if self.namespace == DEFAULT else f"{self.namespace}.{self.stream}"


OBJECTS = StreamName(SYSTEM, "objects")
METRICS = StreamName(SYSTEM, "metrics")


def parse_stream(text: str) -> StreamName:
    """The stream that `text` addresses. Raises `BadNameError` if it is not valid."""
    if not isinstance(text, str):
        raise BadNameError(f"a stream is addressed by its name, a str, not {type(text).__name__}")
    namespace, dot, stream = text.rpartition(".")
    if dot and "." in namespace:
        raise BadNameError(
            f"{text!r} has more than one dot: a stream is NAME or NAMESPACE.NAME, "
            "and names contain no dots; use - or _ instead"
        )
    name = StreamName(namespace if dot else DEFAULT, stream)
    check_name(name.stream, "stream")
    if name.namespace != SYSTEM:
        check_name(name.namespace, "namespace")
    return name


def check_name(name: str, kind: str) -> None:
    """Raise `BadNameError` unless `name` is valid for a new object of this kind."""
    if len(name) > NAME_CHARS_MAX:
        raise BadNameError(
            f"the {kind} name {name[:20]!r}… has {len(name)} characters: "
            f"at most {NAME_CHARS_MAX} are allowed (name_chars_max); choose a shorter one"
        )
    if not _NAME.fullmatch(name):
        raise BadNameError(
            f"{name!r} is not a valid {kind} name: use letters, digits, - and _, "
            "starting with a letter or digit"
        )


def check_text(text: str, what: str) -> None:
    """Raise `BadNameError` for text that cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadNameError(
            f"{what} {text[:40]!r} is not valid Unicode: it contains an unpaired surrogate"
        ) from None


def check_producer(name: str) -> None:
    """Raise `BadNameError` unless `name` is valid for a producer."""
    if len(name) > PRODUCER_CHARS_MAX or not _PRODUCER.fullmatch(name):
        raise BadNameError(
            f"{name[:40]!r} is not a valid producer name: use 1 to {PRODUCER_CHARS_MAX} printable "
            "ASCII characters without spaces"
        )


def guess(wrong: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name: "did you mean orders?", or nothing.

    Names are compared ignoring case, and ignoring their namespace if only that differs.
    """
    folded = {name.casefold(): name for name in known}
    bare = wrong.casefold().rpartition(".")[2]
    near = [name for name in folded if name.rpartition(".")[2] == bare]
    near += difflib.get_close_matches(wrong.casefold(), folded, n=GUESSES_MAX, cutoff=0.6)
    found = [folded[name] for name in dict.fromkeys(near)][:GUESSES_MAX]
    return f"did you mean {' or '.join(found)}?" if found else ""
