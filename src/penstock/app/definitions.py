"""What an app is made of: each definition reads streams or tables and writes others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, ParamSpec, TypeVar, cast

from penstock.app.location import Location
from penstock.app.streams import AppStream, How, OnError
from penstock.app.tables import AppTable
from penstock.app.windows import Windows
from penstock.connect.registry import Policy

if TYPE_CHECKING:
    from penstock.app.signature import Signature

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])
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
    """A function called for each event, with its key's entry."""

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

    def timer(self, function: F) -> F:
        """Make this function the one that is called when a timer of the agent is due.

        It takes the key's entry (if the agent has a state) and a `Context`.
        """
        self.on_timer[:] = [function]
        return function


@dataclass(eq=False, frozen=True, kw_only=True)
class CallableAgent(Agent, Generic[P, T]):
    """An agent as its decorator gives it: calling it calls the function, as in a test."""

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        return cast(T, self.function(*arguments, **named))


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
    """A stream filled from an iterable or a channel of this process.

    `begun` says that the iterable was read from, which some can be only once.
    """

    source: Iterable[object] = field(repr=False)
    begun: list[bool] = field(default_factory=list, repr=False)


def mixes_keys(definition: Definition) -> bool:
    """Whether what is made of events of several partitions may have one key, so that their order
    must be that of all of them."""
    if isinstance(definition, Rekey):
        return definition.inputs[0].key != definition.outputs[0].key
    return isinstance(definition, Derivation)


def keeps_timers(definition: Definition) -> bool:
    """Whether an agent needs its table of timers: for timers, or for windows that expire."""
    if not isinstance(definition, Agent):
        return False
    return bool(definition.on_timer) or _has_expiry(definition)


def expires_by_events(definition: Definition) -> bool:
    """Whether an agent's windows are over when its events say so, and not the clock."""
    if not isinstance(definition, Agent) or not _has_expiry(definition):
        return False
    return definition.state is not None and definition.state.relative_to == "event"


def _has_expiry(agent: Agent) -> bool:
    windows = agent.state.windows if agent.state is not None else None
    return windows is not None and windows.expires_us is not None
