"""Stream descriptions: one class for both halves of a stream, the app's and the script's.

    class Texts(SourceDescription[Line]):
        name = "texts"
        record = Line

    lines = Texts.from_arguments().in_app(app)      # in the app: an ordinary stream

    with Texts.from_arguments().in_script() as out:  # in a program beside it
        out.write(Line("to be"))

Both read the same command-line argument, `--texts HOST:PORT`. It may be left out if both run on
one machine: they then find each other by the stream's name. Messages are records as JSON, unless
`encode` and `decode` are overridden; each half uses the one it needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import msgspec

from penstock.app.declaring.app import App
from penstock.app.declaring.streams import AppStream, OnError
from penstock.connect.addresses import check_address
from penstock.connect.clients.codecs import decoder, encode_plainly
from penstock.connect.clients.reader import SinkClient
from penstock.connect.clients.source import ConnectorOptions
from penstock.connect.clients.writer import SourceClient
from penstock.connect.credentials import reveal
from penstock.connect.hosts.sink_host import SinkOptions
from penstock.errors import UsageError
from penstock.records.schema import Record

T = TypeVar("T")


class StreamDescription(Generic[T]):
    """What both halves must agree on. `settings` are those of `app.stream`."""

    name: ClassVar[str]
    record: ClassVar[type[Record] | None] = None
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, address: str = "", *, cookie: str = "") -> None:
        self.address = address or f"auto:{self.name}"
        self.cookie = cookie
        check_address(self.address)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this description to a program's parser."""
        parser.add_argument(
            f"--{cls.name}",
            metavar="HOST:PORT",
            default="",
            dest=f"{cls.name}_address",
            help=f"where the two halves of {cls.name} meet (default: a free port, found by name)",
        )
        parser.add_argument(
            f"--{cls.name}-cookie",
            metavar="TEXT",
            default="",
            dest=f"{cls.name}_cookie",
            help="the secret that the connecting half must present; @env:NAME or @file:PATH "
            "reads it from a variable or a file",
        )

    @classmethod
    def from_arguments(cls, arguments: Sequence[str] | None = None) -> Self:
        """Make one from the command line; arguments of others are ignored."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        cls.add_arguments(parser)
        found, _ = parser.parse_known_args(arguments)
        cookie = reveal(getattr(found, f"{cls.name}_cookie"))
        return cls(getattr(found, f"{cls.name}_address"), cookie=cookie)

    def encode(self, message: T) -> bytes:
        """The bytes of a message: a record as JSON, bytes and text unchanged."""
        return msgspec.json.encode(message) if self.record is not None else encode_plainly(message)

    def decode(self, data: bytes) -> T:
        """The message that these bytes encode."""
        if self.record is None:
            return cast(T, data)
        return cast(T, msgspec.json.decode(data, type=self.record))


class SourceDescription(StreamDescription[T]):
    """A stream that a program feeds. The app listens."""

    def in_app(self, app: App, *, on_damage: OnError | None = None) -> AppStream[T]:
        """The app's half: the stream, and a listener that runs with the app.

        `on_damage` says what happens to messages that cannot be decoded or do not match the
        record; it defaults to that of the stream.
        """
        is_own = type(self).decode is not StreamDescription.decode
        if is_own and self.record is None and self.settings.get("content") != "json":
            raise UsageError(
                f"{self.name} overrides decode but has no record for it to return: set record, or "
                'content to "json" in settings'
            )
        stream = (
            app.stream(self.name, self.record, **self.settings)
            if self.record is not None
            else app.stream(self.name, **{"content": "bytes", **self.settings})
        )
        app.listen(
            stream,
            self.address,
            cookie=self.cookie,
            on_damage=on_damage,
            decoder=self.decode if is_own else None,
        )
        return cast("AppStream[T]", stream)

    def in_script(self, options: ConnectorOptions = ConnectorOptions()) -> SourceClient:
        """The program's half, which writes."""
        options = msgspec.structs.replace(options, cookie=self.cookie or options.cookie)
        return SourceClient(self.address, self.name, encoder=self.encode, options=options)


class SinkDescription(StreamDescription[T]):
    """A stream that a program drains. The program listens."""

    def in_app(self, app: App, stream: AppStream[T], workers: int = 1) -> None:
        """The app's half: pushes the stream's events, each once."""
        is_own = type(self).encode is not StreamDescription.encode
        app.sink(
            cast("AppStream[object]", stream),
            self.address,
            name=self.name,
            workers=workers,
            cookie=self.cookie,
            encoder=self.encode if is_own else None,
        )

    def in_script(
        self, folder: Path | str | None = None, options: SinkOptions = SinkOptions()
    ) -> SinkClient[T]:
        """The program's half, which reads; events that it has not read yet are kept in `folder`."""
        return SinkClient(
            self.address,
            folder or Path(f"{self.name}.sink"),
            decoder=decoder(self.decode),
            options=msgspec.structs.replace(options, cookie=self.cookie or options.cookie),
        )
