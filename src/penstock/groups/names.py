"""What a group is called, and what is called after it."""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import BadNameError
from penstock.log.declaring.names import (
    NAME_CHARS_MAX,
    PRODUCER_CHARS_MAX,
    check_name,
    parse_stream,
)


class GroupName(NamedTuple):
    """A group of a stream."""

    stream: str
    name: str

    @classmethod
    def parse(cls, stream: str, name: str) -> GroupName:
        """The group of a stream that is addressed as any other. Raises `BadNameError`."""
        check_name(name, "group")
        found = cls(str(parse_stream(stream)), name)
        spare = min(
            NAME_CHARS_MAX - len(found.replays.rpartition(".")[2]),
            PRODUCER_CHARS_MAX - len(f"{found.producer}/control"),
        )
        if spare < 0:
            raise BadNameError(
                f"the name of group {name[:20]!r}… is {-spare} characters too long for a group of "
                f"stream {found.stream}: choose a shorter one"
            )
        return found

    def __str__(self) -> str:
        return f"{self.stream}/{self.name}"

    @property
    def producer(self) -> str:
        """The producer of its coordinator, and the writer of its tables."""
        return f"group/{self}"

    @property
    def replays(self) -> str:
        """The stream through which dead letters are replayed to this group alone."""
        return f"{self.stream}_{self.name}_replayed"
