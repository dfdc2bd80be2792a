"""How a group hands out messages, and what becomes of them: the words its state machine speaks."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from penstock.groups.slots import Slot

GroupOrder = Literal["key", "partition", "stream", "none"]
REASONS_MAX = 5
REASON_CHARS_MAX = 200
"""Of each of the last reasons; a dead letter has more of the very last one."""
REASON_CHARS_STORED = 10_000
DELAY_S_MAX = 365 * 24 * 3600.0


class GroupRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a group delivers messages.

    `order`: of messages with one `key` (the default), of one `partition` or of the whole `stream`
    one is in flight at a time, or there is no order (`none`). Up to `key_batch` messages of a key
    are delivered together; their member handles them in turn.

    A message that is not acknowledged within `lease_s`, or that failed, is delivered again after a
    pause of `backoff_s`, which doubles with each try up to `backoff_max_s`. After `deliveries_max`
    deliveries it becomes a dead letter. If `breaker_letters` in a row would become dead letters and
    none was acknowledged, the group pauses for `breaker_s` and continues with one at a time.

    `outstanding_max` bounds what is not acknowledged in a partition, `in_flight_max` and
    `member_in_flight_max` what is in flight.
    """

    order: GroupOrder = "key"
    key_batch: int = 1
    lease_s: float = 30.0
    deliveries_max: int = 5
    backoff_s: float = 1.0
    backoff_max_s: float = 300.0
    outstanding_max: int = 65_536
    in_flight_max: int = 65_536
    member_in_flight_max: int = 1_000
    breaker_letters: int = 20
    breaker_s: float = 30.0


class Redeliver(NamedTuple):
    """To be handed out once more, after a pause."""

    delay_s: float
    reason: str
    is_reprieve: bool = False
    """Whether it had its last try, and gets another because everything fails."""


class Bury(NamedTuple):
    """To become a dead letter."""

    reason: str


MessageOutcome = Redeliver | Bury | None
"""What becomes of a message that was handed out; `None` if it is acknowledged."""


class Settlement(NamedTuple):
    """A message and what becomes of it."""

    slot: Slot
    outcome: MessageOutcome


class History(NamedTuple):
    """What the log knows of a message that is not acknowledged: how often it may have been handed
    out, when for the first time, and when it may be again.
    """

    deliveries: int
    first_s: float | None = None
    due_s: float = 0.0
    reasons: tuple[str, ...] = ()
    is_reprieved: bool = False
    is_suspect: bool = True


class GroupStep(NamedTuple):
    """What the log has to know before it counts."""

    settled: list[Settlement]
    armed: list[Slot]


def clean_reason(reason: object) -> str:
    """A reason as text that can be stored; not too much of it."""
    text = str(reason)[:REASON_CHARS_STORED]
    return text.encode(errors="backslashreplace").decode()


def add_reason(reasons: tuple[str, ...], reason: str) -> tuple[str, ...]:
    """Why a message failed, the last few times."""
    return (*reasons, reason[:REASON_CHARS_MAX])[-REASONS_MAX:]
