"""Messages that a target can never accept: found on arrival, and named in the vote against them.

The vote has no field for a reason. It is followed by an ERROR whose first line is for people and
whose second line is JSON: the number of each message in the transaction, and why it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence

import msgspec

from penstock.connect.hosts.targets import SinkMessage, describe, is_passing

REFUSALS_MAX = 150
"""How many are named at once; an ERROR has at most 64 KiB."""
NAMED_BYTES_MAX = 60_000
REASON_CHARS_MAX = 1000
Refusal = tuple[int, str]
Check = Callable[[Sequence[SinkMessage]], None]


def find_refusals(
    check: Check, messages: Sequence[SinkMessage], first: int, found: MutableSequence[Refusal]
) -> None:
    """Add the messages that `check` refuses, found by bisection, until there are enough; `first`
    is the number of the first message.

    If `check` raises an error that may be temporary, that error is raised.
    """
    if len(found) >= REFUSALS_MAX:
        return  # the vote is against; the others are found when it is sent again
    try:
        check(messages)
    except Exception as error:
        if is_passing(error):
            raise
        half, before = len(messages) // 2, len(found)
        for start, part in ((0, messages[:half]), (half, messages[half:])):
            if half:
                find_refusals(check, part, first + start, found)
        if len(found) == before:  # it is alone, or refused only together with those before it
            reason = " ".join(describe(error).split())[:REASON_CHARS_MAX]
            found.append((first + len(messages) - 1, reason))


def compose_refusal(refusals: Sequence[Refusal]) -> str:
    """The reason for refusing the transaction, for people and for Penstock's own workers."""
    first = refusals[0][1]
    count = "a message" if len(refusals) == 1 else f"{len(refusals)} messages"
    while len(named := msgspec.json.encode(refusals)) > NAMED_BYTES_MAX:
        refusals = refusals[: len(refusals) // 2]
    return f"the target refuses {count}: {first}\n{named.decode()}"


def parse_refusal(text: str) -> tuple[str, tuple[Refusal, ...]]:
    """The line for people, and the messages that are named, if any."""
    line, _, named = text.partition("\n")
    try:
        return line, tuple(msgspec.json.decode(named, type=list[Refusal])) if named else ()
    except msgspec.DecodeError:
        return text, ()
