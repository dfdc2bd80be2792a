"""What an app is made of: each definition reads streams or tables and writes others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.app.location import Location
from penstock.app.streams import AppStream, How, OnError
from penstock.app.tables import AppTable
from penstock.app.windows import Windows
from penstock.connect.registry import Policy

if TYPE_CHECKING:
    from penstock.app.signature import Signature

Place = AppStream[object] | AppTable[object]


@dataclass(eq=False, frozen=True, kw_only=True)
class Definition:
    """Reads `inputs`, writes `outputs`; `reads` are tables it looks things up in."""

    name: str
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    location: Location
    reads: tuple[AppTable[object], ...] = ()

    @property
    def triggers(self) -> tuple[str, ...]:
        """The streams whose events are handled; a table that is only looked at is none."""
        return tuple(place.name for place in self.inputs if isinstance(place, AppStream))

    @property
    def past(self) -> tuple[str, ...]:
        """The streams whose damaged events are left out, or told to another."""
        streams = (place for place in self.inputs if isinstance(place, AppStream))
        return tuple(stream.name for stream in streams if stream.on_damage != "stop")


@dataclass(eq=False, frozen=True, kw_only=True)
class Derivation(Definition):
    """A function from DataFrames to a DataFrame."""

    function: Callable[..., object] = field(repr=False)
    windows: Windows | None = None
    late: AppStream[object] | None = None


@dataclass(eq=False, frozen=True, kw_only=True)
class Agent(Definition):
    """A function called for each event, with its key's entry. Calling it calls the function."""

    function: Callable[..., object] = field(repr=False)
    signature: Signature
    state: AppTable[object] | None = None
    on_error: OnError = "stop"
    retries: int = 0
    backoff_ms: int = 100
    batch_rows: int = 1000
    manual_ack: bool = False
    dead: AppStream[object] | None = None
    timers: AppTable[object] | None = None
    on_timer: list[Callable[..., object]] = field(default_factory=list, repr=False)

    def __call__(self, *arguments: object) -> object:
        return self.function(*arguments)

    def timer(self, function: Callable[..., object]) -> Callable[..., object]:
        """Make this function the one that is called when a timer of the agent is due.

        It takes the key's entry (if the agent has a state) and a `Context`.
        """
        self.on_timer[:] = [function]
        return function


@dataclass(eq=False, frozen=True, kw_only=True)
class Rekey(Definition):
    """Events copied to another stream, whose key is another field."""


@dataclass(eq=False, frozen=True, kw_only=True)
class Lookup(Definition):
    """Events with the entry that their key has in a table."""

    how: Literal["left", "inner"]


@dataclass(eq=False, frozen=True, kw_only=True)
class StreamJoin(Definition):
    """Pairs of events of two streams."""

    on: str
    within_us: int
    how: How


@dataclass(eq=False, frozen=True, kw_only=True)
class TableJoin(Definition):
    """A table kept equal to the join of two others."""

    how: How

    @property
    def triggers(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.inputs)


@dataclass(eq=False, frozen=True, kw_only=True)
class DeadLetters(Definition):
    """Events of a stream that cannot be read, told to another."""


@dataclass(eq=False, frozen=True, kw_only=True)
class Sinking(Definition):
    """Events pushed into a sink connector; `encoder` gives their bytes, if it is not JSON."""

    address: str
    workers: int
    cookie: str = field(repr=False)
    timeout_s: float
    encoder: Callable[..., bytes] | None = field(default=None, repr=False)


@dataclass(eq=False, frozen=True, kw_only=True)
class Listening(Definition):
    """A stream that source connectors feed; `names` are patterns of theirs.

    `decoder` makes events of their messages, if those are not JSON.
    """

    address: str
    names: tuple[str, ...]
    cookie: str = field(repr=False)
    policy: Policy
    on_damage: OnError = "stop"
    decoder: Callable[[bytes], object] | None = field(default=None, repr=False)


@dataclass(eq=False, frozen=True, kw_only=True)
class Feed(Definition):
    """A stream filled from an iterable or a channel of this process."""

    source: Iterable[object] = field(repr=False)


def keeps_timers(definition: Definition) -> bool:
    """Whether an agent needs its table of timers: for timers, or for windows that expire."""
    if not isinstance(definition, Agent):
        return False
    windows = definition.state.windows if definition.state is not None else None
    return bool(definition.on_timer) or (windows is not None and windows.expires_us is not None)
