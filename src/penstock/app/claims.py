"""Taking definitions over: who runs them, said in the log before anything is handled.

A runner may group definitions into queries as it likes, so the name under which a query
commits changes. Each definition's position names the producer that may move it. To take it
over, a runner fences that producer, reads the position again, and commits it under its own
name; all runners of an app do this as one producer, so that two cannot do it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.app.positions import Position, producer_name, progress_key, saved_position
from penstock.errors import FencedError, LogBusyError
from penstock.log.api import Commit, Log
from penstock.log.commit import next_sequence

TRIES_MAX = 20
CLAIMS = "+claims"
"""No query is called so: a name begins with a letter or digit."""
Decide = Callable[[Mapping[str, Position | None]], Mapping[str, Position | None]]


def claim(log: Log, app: str, names: Sequence[str], decide: Decide) -> dict[str, Position]:
    """Fence whoever runs these definitions, and save the positions that `decide` makes of theirs.

    `decide` is given the saved positions, which nobody can move any more, and may be called
    several times.
    """
    for _ in range(TRIES_MAX):
        holder = log.hold(producer_name(app, CLAIMS))
        found = _fenced(log, app, names)
        decided = decide(found)
        sequence = next_sequence(log, holder.producer)
        progress = {
            progress_key(app, name): None if position is None else msgspec.json.encode(position)
            for name, position in decided.items()
        }
        try:
            log.commit(holder, sequence, Commit(progress=progress))
        except FencedError:
            continue  # another runner claims at this moment: look again at what it has done
        return {name: position for name, position in decided.items() if position is not None}
    raise LogBusyError(f"several runners of app {app} take over from each other: stop one of them")


def _fenced(log: Log, app: str, names: Sequence[str]) -> dict[str, Position | None]:
    """The positions, after every producer that could move one was fenced."""
    fenced: set[str] = set()
    while True:
        found = {name: saved_position(log, app, name) for name in names}
        others = {p.producer for p in found.values() if p is not None and p.producer} - fenced
        if not others:
            return found
        for producer in others:
            log.hold(producer)
        fenced |= others
