"""Taking definitions over: the log says who runs them before anything is handled.

A runner may group definitions into queries as it likes, so the producer that commits for a
definition can change. Each definition's position names the producer that may move it. To take it
over, a runner fences that producer, reads the position again, and commits it under the name of its
own. All runners of an app do this as one producer, so that two cannot do it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.app.running.positions import (
    Position,
    pack_position,
    producer_name,
    progress_key,
    read_position,
)
from penstock.app.running.saved import SavedDefinition, saved_key
from penstock.errors import FencedError, LogBusyError
from penstock.log.api import Commit, Log
from penstock.log.writing.commit import next_sequence

TRIES_MAX = 20
CLAIMS = "+claims"
"""No query can have this name: names start with a letter or digit."""
Decide = Callable[[Mapping[str, Position | None]], Mapping[str, Position | None]]


def claim(
    log: Log,
    app: str,
    names: Sequence[str],
    decide: Decide,
    saved: Mapping[str, SavedDefinition | None],
    check: Callable[[], None] = lambda: None,
) -> dict[str, Position]:
    """Fence any other run of these definitions, and save the positions that `decide` returns.

    `decide` is given the saved positions, which no other run can move any more, and may be called
    several times. The definitions as they are now, `saved`, are written with them. `check` raises
    if this run may no longer take them over.
    """
    for _ in range(TRIES_MAX):
        holder = log.hold(producer_name(app, CLAIMS))
        check()
        decided = decide(fence_positions(log, app, names))
        progress = {
            progress_key(app, name): None if position is None else pack_position(position)
            for name, position in decided.items()
        }
        progress |= {
            saved_key(app, name): None if definition is None else msgspec.json.encode(definition)
            for name, definition in saved.items()
        }
        try:
            sequence = next_sequence(log, holder.producer)
            log.commit(holder, sequence, Commit(progress=progress))
        except FencedError:
            continue  # another runner is taking over now: see what it has saved
        return {name: position for name, position in decided.items() if position is not None}
    raise LogBusyError(
        f"several runners of app {app} keep taking over from each other: stop all but one"
    )


def fence_positions(log: Log, app: str, names: Sequence[str]) -> dict[str, Position | None]:
    """Fence every producer that could move one of the positions, and return the positions."""
    fenced: set[str] = set()
    while True:
        found = {name: read_position(log, app, name) for name in names}
        movers = {p.mover.producer for p in found.values() if p is not None and p.mover is not None}
        if not movers - fenced:
            return found
        for producer in movers - fenced:
            log.hold(producer)
        fenced |= movers
