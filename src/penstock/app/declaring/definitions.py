"""The definitions of an app: each reads streams or tables and writes others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, ParamSpec, TypeVar, cast, overload

from penstock.app.declaring.context import DEFAULT_TIMER, check_timer_name
from penstock.app.declaring.location import Location
from penstock.app.declaring.streams import AppStream, How, OnError
from penstock.app.declaring.tables import AppTable
from penstock.app.declaring.windows import Windows
from penstock.connect.hosts.registry import Policy
from penstock.log.declaring.quantities import format_duration

if TYPE_CHECKING:
    from penstock.app.declaring.signature import Signature

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])
StreamOrTable = AppStream[object] | AppTable[object]


@dataclass(eq=False, frozen=True, kw_only=True)
class Definition:
    """Reads `inputs`, writes `outputs`; `reads` are tables it looks things up in."""

    name: str
    inputs: tuple[StreamOrTable, ...]
    outputs: tuple[StreamOrTable, ...]
    location: Location
    reads: tuple[AppTable[object], ...] = ()

    @property
    def triggers(self) -> tuple[str, ...]:
        """The streams whose events are handled; tables that are only looked up are not included."""
        return tuple(place.name for place in self.inputs if isinstance(place, AppStream))

    @property
    def is_keyed(self) -> bool:
        """Whether the events of a key must be handled by one task, in order."""
        return False

    @property
    def mixes_keys(self) -> bool:
        """Whether events of several partitions may yield events of the same key, so that the order
        across partitions must be kept."""
        return False

    @property
    def can_share(self) -> bool:
        """Whether it may share a query: nothing of its own limits how far a batch may go."""
        return True

    @property
    def keeps_timers(self) -> bool:
        """Whether it needs a table of timers, for timers or for windows that expire."""
        return False

    @property
    def expires_by_events(self) -> bool:
        """Whether its windows expire by the time of its events rather than by the clock."""
        return False

    @property
    def waits_for_time(self) -> bool:
        """Whether its output appears only once its events have passed a point in time."""
        return False

    @property
    def facts(self) -> dict[str, str]:
        """What must not change while there is a position, described; tables apart."""
        return {}

    @property
    def past(self) -> tuple[str, ...]:
        """The streams whose damaged events are skipped or become dead letters."""
        streams = (place for place in self.inputs if isinstance(place, AppStream))
        return tuple(stream.name for stream in streams if stream.on_damage != "stop")


@dataclass(eq=False, frozen=True, kw_only=True)
class Derivation(Definition):
    """A function from DataFrames to a DataFrame."""

    function: Callable[..., object] = field(repr=False)
    windows: Windows | None = None
    late: AppStream[object] | None = None

    @property
    def mixes_keys(self) -> bool:
        return True

    @property
    def waits_for_time(self) -> bool:
        return self.windows is not None


@dataclass(eq=False, frozen=True, kw_only=True)
class Agent(Definition):
    """A function called for each event, with the entry of the event's key."""

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
    on_timer: dict[str, Callable[..., object]] = field(default_factory=dict, repr=False)
    """The functions called when a timer is due, by the timer's name."""

    @overload
    def timer(self, function: F) -> F: ...

    @overload
    def timer(self, function: str) -> Callable[[F], F]: ...

    def timer(self, function: F | str) -> F | Callable[[F], F]:
        """Register the function that is called when a timer of the agent is due.

        `@agent.timer` registers it for the timer without a name, `@agent.timer("reminder")` for
        the one of that name; a key may have one of each. The function takes the key's entry (if
        the agent has a state) and a `Context`.
        """
        if isinstance(function, str):
            check_timer_name(function)
            return lambda named: self._call_for(function, named)
        return self._call_for(DEFAULT_TIMER, function)

    def _call_for(self, name: str, function: F) -> F:
        self.on_timer[name] = function
        return function

    @property
    def is_keyed(self) -> bool:
        return True

    @property
    def can_share(self) -> bool:
        return not (self.manual_ack or self.keeps_timers)

    @property
    def keeps_timers(self) -> bool:
        return self.timers is not None and (bool(self.on_timer) or self._has_expiry)

    @property
    def expires_by_events(self) -> bool:
        return self.state is not None and self._has_expiry and self.state.relative_to == "event"

    @property
    def _has_expiry(self) -> bool:
        windows = self.state.windows if self.state is not None else None
        return windows is not None and windows.expires_us is not None


@dataclass(eq=False, frozen=True, kw_only=True)
class CallableAgent(Agent, Generic[P, T]):
    """An agent as returned by its decorator: calling it calls the function, as in a test."""

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        return cast(T, self.function(*arguments, **named))


@dataclass(eq=False, frozen=True, kw_only=True)
class Rekey(Definition):
    """Events copied to another stream, keyed by another field."""

    @property
    def mixes_keys(self) -> bool:
        return self.inputs[0].key != self.outputs[0].key


@dataclass(eq=False, frozen=True, kw_only=True)
class Lookup(Definition):
    """Events joined with the entry of their key in a table."""

    how: Literal["left", "inner"]


@dataclass(eq=False, frozen=True, kw_only=True)
class StreamJoin(Definition):
    """Pairs of events of two streams."""

    on: str
    within_us: int
    how: How

    @property
    def facts(self) -> dict[str, str]:
        within = format_duration(self.within_us // 1000)
        return {"how it joins": f"{self.how}, on {self.on}, within {within}"}

    @property
    def waits_for_time(self) -> bool:
        return True


@dataclass(eq=False, frozen=True, kw_only=True)
class TableJoin(Definition):
    """A table kept equal to the join of two others."""

    how: How

    @property
    def facts(self) -> dict[str, str]:
        names = " and ".join(place.name for place in self.inputs)
        return {"what it joins": f"{names} ({self.how})"}

    @property
    def triggers(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.inputs)

    @property
    def is_keyed(self) -> bool:
        return True


@dataclass(eq=False, frozen=True, kw_only=True)
class DeadLetters(Definition):
    """Dead letters for the events of a stream that cannot be read."""


@dataclass(eq=False, frozen=True, kw_only=True)
class Sinking(Definition):
    """Events pushed into a sink connector; `encoder` returns their bytes, if they are not JSON."""

    address: str
    workers: int
    cookie: str = field(repr=False)
    timeout_s: float
    unapplied_max: int
    encoder: Callable[..., bytes] | None = field(default=None, repr=False)

    @property
    def facts(self) -> dict[str, str]:
        return {"the number of its workers (the sink remembers each)": str(self.workers)}

    @property
    def can_share(self) -> bool:
        return False


@dataclass(eq=False, frozen=True, kw_only=True)
class Listening(Definition):
    """A stream that source connectors feed; `names` are patterns for the connectors' streams.

    `decoder` turns their messages into events, if they are not JSON.
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

    `begun` is not empty once the iterable has been read from; some can be read only once.
    """

    source: Iterable[object] = field(repr=False)
    begun: list[bool] = field(default_factory=list, repr=False)
